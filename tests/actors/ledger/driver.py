"""A ring without sockets, threads or a clock: the machine, its store, and doubles of all actors.

A double sends the heartbeats of an actor, obeys every directive as an actor would, and does its work only when it is
told to, so that a test, a random walk or a search decides what happens when and what gets lost:

    ring = Ring(Settings(groups_per_step=2, ...))      rollout = ring.add(Rollout("a", slots=2))
    ring.turn()            everybody sends a heartbeat; the machine decides; the store commits; all answers arrive
    ring.wait(3.1, rollout)   3.1 s pass in which everybody sends heartbeats but this one
    ring.restart_packer()  what was not committed is gone
"""

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar

import numpy as np

from actors.ledger import EvalRule, ExampleRef, Group, GroupFacts, Machine, Settings, Step, Store, Verdict, replies
from actors.ledger.witness import START, next_chain
from actors.rollout.presence import Presence
from bus.fence import Fence
from schemas.messages import (
    AttemptFailure,
    CheckpointInfo,
    Directive,
    Heartbeat,
    InferenceDirective,
    InferenceHeartbeat,
    Manifest,
    ObserverDirective,
    PolicyVersion,
    RewardDirective,
    RewardHeartbeat,
    RolloutDirective,
    RolloutHeartbeat,
    Ticket,
    TrainerDirective,
    TrainerHeartbeat,
    fingerprint,
)

Hold = tuple[int, int]
HEARTBEAT_SECONDS = 1.0
SETTINGS = {"groups_per_step": 2, "max_steps": 4, "group_size": 2, "sequence_len": 64}


def settings(**changes: Any) -> Settings:
    """Steps of two groups, four of them, unless said otherwise."""
    rule = {name.removeprefix("eval_"): changes.pop(name) for name in list(changes) if name.startswith("eval_")}
    rules = {"eval_rules": rule.pop("rules")} if "rules" in rule else {}
    return Settings(**SETTINGS | {"evaluation": EvalRule(**rule)} | rules | changes)


@dataclass
class Double:
    """What all actors have: name, boot, run, sequence number, the newest directive."""

    name: str
    kind: ClassVar[type[Heartbeat]]
    boot: int = 1
    run: str = ""
    phase: str = "running"
    term: int = 0
    sequence: int = 0
    directive: Directive | None = None
    heard_at: float = 0.0
    over: bool = False
    """It was told to begin again, or was refused: an actor's process would end here."""

    @property
    def identity(self) -> str:
        """As in ZeroMQ."""
        return f"{self.name}/{self.boot}"

    def heartbeat(self) -> Heartbeat:
        """What it says now."""
        self.sequence += 1
        common = {"name": self.name, "boot_id": str(self.boot), "sequence": self.sequence, "phase": self.phase}
        said = None if self.run else fingerprint()
        return self.kind(run=self.run, term=self.term, fingerprint=said, **common, **self._fields())

    def take(self, directive: Directive, now: float) -> None:
        """A directive arrives, at this time of the process's clock."""
        if Fence(self.run, self.term).refuses(directive.run, directive.term):
            return
        if directive.refusal:
            self.over = True
            return
        self.run, self.term = directive.run, directive.term
        if isinstance(directive, ObserverDirective):  # it does not count yet: another process of its name does
            return
        self.directive, self.heard_at = directive, now
        if not self.over:
            self._obey(directive)

    def restart(self) -> None:
        """A new process of the same name, which remembers nothing."""
        fresh = type(self)(**self._given())
        self.__dict__.update(fresh.__dict__ | {"boot": self.boot + 1})

    def _given(self) -> dict[str, Any]:
        """What a new process is started with."""
        return {"name": self.name}

    def _fields(self) -> dict[str, Any]:
        """The part of the heartbeat that is of this kind."""
        raise NotImplementedError

    def _obey(self, directive: Any) -> None:
        """Do what the directive says."""


