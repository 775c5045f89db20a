"""The processes around the packer: each knows what it would say now, and has a key.

Rollout and reward actors and engines are the ledger tests' doubles with what may come between two moments of a crash:
a reward actor sends a scored group again when the packer's term is a new one or when it has waited for long, and a
rollout follows `actors/rollout/loop.py`: only directives tell it that a group is lost (P13). The ranks are a gang with
one disk, as the trainer's are.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from actors.ledger import GroupFacts, Step
from actors.ledger.witness import START, next_chain
from bus.fence import Fence
from schemas.messages import (
    CheckpointInfo,
    DeviceUse,
    EnginePeer,
    Heartbeat,
    InferenceDirective,
    Manifest,
    PolicyVersion,
    RewardDirective,
    RewardPeer,
    RolloutDirective,
    StepReport,
    TrainerDirective,
    TrainerHeartbeat,
)
from tests.actors.ledger.driver import Double, Engine, Hold, Reward, Rollout, manifest_of
from tests.explore.values import Names, key_of

STRAY = "*"
"""Behind a name: the other process that was started under it."""
KEPT_CHECKPOINTS = 2
RESEND_SECONDS = 6
"""Stands for `bus.resend_after`: longer than a lease, as that is."""
UNNAMED_SECONDS = 10
"""Stands for `rollout.group_timeout`, in which a group is to be named: longer than RESEND_SECONDS, as that is."""
LONGEST_GAP = 5
"""Beyond it all times between two directives are the same: longer than a lease."""


@dataclass
class Watched(Double):
    """A process as the search sees it."""

    said: Hashable = "nothing"
    """What it last said; a heartbeat that says something else is due at once, any other one after a second (P6)."""
    clock: float = 0.0
    """Seconds since it was started."""
    stray: bool = False
    """Whether somebody has started it by hand, under the name of another process; it is not started again."""
    started: bool = True
    counted: tuple[int, float] | None = None
    """Term in which it has had its name for long enough, and since when."""
    cached: tuple[Names, Hashable] | None = None
    """Its key; a copy, which is made to be changed, starts without."""

    @property
    def label(self) -> str:
        """What the search calls it: its name, and for a stray process a mark behind it."""
        return self.name + STRAY * self.stray

    def heartbeat(self) -> Heartbeat:
        """What it says now."""
        self.said = self.words()
        return super().heartbeat()

    def words(self) -> Hashable:
        """What its heartbeat tells."""
        raise NotImplementedError

    def mind(self, names: Names) -> Hashable:
        """What decides how it goes on, besides its words."""
        raise NotImplementedError

    def key(self, names: Names) -> Hashable:
        """The same for two processes that will behave the same."""
        if self.cached is None or self.cached[0] is not names:
            words = self.words()
            parts = (bool(self.run), self.started, words == self.said, words, self.mind(names))
            self.cached = (names, key_of(parts, names, 0.0))
        return self.cached[1]

    def second(self) -> None:
        """A second passes."""
        self.clock += 1.0


def identity_of(peer: Any) -> str:
    """Of a peer that the directive names."""
    return f"{peer.name}/{peer.boot_id}"


@dataclass
class Sampler(Watched, Rollout):
    """A rollout actor. `sent` is when each group was sent, `receivers` where it went last."""

    accepted: dict[Hold, float] = field(default_factory=dict)
    """When each ticket came, by this process's clock."""
    named: set[Hold] = field(default_factory=set)
    """Groups that a reward actor has ever named."""
    sent: dict[Hold, float] = field(default_factory=dict)
    receivers: dict[Hold, str] = field(default_factory=dict)
    misled: bool = False
    """A directive has overtaken another one on its way to this process, which no connection allows."""

    def words(self) -> Hashable:
        """Tickets and failures; its free slots follow from them and from what is sampled."""
        return frozenset(self.held), frozenset(self.failed), len(self.sampled)

    def mind(self, names: Names) -> Hashable:
        """What it has sampled, and where it has sent that."""
        sampled = frozenset((hold, facts.digest) for hold, facts in self.sampled.items())
        sent_to = frozenset((hold, names.get(to, to), hold in self.sent_to) for hold, to in self.receivers.items())
        times = frozenset(self.named), self._waits(), self.misled, self._absences(names)
        return sampled, sent_to, times, tuple(names.get(identity_of(peer)) for peer in self.rewards), self.scoring

    def _waits(self) -> Hashable:
        """Return for how long directives have not told of each group, and for how long there has been none."""
        if not self.held:
            return ()
        there = self.rewards_there
        sent = {hold: self.sent[hold] for hold in self.sent_to}
        accepted = {hold: at for hold, at in self.accepted.items() if hold not in self.named}
        waits = [
            frozenset((hold, min(self.clock - max(at, there._told_since), longest + LONGEST_GAP)) for hold, at in times)
            for times, longest in ((sent.items(), RESEND_SECONDS), (accepted.items(), UNNAMED_SECONDS))
        ]
        return *waits, min(self.clock - there._told_at, LONGEST_GAP)

    def _absences(self, names: Names) -> Hashable:
        """For how long each reward actor that holds something of ours has been absent, and is on the way to be gone."""
        there = self.rewards_there
        since = {to: there._absent_since.get(to.partition("/")[2]) for to in self.sent_to.values()}
        return frozenset((names.get(to, to), at if at is None else self.clock - at) for to, at in since.items())

    @property
    def rewards(self) -> list[RewardPeer]:
        """Whom it may send to, in a fixed order."""
        named = self.directive.rewards if isinstance(self.directive, RolloutDirective) else []
        return sorted(named, key=identity_of)

    @property
    def engines(self) -> list[EnginePeer]:
        """Engines that may sample for it: those that serve a policy of a living history."""
        return self.directive.engines if isinstance(self.directive, RolloutDirective) else []

    @property
    def scoring(self) -> frozenset[Hold]:
        """The holds that a live reward actor names, by the newest directive: they are not sent again."""
        return (
            frozenset(map(tuple, self.directive.scoring.tolist()))
            if isinstance(self.directive, RolloutDirective)
            else frozenset()
        )

    @property
    def to_send(self) -> list[Hold]:
        """Sampled groups that no reward actor has, as far as the directive tells (P13)."""
        return [hold for hold in super().to_send if hold not in self.scoring]

    def receivers_for(self, hold: Hold) -> list[str]:
        """Return the reward actors that a group may be sent to: the last one only if there is no other."""
        known = [identity_of(peer) for peer in self.rewards]
        return [identity for identity in known if identity != self.receivers.get(hold)] or known

    def sample(self, hold: Hold, policy: PolicyVersion) -> GroupFacts:
        """Two samples of one ordinal are two payloads."""
        digest = f"{hold[0]}.{hold[1]} by {policy}"
        self.sampled[hold] = replace(super().sample(hold, policy), digest=digest)
        return self.sampled[hold]

    def send(self, hold: Hold, identity: str) -> GroupFacts:
        """To a reward actor."""
        self.sent_to[hold] = self.receivers[hold] = identity
        self.sent[hold] = self.clock
        return self.sampled[hold]

    def is_late(self, hold: Hold) -> bool:
        """Return whether directives have come for so long without naming a group that it is taken for lost."""
        return self.rewards_there.told_for(self.sent[hold]) > RESEND_SECONDS

    def _obey(self, directive: RolloutDirective) -> None:
        super()._obey(directive)
        for hold in self.held:
            self.accepted.setdefault(hold, self.heard_at)
        for table in (self.accepted, self.receivers, self.sent):
            for hold in table.keys() - self.held.keys():
                del table[hold]
        self.named = (self.named | self.scoring) & self.held.keys()
        for hold in [hold for hold in self.sampled if hold not in self.scoring]:
            self._miss(hold, directive.live_rewards)

    def _miss(self, hold: Hold, live: list[str]) -> None:
        """Act upon a directive that does not name a sampled group."""
        if hold not in self.named and self.rewards_there.told_for(self.accepted[hold]) > UNNAMED_SECONDS:
            self.fail(hold, "timeout")
            self.sent_to.pop(hold, None)
            del self.sampled[hold]
        elif hold in self.sent_to and self.is_late(hold) and self.sent_to[hold].partition("/")[2] in live:
            del self.sent_to[hold]


