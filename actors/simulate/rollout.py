"""A simulated rollout actor: takes tickets, asks engines, sends groups to reward actors, keeps them until released."""

from typing import TYPE_CHECKING

import numpy as np

from actors.ledger import Group
from actors.simulate.engine import Turn
from actors.simulate.models import completion_lengths
from actors.simulate.sampling import Hold, Sampling
from schemas.messages import RolloutHeartbeat

if TYPE_CHECKING:
    from actors.simulate.ring import Ring

COALESCE_SECONDS = 0.003
"""Seconds in which several freed slots share a heartbeat, as in `actors.rollout.loop`."""


class Rollout:
    """Rollout actor.

    Args:
        ring: the simulation.
        name: name in the run.
        slots: groups sampled at once.
    """

    def __init__(self, ring: "Ring", name: str, slots: int) -> None:
        self._ring, self.name, self.slots = ring, name, slots
        self.boot, self._sequence, self.alive, self.leaves = 1, 0, True, False
        self.held: dict[Hold, Sampling] = {}
        """Attempts from the ticket to the release."""
        self._attempts: dict[int, int] = {}
        """Attempt of each ordinal in `held`."""
        self.num_sampling = 0
        """Attempts that are not sampled yet."""
        self._reports = False
        """True while a heartbeat is on its way."""
        self.slot_seconds, self._counted_at = 0.0, 0.0
        """Seconds × attempts being sampled, and the time up to which they are counted."""

    @property
    def identity(self) -> str:
        """Name and boot id, as in ZeroMQ."""
        return f"{self.name}/{self.boot}"

    @property
    def has_work(self) -> bool:
        """True while a group is held."""
        return bool(self.held)

    def take_in(self) -> None:
        """Count the slots in use up to now."""
        now = self._ring.events.now
        self.slot_seconds += self.num_sampling * (now - self._counted_at)
        self._counted_at = now

    def report(self) -> None:
        """Send a heartbeat soon; all news until then share it."""
        if not self._reports and self.alive:
            self._reports = True
            self._ring.events.after(COALESCE_SECONDS, self._send_heartbeat, self.boot)

    def _send_heartbeat(self, boot: int) -> None:
        if boot != self.boot or not self.alive:
            return
        self._reports = False
        self._sequence += 1
        # without validation and defaults: the values are right, and there may be millions of heartbeats
        heartbeat = RolloutHeartbeat.model_construct(
            run=self._ring.machine.run,
            name=self.name,
            boot_id=str(self.boot),
            sequence=self._sequence,
            phase="draining" if self.leaves else "running",
            fingerprint=None,
            metrics_url="",
            term=0,
            free_slots=0 if self.leaves else self.slots - self.num_sampling,
            failures=[],
            holds=np.array(list(self.held), np.int64).reshape(-1, 2),
        )
        self._ring.send(self._ring.packer.hear, self.identity, heartbeat)

    def follow(self, group: Group) -> None:
        """Take a ticket, or let go of an attempt, as the row of a group in the ledger says now."""
        ordinal, mine = group.ordinal, group.holder == self.identity
        for hold in [hold for hold in self._holds_of(ordinal) if not mine or hold[1] != group.attempt]:
            self._release(hold)
        if mine and (ordinal, group.attempt) not in self.held:
            self._take(group)

    def _holds_of(self, ordinal: int) -> list[Hold]:
        attempt = self._attempts.get(ordinal)
        return [] if attempt is None else [(ordinal, attempt)]

    def _take(self, group: Group) -> None:
        ring = self._ring
        rule = ring.settings.eval_rule(group.example.environment)
        longest = ring.settings.max_tokens if group.policy is None else rule.max_tokens or ring.settings.max_tokens
        num_turns, room = max(1, round(ring.times.turns)), ring.settings.sequence_len
        prompt = max(1, min(round(ring.times.prompt_tokens), room // 2))
        # rollout.max_tokens limits each turn, packer.sequence_len the whole sample
        longest = min(longest * num_turns, room - prompt)
        lengths = completion_lengths(ring.times, group.seed, group.num_completions, longest)
        sampling = Sampling(group, self, group.attempt, prompt, lengths, num_turns)
        self.held[sampling.hold] = sampling
        self._attempts[group.ordinal] = group.attempt
        ring.holders[group.ordinal] = self
        self.take_in()
        self.num_sampling += 1
        ring.requests.ask(sampling)

    def _release(self, hold: Hold) -> None:
        sampling = self.held.pop(hold)
        del self._attempts[hold[0]]
        if self._ring.holders.get(hold[0]) is self:
            del self._ring.holders[hold[0]]
        if not sampling.is_over:
            self._end(sampling)
            if sampling.engine is not None:
                self._ring.meter.lost_tokens += sampling.engine.cancel(sampling)
            self.report()

    def _end(self, sampling: Sampling) -> None:
        sampling.is_over = True
        self.take_in()
        self.num_sampling -= 1

    def turn_ended(self, turn: Turn) -> None:
        """Go on with a completion whose turn has ended: the environment's answer, or the end of the group."""
        sampling: Sampling = turn.owner
        if sampling.is_over:
            return
        if sampling.turns_left[turn.number]:
            self._ring.requests.ask_environment(sampling, turn.number)
            return
        sampling.num_open -= 1
        if not sampling.num_open:
            self._end(sampling)
            sampling.is_sampled = True
            self._ring.send(self._ring.send_to_reward, sampling)
            self.report()

    def kill(self) -> None:
        """End the process with all that it holds."""
        for sampling in self.held.values():
            if not sampling.is_over:
                self._end(sampling)
                if sampling.engine is not None:
                    self._ring.meter.lost_tokens += sampling.engine.cancel(sampling)
        self.held, self._attempts, self.alive, self._reports = {}, {}, False, False
        self.boot += 1

    def restart(self) -> None:
        """Start the next process of this name."""
        self.alive, self._sequence = True, 0
        self.report()