@dataclass
class Rollout(Double):
    """Holds tickets; each is sampled or fails when told so, and is kept until it is released."""

    kind: ClassVar[type[Heartbeat]] = RolloutHeartbeat
    slots: int = 4
    lease: float = 3.0
    held: dict[Hold, Ticket] = field(default_factory=dict)
    sampled: dict[Hold, GroupFacts] = field(default_factory=dict)
    failed: dict[Hold, AttemptFailure] = field(default_factory=dict)
    sent_to: dict[Hold, str] = field(default_factory=dict)
    rewards_there: Presence = field(init=False)

    def __post_init__(self) -> None:
        """Nobody has been named yet."""
        self.rewards_there = Presence(self.lease)

    def _given(self) -> dict[str, Any]:
        return {"name": self.name, "slots": self.slots, "lease": self.lease}

    def _fields(self) -> dict[str, Any]:
        busy = len(self.held) - len(self.sampled) - len(self.failed)
        return {
            "free_slots": max(0, self.slots - busy),
            "holds": pairs(self.held),
            "failures": list(self.failed.values()),
        }

    def _obey(self, directive: RolloutDirective) -> None:
        for ordinal, attempt in directive.release.tolist():
            for table in (self.held, self.sampled, self.failed, self.sent_to):
                table.pop((ordinal, attempt), None)
        for ticket in directive.tickets:
            self.held.setdefault((ticket.ordinal, ticket.attempt), ticket)
        self.rewards_there.note(self.heard_at, directive.term, directive.live_rewards, directive.rewards)
        gone = {identity for identity in self.sent_to.values() if self.rewards_there.is_gone(*identity.split("/"))}
        self.sent_to = {hold: identity for hold, identity in self.sent_to.items() if identity not in gone}

    @property
    def to_sample(self) -> list[Hold]:
        """Tickets under way."""
        return [hold for hold in sorted(self.held) if hold not in self.sampled and hold not in self.failed]

    @property
    def to_send(self) -> list[Hold]:
        """Sampled groups that no reward actor has which may still be there (P13)."""
        return [hold for hold in sorted(self.sampled) if hold not in self.sent_to]

    def sample(self, hold: Hold, policy: PolicyVersion) -> GroupFacts:
        """Finish a ticket with this policy."""
        self.sampled[hold] = facts_of(self.held[hold], policy)
        return self.sampled[hold]

    def fail(self, hold: Hold, reason: str = "engine") -> None:
        """Give a ticket up."""
        self.failed[hold] = failure_of(hold, reason)


@dataclass
class Reward(Double):
    """Names what it has got until it is released."""

    kind: ClassVar[type[Heartbeat]] = RewardHeartbeat
    held: dict[Hold, GroupFacts] = field(default_factory=dict)
    failed: dict[Hold, AttemptFailure] = field(default_factory=dict)

    def _fields(self) -> dict[str, Any]:
        return {
            "address": f"ipc://{self.identity}",
            "load": len(self.held) - len(self.failed),
            "holds": pairs(self.held),
            "failures": list(self.failed.values()),
        }

    def _obey(self, directive: RewardDirective) -> None:
        for ordinal, attempt in directive.release.tolist():
            self.held.pop((ordinal, attempt), None)
            self.failed.pop((ordinal, attempt), None)

    def get(self, facts: GroupFacts) -> None:
        """A group arrives."""
        self.held[facts.ordinal, facts.attempt] = facts

    def fail(self, hold: Hold, reason: str = "reward_error") -> None:
        """Scoring went wrong."""
        self.failed[hold] = failure_of(hold, reason)


@dataclass
class Engine(Double):
    """Serves a policy; loads the one that the directive names when told to."""

    kind: ClassVar[type[Heartbeat]] = InferenceHeartbeat
    policy: PolicyVersion | None = None
    engine_state: str = "clean"
    turn: int = 0
    holds_device: bool = False

    def _fields(self) -> dict[str, Any]:
        engine_state = self.engine_state if self.policy else "starting"
        rest = {"load": 0, "generated_tokens": 0, "holds_two_versions": False, "update_seconds": {}}
        device = {"turn": self.turn, "holds_device": self.holds_device}
        return {"url": f"http://{self.identity}", "engine_state": engine_state, "policy": self.policy} | rest | device

    @property
    def target(self) -> PolicyVersion | None:
        """What it shall serve and does not."""
        manifest = self.directive.manifest if isinstance(self.directive, InferenceDirective) else None
        return manifest.policy if manifest and manifest.policy != self.policy else None

    def load(self, trainer: "Trainer") -> None:
        """Switch to what the directive names, if the rank that published it still has it."""
        if self.target in [manifest.policy for manifest in trainer.published]:
            self.policy = self.target


@dataclass
class Disk:
    """What outlives a rank's process: checkpoints with the witness of all steps up to them."""

    chains: dict[int, str] = field(default_factory=dict)
    witness: dict[int, list[Step]] = field(default_factory=dict)