@dataclass
class Scorer(Watched, Reward):
    """A reward actor. `sent` are the term in which a scored group was sent, and the seconds since."""

    sent: dict[Hold, tuple[int, int]] = field(default_factory=dict)
    got: dict[Hold, float] = field(default_factory=dict)
    """When each group came, by this process's clock."""

    def words(self) -> Hashable:
        """What it has read, what it could not score, and whether it drains."""
        return frozenset(self.held), frozenset(self.failed), self.phase

    def mind(self, names: Names) -> Hashable:
        """What it has and what it believes the packer to have."""
        digests = frozenset((hold, facts.digest) for hold, facts in self.held.items())
        sent = frozenset((hold, self.term - term, seconds) for hold, (term, seconds) in self.sent.items())
        held_for = frozenset((hold, min(self.clock - self.got[hold], LONGEST_GAP)) for hold in self.held)
        return digests, sent, held_for, self.directive is not None

    @property
    def to_send(self) -> list[Hold]:
        """Scored groups that the packer of this term has not been sent, or not for long."""
        if not isinstance(self.directive, RewardDirective):
            return []
        return [hold for hold in sorted(self.held) if hold not in self.failed and not self._has_sent(hold)]

    def _has_sent(self, hold: Hold) -> bool:
        term, seconds = self.sent.get(hold, (-1, 0))
        return term == self.term and seconds < RESEND_SECONDS

    def receive(self, run: str, facts: GroupFacts) -> None:
        """A group of its run (P1); a second copy of what it holds is dropped (P13)."""
        if not Fence(self.run).refuses(run):
            self.get(facts)

    def get(self, facts: GroupFacts) -> None:
        """Without a look at where it is from."""
        self.held.setdefault((facts.ordinal, facts.attempt), facts)
        self.got.setdefault((facts.ordinal, facts.attempt), self.clock)

    def send(self, hold: Hold) -> GroupFacts:
        """To the packer."""
        self.sent[hold] = (self.term, 0)
        return self.held[hold]

    @property
    def can_leave(self) -> bool:
        """Whether it drains and has nothing left to do."""
        return self.phase == "draining" and not self.held

    def _obey(self, directive: RewardDirective) -> None:
        super()._obey(directive)
        self.sent = {hold: sent for hold, sent in self.sent.items() if hold in self.held}
        self.got = {hold: at for hold, at in self.got.items() if hold in self.held}

    def second(self) -> None:
        """What has been sent is a second older."""
        super().second()
        self.sent = {hold: (term, min(seconds + 1, RESEND_SECONDS)) for hold, (term, seconds) in self.sent.items()}


