"""A simulated engine: continuous batching, where all running completions get a token in each decoding step.

The engine's clock counts decoding steps. It stands still while prompts are prefilled and new weights enter, and runs
slower with a larger batch. A completion of n tokens that starts at step s ends at step s + n, so the next end is the
top of a heap, however the batch changes meanwhile.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.simulate.cores import Cores
from actors.simulate.events import Events
from actors.simulate.models import Times, decode_step
from schemas.messages import PolicyVersion

SMALLEST = 1e-9
"""Decoding steps that count as none: the rounding of sums."""


@dataclass(eq=False)
class Turn:
    """Tokens to be sampled in a row for one completion."""

    owner: Any
    """Sampling of the group, to which the engine reports."""
    number: int
    """Number of the completion in its group."""
    tokens: int
    """Tokens of this turn."""
    prompt: int
    """New tokens of the prompt, to be prefilled before; 0 if another completion of the group brings them."""
    end: float = 0.0
    """Decoding step at which the turn ends, once it runs."""


class Engine:
    """Engine with a queue, running completions, and a version of the weights.

    Args:
        name: name in the run.
        events: the clock.
        times: figures of the models.
        cores: cores shared with others.
        num_slots: completions that run at once. None: no limit.
        num_processes: processes that compute when this engine does.
        mode: `weights.update_mode`.
        on_end: called with each turn that has ended.
    """

    def __init__(
        self,
        name: str,
        events: Events,
        times: Times,
        cores: Cores,
        num_slots: int | None,
        mode: str,
        on_end: Callable[[Turn], None],
    ) -> None:
        self.name, self._events, self._times, self._cores = name, events, times, cores
        self._num_slots, self._mode, self._on_end = num_slots, mode, on_end
        self.boot, self.alive, self.leaves = 1, True, False
        self.policy: PolicyVersion | None = None
        self.loading: PolicyVersion | None = None
        """Version on its way to this engine, or entering; None: none."""
        self._draining = False
        """True while a version waits for the end of the running completions (mode `drain`)."""
        self.reported_load = 0
        """Load in the engine's newest heartbeat."""
        self._running: list[tuple[float, int, Turn]] = []
        """Heap of (end, count, turn)."""
        self._waiting: deque[Turn] = deque()
        self._count = self._wakes = 0
        self._steps, self._taken_in, self._paused_until = 0.0, 0.0, 0.0
        """Decoding steps so far, the time up to which they are counted, and the end of a pause."""
        self._prefill_until = 0.0
        """Time until which further prompts share the start of those before."""
        self._slow = cores.factor
        self.busy_seconds = self.paused_seconds = self.slot_seconds = 0.0
        """Seconds with running completions, of them and others in pauses for weights, and seconds × completions."""
        self.tokens = 0
        """Tokens sampled so far, of turns that have ended or were given up."""
        cores.workers.append(self)

    @property
    def identity(self) -> str:
        """Name and boot id, as in ZeroMQ."""
        return f"{self.name}/{self.boot}"

    @property
    def load(self) -> int:
        """Completions running or waiting."""
        return len(self._running) + len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True while completions run or wait."""
        return self.load > 0

    # --- work ----------------------------------------------------------------------------------------------------

    def accept(self, turns: list[Turn]) -> None:
        """Queue turns; they start as soon as there is room."""
        self.take_in()
        self._waiting.extend(turns)
        self._admit()
        self._plan()

    def cancel(self, owner: Any) -> int:
        """Give up the turns of an owner; return the tokens sampled of turns that have not ended."""
        self.take_in()
        lost = sum(
            max(0, round(turn.tokens - (end - self._steps))) for end, _, turn in self._running if turn.owner is owner
        )
        self._running = [entry for entry in self._running if entry[2].owner is not owner]
        heapq.heapify(self._running)
        self._waiting = deque(turn for turn in self._waiting if turn.owner is not owner)
        self.tokens += lost
        self._admit()
        self._plan()
        return lost

    def kill(self) -> list[Any]:
        """End the process; return the owners of all its turns, each once."""
        self.take_in()
        turns = [turn for _, _, turn in self._running] + list(self._waiting)
        lost = sum(max(0, round(turn.tokens - (end - self._steps))) for end, _, turn in self._running)
        self.tokens += lost
        self._running, self._waiting = [], deque()
        self.alive, self.policy, self.loading, self._draining, self.boot = False, None, None, False, self.boot + 1
        self._wakes += 1
        self._cores.compute(self, 0)
        return list(dict.fromkeys(turn.owner for turn in turns))

    def restart(self) -> None:
        """Start the next process of this name, without weights."""
        self.alive, self._taken_in, self._paused_until = True, self._events.now, self._events.now

    def set_times(self, times: Times) -> None:
        """Go on with other figures."""
        self.take_in()
        self._times = times
        self._plan()

    def set_slowdown(self, factor: float) -> None:
        """Compute slower by a factor from now on."""
        self.take_in()
        self._slow = factor
        self._plan()

    # --- weights -------------------------------------------------------------------------------------------------

    def enter(self, policy: PolicyVersion, done: Callable[[], None]) -> None:
        """Switch to weights that have arrived; `done` is called once they are served."""
        if self._mode == "drain" and self._running:
            self._draining = True
            self._events.after(self._times.decode_seconds, self._enter_when_drained, policy, self.boot, done)
            return
        self._enter_when_drained(policy, self.boot, done)

    def _enter_when_drained(self, policy: PolicyVersion, boot: int, done: Callable[[], None]) -> None:
        if boot != self.boot or not self.alive:
            return
        self.take_in()
        if self._mode == "drain" and self._running:
            self._events.after(self._times.decode_seconds, self._enter_when_drained, policy, boot, done)
            return
        seconds = self._times.update_pause_seconds
        if self._mode == "interrupt":
            # keys and values of the tokens so far are computed again, the prompts included
            sampled = sum(turn.tokens - (end - self._steps) for end, _, turn in self._running)
            seconds += self._times.prefill_token_seconds * (sampled + self._times.prompt_tokens * len(self._running))
        self._pause(seconds)
        self.paused_seconds += seconds
        self._events.at(self._paused_until, self._entered, policy, boot, done)
        self._plan()

    def _entered(self, policy: PolicyVersion, boot: int, done: Callable[[], None]) -> None:
        if boot != self.boot or not self.alive:
            return
        self.take_in()
        self.policy, self.loading, self._draining = policy, None, False
        self._admit()
        self._plan()
        done()

    # --- the clock -----------------------------------------------------------------------------------------------

    def take_in(self) -> None:
        """Count the decoding steps up to now."""
        now = self._events.now
        start = max(self._taken_in, min(self._paused_until, now))
        batch = len(self._running)
        if batch:
            self._steps += (now - start) / (decode_step(self._times, batch) * self._slow)
            # a pause with completions under way is work of the engine too
            self.busy_seconds += now - self._taken_in
            self.slot_seconds += batch * (now - self._taken_in)
        self._taken_in = now

    def _pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self._events.now) + seconds * self._slow

    def _admit(self) -> None:
        """Start turns that wait, in order, while there is room."""
        prompts, num_before = 0, len(self._running)
        while (
            self._waiting and not self._draining and (self._num_slots is None or len(self._running) < self._num_slots)
        ):
            turn = self._waiting.popleft()
            # half a step: a turn that comes within a decoding step waits for its end
            turn.end = self._steps + turn.tokens + (0.5 if num_before else 0.0)
            prompts += turn.prompt
            self._count += 1
            heapq.heappush(self._running, (turn.end, self._count, turn))
            turn.owner.started(self)
        if prompts:
            seconds = self._times.prefill_token_seconds * prompts
            if self._events.now >= self._prefill_until:
                seconds += self._times.prefill_seconds
                self._prefill_until = self._events.now + decode_step(self._times, num_before) * self._slow
            self._pause(seconds)

    def _plan(self) -> None:
        """Wake up at the next end of a turn."""
        self._wakes += 1
        self._cores.compute(self, 1 if self._running else 0)
        if self._running:
            steps = max(0.0, self._running[0][0] - self._steps)
            start = max(self._events.now, self._paused_until)
            seconds = steps * decode_step(self._times, len(self._running)) * self._slow
            self._events.at(start + seconds, self._wake, self._wakes)

    def _wake(self, number: int) -> None:
        if number != self._wakes:  # something has changed since, and another wake-up was planned
            return
        self.take_in()
        ended = []
        while self._running and self._running[0][0] <= self._steps + SMALLEST:
            turn = heapq.heappop(self._running)[2]
            self.tokens += turn.tokens
            ended.append(turn)
        self._admit()
        self._plan()
        for turn in ended:
            self._on_end(turn)