@dataclass
class Trainer(Double):
    """One rank; trains, publishes and saves a batch that it has when told to."""

    kind: ClassVar[type[Heartbeat]] = TrainerHeartbeat
    rank: int = 0
    num_ranks: int = 1
    save_every: int = 2
    last_step: int = 4
    keep_published: int = 3
    disk: Disk = field(default_factory=Disk)
    incarnation: int = 0
    next_step: int = 1
    chain: str = START
    trained: list[Step] = field(default_factory=list)
    published: list[Manifest] = field(default_factory=list)
    batches: dict[int, Step] = field(default_factory=dict)

    def _given(self) -> dict[str, Any]:
        names = ("name", "rank", "num_ranks", "save_every", "last_step", "keep_published", "disk")
        return {name: getattr(self, name) for name in names}

    def _fields(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "address": f"ipc://{self.identity}",
            "incarnation": self.incarnation,
            "next_step": self.next_step,
            "checkpoints": [CheckpointInfo(step=step, chain=chain) for step, chain in self.disk.chains.items()],
            "published": self.published,
            "reports": [],
            "received": np.array(sorted(self.batches), np.int64),
        }

    def _obey(self, directive: TrainerDirective) -> None:
        if directive.order == "exit":
            self.over = True
        elif directive.order in ("run", "finish") and not self.incarnation and directive.incarnation:
            self._join(directive)

    def _join(self, directive: TrainerDirective) -> None:
        step, self.incarnation = directive.checkpoint, directive.incarnation
        self.chain, self.trained = self.disk.chains.get(step, START), list(self.disk.witness.get(step, []))
        self.next_step = step + 1
        self._publish(step)

    def get(self, step: Step) -> None:
        """A batch arrives."""
        if step.step >= self.next_step:
            self.batches[step.step] = step

    @property
    def can_train(self) -> bool:
        """Whether the batch of its next step is there."""
        return self.next_step in self.batches

    def train(self) -> None:
        """One step, as the actor does it."""
        step = self.batches.pop(self.next_step)
        self.chain = next_chain(self.chain, step.step, step.ordinals, step.dropped, step.digests)
        self.trained.append(step)
        self._publish(step.step)
        if step.step % self.save_every == 0 or step.step == self.last_step:
            self.disk.chains[step.step], self.disk.witness[step.step] = self.chain, list(self.trained)
        self.next_step = step.step + 1

    def _publish(self, version: int) -> None:
        keep = self.directive.keep_version if isinstance(self.directive, TrainerDirective) else 0
        old = {m.policy.version for m in self.published[: -self.keep_published] if m.policy.version < keep}
        kept = [m for m in self.published if m.policy.version not in old]
        self.published = [*kept, manifest_of(PolicyVersion(lineage=self.incarnation, version=version))]


def hear(machine: Machine, now: float, identity: str, heartbeat: Heartbeat) -> bool:
    """Give a heartbeat to the machine as the packer does; return whether it has only renewed a lease."""
    known = machine.peers.heartbeat_of(identity)
    repeated = known is not None and heartbeat.at_rest and heartbeat.repeats(known)
    if known is not None and repeated and machine.renewed(now, identity, known, heartbeat.sequence):
        return True
    machine.heard(now, identity, heartbeat)
    return False