@dataclass
class Server(Watched, Engine):
    """An engine. With turns it looks at a directive and acts upon it later, when there may be another one."""

    order: tuple[int, bool] | None = None
    """Number of the turn that it acts upon, and whether it is its own; None: it has looked at nothing new."""

    @property
    def can_look(self) -> bool:
        """Whether there is an order about turns that it has not followed."""
        told = self.directive
        return (
            isinstance(told, InferenceDirective)
            and self.order is None
            and told.turn != 0
            and ((self.turn, self.holds_device) != (told.turn, told.has_turn))
        )

    def look(self) -> None:
        """Look at the newest directive."""
        assert isinstance(self.directive, InferenceDirective)
        self.order = self.directive.turn, self.directive.has_turn

    def follow(self) -> None:
        """Take memory, or give it back, as was ordered when it looked."""
        assert self.order is not None
        (self.turn, self.holds_device), self.order = self.order, None

    @property
    def target(self) -> PolicyVersion | None:
        """What it shall serve and does not; a directive that comes late does not make it go back (P22).

        After a fork a newer lineage has older versions; the actor tells by the number of the update.
        """
        target = super().target
        if target is None or self.policy is None:
            return target
        older = (target.lineage, target.version) < (self.policy.lineage, self.policy.version)
        return None if older else target

    def words(self) -> Hashable:
        """What it serves, and what it holds."""
        return self.policy, self.turn, self.holds_device

    def mind(self, names: Names) -> Hashable:
        """What it shall serve, and what it is told and about to do with the device."""
        told = self.directive
        turn = (told.turn, told.has_turn) if isinstance(told, InferenceDirective) else None
        return self.target, self.order, turn


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
    writer: int = 0
    """Incarnation whose rank 0 may write: it has taken the folder."""

    def up_to(self, last: int) -> "Disk":
        """Without the checkpoints of later steps, which are of a dead history."""
        return replace(self, checkpoints={step: one for step, one in self.checkpoints.items() if step <= last})

    def save(self, step: int, checkpoint: Checkpoint) -> "Disk":
        """With this one: those of later steps are of a dead history, and old ones go."""
        kept = sorted(number for number in self.checkpoints if number < step)[1 - KEPT_CHECKPOINTS :]
        checkpoints = {number: self.checkpoints[number] for number in kept} | {step: checkpoint}
        return replace(self, checkpoints=checkpoints)


