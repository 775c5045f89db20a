"""The processes around the packer: each knows what it would say now, and has a key.

Rollout and reward actors and engines are the ledger tests' doubles with what may come between two moments of a crash:
a reward actor sends a scored group again when the packer's term is a new one, and a rollout or reward actor sends again
what has been waiting for long (P13). The ranks are a gang with one disk, as the trainer's are.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from actors.ledger import GroupFacts, Step
from actors.ledger.witness import START, next_chain
from schemas.messages import (
    Beat,
    CheckpointInfo,
    Manifest,
    Policy,
    RewardPeer,
    RewardState,
    RolloutState,
    StepReport,
    TrainerBeat,
    TrainerState,
)
from tests.actors.ledger.driver import Double, Engine, Hold, Reward, Rollout, manifest_of
from tests.explore.values import Names, key_of

KEPT_CHECKPOINTS = 2
RESEND_SECONDS = 2
"""Stands for `bus.resend_after`."""


@dataclass
class Watched(Double):
    """A process as the search sees it."""

    said: Hashable = "nothing"
    """What it last said; a beat that says something else is due at once, any other one after a second (P6)."""
    cached: tuple[Names, Hashable] | None = None
    """Its key; a copy, which is made to be changed, starts without."""

    def beat(self) -> Beat:
        """What it says now."""
        self.said = self.words()
        return super().beat()

    def words(self) -> Hashable:
        """What its beat tells."""
        raise NotImplementedError

    def mind(self, names: Names) -> Hashable:
        """What decides how it goes on, besides its words."""
        raise NotImplementedError

    def key(self, names: Names) -> Hashable:
        """The same for two processes that will behave the same."""
        if self.cached is None or self.cached[0] is not names:
            words = self.words()
            self.cached = (names, key_of((bool(self.run), words == self.said, words, self.mind(names)), names, 0.0))
        return self.cached[1]

    def second(self) -> None:
        """A second passes."""


def identity_of(peer: Any) -> str:
    """Of a peer that State names."""
    return f"{peer.name}/{peer.boot_id}"


@dataclass
class Sampler(Watched, Rollout):
    """A rollout actor. `sent` are the seconds since a group was sent."""

    sent: dict[Hold, int] = field(default_factory=dict)

    def words(self) -> Hashable:
        """Tickets and failures; its free slots follow from them and from what is sampled."""
        return frozenset(self.held), frozenset(self.failed), len(self.sampled)

    def mind(self, names: Names) -> Hashable:
        """What it has sampled, and where it has sent that."""
        sampled = frozenset((hold, facts.digest) for hold, facts in self.sampled.items())
        sent_to = frozenset((hold, names.get(to, to), self.sent[hold]) for hold, to in self.sent_to.items())
        return sampled, sent_to, tuple(names.get(identity_of(peer)) for peer in self.rewards)

    @property
    def rewards(self) -> list[RewardPeer]:
        """Whom it may send to, in a fixed order."""
        named = self.state.rewards if isinstance(self.state, RolloutState) else []
        return sorted(named, key=identity_of)

    def sample(self, hold: Hold, policy: Policy) -> GroupFacts:
        """Two samples of one ordinal are two payloads."""
        digest = f"{hold[0]}.{hold[1]} by {policy}"
        self.sampled[hold] = replace(super().sample(hold, policy), digest=digest)
        return self.sampled[hold]

    def send(self, hold: Hold, identity: str) -> GroupFacts:
        """To a reward actor."""
        self.sent_to[hold], self.sent[hold] = identity, 0
        return self.sampled[hold]

    def second(self) -> None:
        """What has waited long enough shall be sent again."""
        self.sent = {hold: self.sent[hold] + 1 for hold in self.sent_to}
        for hold in [hold for hold, seconds in self.sent.items() if seconds >= RESEND_SECONDS]:
            del self.sent_to[hold]


@dataclass
class Scorer(Watched, Reward):
    """A reward actor. `sent` are the term in which a scored group was sent, and the seconds since."""

    sent: dict[Hold, tuple[int, int]] = field(default_factory=dict)

    def words(self) -> Hashable:
        """What it has read, and what it could not score."""
        return frozenset(self.held), frozenset(self.failed)

    def mind(self, names: Names) -> Hashable:
        """What it has and what it believes the packer to have."""
        digests = frozenset((hold, facts.digest) for hold, facts in self.held.items())
        sent = frozenset((hold, self.term - term, seconds) for hold, (term, seconds) in self.sent.items())
        return digests, sent, self.state is not None

    @property
    def to_send(self) -> list[Hold]:
        """Scored groups that the packer of this term has not been sent, or not for long."""
        if not isinstance(self.state, RewardState):
            return []
        return [hold for hold in sorted(self.held) if hold not in self.failed and not self._has_sent(hold)]

    def _has_sent(self, hold: Hold) -> bool:
        term, seconds = self.sent.get(hold, (-1, 0))
        return term == self.term and seconds < RESEND_SECONDS

    def get(self, facts: GroupFacts) -> None:
        """A second copy of what it holds is dropped (P13)."""
        self.held.setdefault((facts.ordinal, facts.attempt), facts)

    def send(self, hold: Hold) -> GroupFacts:
        """To the packer."""
        self.sent[hold] = (self.term, 0)
        return self.held[hold]

    def _obey(self, state: RewardState) -> None:
        super()._obey(state)
        self.sent = {hold: sent for hold, sent in self.sent.items() if hold in self.held}

    def second(self) -> None:
        """What has been sent is a second older."""
        self.sent = {hold: (term, min(seconds + 1, RESEND_SECONDS)) for hold, (term, seconds) in self.sent.items()}


@dataclass
class Server(Watched, Engine):
    """An engine."""

    @property
    def target(self) -> Policy | None:
        """What it shall serve and does not; a State that comes late does not make it go back (P22)."""
        target = super().target
        older = target is not None and self.policy is not None and target.version < self.policy.version
        return None if older else target

    def words(self) -> Hashable:
        """What it serves."""
        return self.policy

    def mind(self, names: Names) -> Hashable:
        """What it shall serve."""
        return self.target


@dataclass(frozen=True)
class Checkpoint:
    """What a rank can go on from: a witness of all steps up to it, and the reports that were not confirmed by then."""

    trained: tuple[Step, ...]
    reports: tuple[int, ...]

    @property
    def chain(self) -> str:
        """Of witnesses."""
        return self.trained[-1].chain


@dataclass(frozen=True)
class Disk:
    """The checkpoints that all ranks see, by step. A value: a save makes a new one."""

    checkpoints: Mapping[int, Checkpoint] = field(default_factory=dict)

    def save(self, step: int, checkpoint: Checkpoint) -> "Disk":
        """With this one: those of later steps are of a dead history, and old ones go."""
        kept = sorted(number for number in self.checkpoints if number < step)[1 - KEPT_CHECKPOINTS :]
        return Disk({number: self.checkpoints[number] for number in kept} | {step: checkpoint})


@dataclass
class Rank(Watched):
    """A trainer rank. Rank 0 publishes, reports and saves for all; a save takes a while, and training goes on.

    starts ──State──▶ reads the disk, beats "running" ──order──▶ joins, publishes ──▶ trains, closes its step, trains …
    """

    kind: ClassVar[type[Beat]] = TrainerBeat
    phase: str = "starting"
    rank: int = 0
    num_ranks: int = 1
    save_every: int = 2
    last_step: int = 3
    disk: Disk = field(default_factory=Disk)
    """As it is now."""
    seen: tuple[tuple[int, str], ...] = ()
    """The checkpoints that its beats name: steps and chains."""
    incarnation: int = 0
    trained: tuple[Step, ...] = ()
    published: list[Manifest] = field(default_factory=list)
    batches: dict[int, Step] = field(default_factory=dict)
    reports: tuple[int, ...] = ()
    to_publish: bool = False
    to_close: bool = False
    to_save: tuple[int, Checkpoint] | None = None

    def _given(self) -> dict[str, Any]:
        names = ("name", "rank", "num_ranks", "save_every", "last_step", "disk")
        return {name: getattr(self, name) for name in names}

    @property
    def next_step(self) -> int:
        """The one that it trains next."""
        return len(self.trained) + 1

    def words(self) -> Hashable:
        """All that its beat says."""
        published = tuple(manifest.policy for manifest in self.published)
        progress = (self.phase, self.incarnation, self.next_step, self.seen, tuple(sorted(self.batches)))
        return *progress, published, self.reports

    def mind(self, names: Names) -> Hashable:
        """Its weights are the chain of what they were trained on."""
        chain = self.trained[-1].chain if self.trained else ""
        return chain, self.to_publish, self.to_close, self.to_save, self._keep_version

    def _fields(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "address": f"ipc://{self.identity}",
            "incarnation": self.incarnation,
            "next_step": self.next_step,
            "checkpoints": [CheckpointInfo(step=step, chain=chain) for step, chain in self.seen],
            "published": self.published,
            "reports": [StepReport(step=step, values={}) for step in self.reports],
            "received": np.array(sorted(self.batches), np.int64),
        }

    def _obey(self, state: TrainerState) -> None:
        self.reports = tuple(step for step in self.reports if step > state.recorded_step)
        if state.order == "exit":
            self.over = True
        elif self.phase == "running" and not self.incarnation and state.order in ("run", "finish"):
            self._join(state)

    def _join(self, state: TrainerState) -> None:
        if not state.incarnation:
            return
        self.incarnation, self.to_publish = state.incarnation, self.rank == 0
        if state.checkpoint:
            start = self.disk.checkpoints[state.checkpoint]
            self.trained, self.reports = start.trained, start.reports if self.rank == 0 else ()

    @property
    def can_read(self) -> bool:
        """Whether it has loaded, knows its run, and has not looked at the disk."""
        return self.phase == "starting" and bool(self.run)

    def read(self) -> None:
        """Look which checkpoints there are."""
        self.phase = "running"
        self._look()

    def _look(self) -> None:
        self.seen = tuple((step, checkpoint.chain) for step, checkpoint in sorted(self.disk.checkpoints.items()))

    def receive(self, incarnation: int, step: Step) -> None:
        """A batch counts for the incarnation that it was built for (P19)."""
        if incarnation == self.incarnation and step.step >= self.next_step:
            self.batches[step.step] = step

    @property
    def can_train(self) -> bool:
        """Whether the batch of its next step is there, and the last step is over."""
        return not self.to_publish and not self.to_close and self.next_step in self.batches

    def train(self) -> None:
        """One step, up to its publication."""
        step = self.batches.pop(self.next_step)
        assert step.chain == next_chain(self.chain, step.step, step.ordinals, step.dropped, step.digests)
        self.trained = (*self.trained, step)
        if self.rank == 0:
            self.publish()
            self.to_close = True

    @property
    def chain(self) -> str:
        """Of witnesses: what its weights have been trained on."""
        return self.trained[-1].chain if self.trained else START

    def publish(self) -> None:
        """Its weights, as the version that they are; three are kept, and those that may still be asked for."""
        self.to_publish = False
        old = {m.policy.version for m in self.published[:-2] if m.policy.version < self._keep_version}
        policy = Policy(lineage=self.incarnation, version=len(self.trained))
        self.published = [m for m in self.published if m.policy.version not in old] + [manifest_of(policy)]

    @property
    def _keep_version(self) -> int:
        return self.state.keep_version if isinstance(self.state, TrainerState) else 0

    def close(self) -> None:
        """Report the step, and begin to save it if that is due."""
        step, self.to_close = len(self.trained), False
        self.reports = (*self.reports, step)
        if step % self.save_every == 0 or step == self.last_step:
            self.to_save = (step, Checkpoint(self.trained, self.reports))

    def save(self) -> None:
        """The checkpoint is on the disk."""
        assert self.to_save is not None
        self.disk, self.to_save = self.disk.save(*self.to_save), None
        self._look()