class Ring:
    """One run: a machine with a store, a clock that only moves when told to, and the doubles.

    Steps are compacted only where a test asks for it: all others look at every step.
    """

    def __init__(
        self,
        settings: Settings,
        num_evals: int = 0,
        store: Store | None = None,
        compact: bool = False,
        eval_labels: Iterable[str] = ("held_out",),
    ) -> None:
        self.settings = settings if compact else replace(settings, keep_steps=sys.maxsize)
        self.now, self.store = 100.0, store or Store(":memory:")
        self.doubles: list[Double] = []
        self.eval_examples = [ExampleRef(label, i, f"e{i}") for label in eval_labels for i in range(num_evals)]
        self.lose: Callable[[str, str], bool] = lambda direction, identity: False
        """Whether a "heartbeat", "directive" or "batch" of a peer is lost."""
        self.directives: dict[str, Directive | None] = {}
        self._renewed: set[str] = set()
        """Peers whose newest heartbeat has repeated the one before: they are answered by their last directive."""
        self.machine = self.new_machine()

    def new_machine(self) -> Machine:
        """What a packer that starts now would have in memory, before it restores."""
        stored = self.store.value("num_issued") or {"train": 0}
        numbers = count(stored["train"])

        labels = list(self.settings.shares) or ["words"]

        def draw(excluded: Collection[str] = ()) -> ExampleRef:
            number = next(numbers)
            left = [label for label in labels if label not in excluded] or labels
            return ExampleRef(left[number % len(left)], number, f"k{number}")

        run, term = str(self.store.run), self.store.term
        return Machine(self.settings, run, term, self.now, draw, self.eval_examples, "ipc://packer")

    def add(self, *doubles: Any) -> Any:
        """Let actors join; returns the first."""
        self.doubles += doubles
        return doubles[0]

    def kill(self, double: Double) -> None:
        """It sends no more heartbeats."""
        self.doubles.remove(double)

    # --- what happens --------------------------------------------------------------------------------------------

    def heartbeat(self, *doubles: Double) -> None:
        """These send heartbeats now."""
        for double in doubles:
            if not self.lose("heartbeat", double.identity) and hear(
                self.machine, self.now, double.identity, double.heartbeat()
            ):
                self._renewed.add(double.identity)

    def decide(self) -> dict[str, Directive | None]:
        """One round of the packer; returns the directives said in it."""
        self.probe()
        self.machine.decide(self.now)
        self.commit()
        for step in range(self.machine.recorded_step + 1, self.machine.trained_step + 1):
            self.machine.note_recorded(step)
        return self.say()

    def probe(self) -> None:
        """Tell the machine of contested names whose holder is dead: no connection of it is left."""
        living = {double.identity for double in self.doubles}
        for identity in self.machine.peers.take_contested() - living:
            self.machine.lost(self.now, identity)

    def commit(self) -> None:
        """Write what has changed."""
        self.store.commit(self.machine.take_changes(), {})

    def say(self) -> dict[str, Directive | None]:
        """Directives and batches leave, and arrive unless they are lost."""
        said = {identity.decode(): directive for identity, directive in replies.directives(self.machine).items()}
        self.directives.update(said)
        # as the control server does
        renewed, self._renewed = self._renewed, set()
        said |= {identity: self.directives[identity] for identity in renewed - said.keys()}
        doubles = {double.identity: double for double in self.doubles}
        for identity, directive in sorted(said.items()):
            if directive is not None and identity in doubles and not self.lose("directive", identity):
                doubles[identity].take(directive, self.now)
        for identity, _, step in self.machine.batches_wanted():
            trainer = doubles.get(identity)
            if isinstance(trainer, Trainer) and not self.lose("batch", identity):
                trainer.get(step)
        return said

    def turn(self, *silent: Double) -> dict[str, Directive | None]:
        """Everybody but these sends a heartbeat; the packer does one round, two if somebody takes another's place."""
        sending = [double for double in self.doubles if double not in silent]
        self.heartbeat(*sending)
        directives = self.decide()
        counted = self.machine.peers.identities()
        if newcomers := [d for d in sending if d.run and not d.over and d.identity not in counted]:
            self.heartbeat(*newcomers)  # at once, as a client does when it has heard its first directive
            directives |= self.decide()
        return directives

    def wait(self, seconds: float, *silent: Double) -> None:
        """Time goes by, and everybody but these sends heartbeats each second and at its end."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + HEARTBEAT_SECONDS)
            self.turn(*silent)

    def score(self, facts: GroupFacts) -> Verdict:
        """A scored group reaches the packer."""
        return self.machine.scored(facts)

    def settle(self, rollout: Rollout, policy: PolicyVersion, *ordinals: int) -> None:
        """A rollout samples these ordinals (or all it has), and their scored groups reach the packer."""
        for hold in list(rollout.to_sample):
            if not ordinals or hold[0] in ordinals:
                self.score(rollout.sample(hold, policy))

    def row(self, ordinal: int) -> Group:
        """The ledger's row of a group."""
        return self.machine.groups.rows[ordinal]

    def restart_packer(self) -> None:
        """A new packer over the same store."""
        self.store.term += 1
        self.machine, self._renewed = self.new_machine(), set()
        self.restore(self.machine)

    def restore(self, machine: Machine) -> None:
        """What a packer does at its start."""
        store = self.store
        digests = {g.ordinal: digest_of(g.ordinal) for g in store.groups()}
        machine.restore(self.now, store.groups(), store.steps(), store.values(), digests)


def facts_of(ticket: Ticket, policy: PolicyVersion) -> GroupFacts:
    """A good group for a ticket."""
    return GroupFacts(
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        example_key=ticket.example_key,
        num_completions=ticket.num_completions,
        oldest_version=policy.version,
        policies=frozenset({policy}),
        longest_sample=8,
        digest=digest_of(ticket.ordinal),
    )


def policy(version: int, lineage: int = 1) -> PolicyVersion:
    """Short for tests."""
    return PolicyVersion(lineage=lineage, version=version)


def digest_of(ordinal: int) -> str:
    """Stands for sha256 of a payload."""
    return f"digest of {ordinal}"


def failure_of(hold: Hold, reason: str) -> AttemptFailure:
    """As an actor reports it."""
    return AttemptFailure(ordinal=hold[0], attempt=hold[1], reason=reason, detail="it broke")


def manifest_of(policy: PolicyVersion) -> Manifest:
    """Of a version on disk."""
    name = str(policy)
    return Manifest(policy=policy, channel="filesystem", content="full", uri=f"/{name}", digest=name, num_bytes=1)


def pairs(holds: Iterable[Hold]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """As heartbeats carry them."""
    return np.array(sorted(holds), np.int64).reshape(-1, 2)