@dataclass
class Rank(Watched):
    """A trainer rank. Rank 0 publishes, reports and saves for all; a save takes a while, and training goes on.

    starts ──directive──▶ reads the disk, says "running" ──order──▶ joins, publishes ──▶ trains, closes its step, trains
    …
    """

    kind: ClassVar[type[Heartbeat]] = TrainerHeartbeat
    phase: str = "starting"
    rank: int = 0
    num_ranks: int = 1
    save_every: int = 2
    last_step: int = 3
    turns: bool = False
    """Whether it says what it does with the device."""
    disk: Disk = field(default_factory=Disk)
    """As it is now."""
    seen: tuple[tuple[int, str], ...] = ()
    """The checkpoints that its heartbeats name: steps and chains."""
    incarnation: int = 0
    trained: tuple[Step, ...] = ()
    published: list[Manifest] = field(default_factory=list)
    batches: dict[int, Step] = field(default_factory=dict)
    reports: tuple[int, ...] = ()
    to_publish: bool = False
    to_close: bool = False
    to_save: tuple[int, Checkpoint] | None = None

    def _given(self) -> dict[str, Any]:
        names = ("name", "rank", "num_ranks", "save_every", "last_step", "disk", "turns")
        return {name: getattr(self, name) for name in names}

    @property
    def next_step(self) -> int:
        """The one that it trains next."""
        return len(self.trained) + 1

    def words(self) -> Hashable:
        """All that its heartbeat says."""
        published = tuple(manifest.policy for manifest in self.published)
        progress = (self.phase, self.incarnation, self.next_step, self.seen, tuple(sorted(self.batches)))
        return *progress, published, self.reports, self.device

    def mind(self, names: Names) -> Hashable:
        """Its weights are the chain of what they were trained on."""
        chain = self.trained[-1].chain if self.trained else ""
        return chain, self.to_publish, self.to_close, self.to_save, self._keep_version, self.has_turn

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
            "device": self.device,
        }

    @property
    def has_turn(self) -> bool:
        """Whether it may load."""
        return isinstance(self.directive, TrainerDirective) and self.directive.has_turn

    @property
    def device(self) -> DeviceUse:
        """It loads, joins and publishes with the device, and trains the batches that it has."""
        if not self.turns or self.over:
            return "free"
        if self.phase == "starting":
            return "wanted"
        return "held" if not self.incarnation or self.to_publish or self.batches else "free"

    def _obey(self, directive: TrainerDirective) -> None:
        self.reports = tuple(step for step in self.reports if step > directive.recorded_step)
        if directive.order == "exit":
            self.over = True
        elif self.phase == "running" and not self.incarnation and directive.order in ("run", "finish"):
            self._join(directive)

    def _join(self, directive: TrainerDirective) -> None:
        if not directive.incarnation:
            return
        if self.rank == 0 and self.disk.writer > directive.incarnation:
            self.over = True  # the order is an old one
            return
        self.incarnation, self.to_publish = directive.incarnation, self.rank == 0
        if self.rank == 0:
            self.disk = replace(self.disk.up_to(directive.checkpoint), writer=directive.incarnation)
            self._look()
        if directive.checkpoint:
            start = self.disk.checkpoints[directive.checkpoint]
            self.trained, self.reports = start.trained, start.reports if self.rank == 0 else ()

    @property
    def can_read(self) -> bool:
        """Whether it has loaded, knows its run, and has not looked at the disk."""
        return self.phase == "starting" and bool(self.run) and self.has_turn

    def read(self) -> None:
        """Look which checkpoints there are."""
        self.phase = "running"
        self._look()

    def _look(self) -> None:
        self.seen = tuple((step, checkpoint.chain) for step, checkpoint in sorted(self.disk.checkpoints.items()))

    def receive(self, run: str, term: int, incarnation: int, step: Step) -> None:
        """A batch counts for the run, the term and the incarnation that it was built for (P1, P2, P19)."""
        if (
            not Fence(self.run, self.term).refuses(run, term)
            and incarnation == self.incarnation
            and step.step >= self.next_step
        ):
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
        policy = PolicyVersion(lineage=self.incarnation, version=len(self.trained))
        self.published = [m for m in self.published if m.policy.version not in old] + [manifest_of(policy)]

    @property
    def _keep_version(self) -> int:
        return self.directive.keep_version if isinstance(self.directive, TrainerDirective) else 0

    def close(self) -> None:
        """Report the step, and begin to save it if that is due."""
        step, self.to_close = len(self.trained), False
        self.reports = (*self.reports, step)
        if step % self.save_every == 0 or step == self.last_step:
            self.to_save = (step, Checkpoint(self.trained, self.reports))

    def save(self) -> None:
        """The checkpoint is on the disk, unless another process writes there now."""
        assert self.to_save is not None
        if self.disk.writer != self.incarnation:
            self.over = True
            return
        self.disk, self.to_save = self.disk.save(*self.to_save), None
        self._look()
