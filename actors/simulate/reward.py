"""A simulated reward actor: groups in, scored groups out, each kept until the packer has released it."""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from actors.ledger import GroupFacts, GroupState, Verdict
from actors.simulate.sampling import Hold, Sampling
from schemas.messages import RewardHeartbeat

if TYPE_CHECKING:
    from actors.simulate.ring import Ring


class Reward:
    """Reward actor.

    Args:
        ring: the simulation.
        name: name in the run.
        threads: groups scored at once.
    """

    def __init__(self, ring: "Ring", name: str, threads: int) -> None:
        self._ring, self.name, self.threads = ring, name, threads
        self.boot, self._sequence, self.alive, self.leaves = 1, 0, True, False
        self.held: dict[Hold, Sampling] = {}
        """Attempts from arrival to release."""
        self._waiting: deque[Sampling] = deque()
        self.num_scoring = 0
        self._has_news = True
        self.busy_seconds = 0.0
        """Seconds of scoring, over all threads; a group counts when it is done."""

    @property
    def identity(self) -> str:
        """Name and boot id, as in ZeroMQ."""
        return f"{self.name}/{self.boot}"

    @property
    def load(self) -> int:
        """Groups not scored yet."""
        return len(self._waiting) + self.num_scoring

    @property
    def has_work(self) -> bool:
        """True while a group is held."""
        return bool(self.held)

    def leave(self) -> None:
        """Say that no more groups are taken."""
        self._has_news = True
        self.beat()

    def beat(self) -> None:
        """Send the heartbeat of this second, if it has news."""
        if not (self.alive and self._has_news):
            return
        self._has_news = False
        self._sequence += 1
        heartbeat = RewardHeartbeat.model_construct(
            run=self._ring.machine.run,
            name=self.name,
            boot_id=str(self.boot),
            sequence=self._sequence,
            phase="draining" if self.leaves else "running",
            fingerprint=None,
            metrics_url="",
            term=0,
            address=f"inproc://{self.identity}",
            load=self.load,
            failures=[],
            holds=np.array(list(self.held), np.int64).reshape(-1, 2),
        )
        self._ring.send(self._ring.packer.hear, self.identity, heartbeat)

    def told(self) -> None:
        """Let go of the groups that are settled or dropped."""
        rows = self._ring.machine.groups.rows
        gone = [hold for hold in self.held if (row := rows.get(hold[0])) is None or row.state is not GroupState.ISSUED]
        for hold in gone:
            del self.held[hold]
        self._has_news = self._has_news or bool(gone)

    def get(self, sampling: Sampling) -> None:
        """Take a group; a second copy is dropped."""
        if sampling.hold in self.held:
            return
        self.held[sampling.hold], self._has_news = sampling, True
        self._waiting.append(sampling)
        self._start()

    def _start(self) -> None:
        while self._waiting and self.num_scoring < self.threads:
            sampling = self._waiting.popleft()
            seconds = self._ring.reward_seconds(sampling)
            self.num_scoring += 1
            self._ring.events.after(seconds, self._scored, sampling, seconds, self.boot)

    def _scored(self, sampling: Sampling, seconds: float, boot: int) -> None:
        if boot != self.boot or not self.alive:
            return
        self.num_scoring -= 1
        self.busy_seconds += seconds
        if sampling.hold in self.held:
            group = sampling.group
            assert sampling.oldest is not None
            facts = GroupFacts(
                ordinal=group.ordinal,
                attempt=sampling.attempt,
                example_key=group.example.key,
                num_completions=group.num_completions,
                oldest_version=sampling.oldest,
                policies=frozenset(sampling.policies),
                longest_sample=sampling.prompt_tokens + max(sampling.lengths),
                digest=str(group.ordinal),
                rejected_as=self._ring.rejected_as(sampling),
            )
            self._ring.send(self._ring.packer.score, facts, self._judge(sampling))
        self._start()

    def _judge(self, sampling: Sampling) -> "_Judged":
        return _Judged(self._ring, sampling)

    def kill(self) -> None:
        """End the process; its groups are sent elsewhere once the packer has missed it."""
        self.held, self._waiting, self.num_scoring, self.alive = {}, deque(), 0, False
        self.boot += 1

    def restart(self) -> None:
        """Start the next process of this name."""
        self.alive, self._has_news, self._sequence = True, True, 0
        self.beat()


class _Judged:
    """Receiver of the packer's verdict on a group."""

    def __init__(self, ring: "Ring", sampling: Sampling) -> None:
        self._ring, self._sampling = ring, sampling

    def __call__(self, verdict: Verdict) -> None:
        self._ring.judged(self._sampling, verdict)
