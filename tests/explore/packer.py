"""The packer of the search: the real Machine, what is committed, and the order of a round.

A round is `hear`, `decide`, `record`, `commit`, `send`; it may end, with the process, after any of them.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from actors.ledger import Changes, ExampleRef, Group, GroupFacts, Machine, Settings, Step, Verdict, replies
from schemas.messages import Heartbeat, RolloutDirective, TrainerHeartbeat
from tests.actors.ledger.driver import hear
from tests.explore.rules import Violation
from tests.explore.values import Names, clone, key_of

PACKER = "packer"
RUN = "the run"


class Parcel(NamedTuple):
    """A message on its way. `to` is an identity, or the packer, whoever that is by then; `run` is its sender's."""

    label: str
    to: str
    content: Any
    run: str


class Batch(NamedTuple):
    """A step's batch, as a packer of this term has built it for this incarnation of the gang."""

    term: int
    incarnation: int
    step: Step


class Lost(NamedTuple):
    """The packer has found no connection to the holder of a contested name."""

    identity: str


Inflow = tuple[str, Heartbeat] | GroupFacts | Lost
"""A heartbeat with the identity of who has sent it, a scored group, or what a probe has found."""


@dataclass(frozen=True)
class Stored:
    """What is committed, as SQLite would have it. A value: a commit makes a new one."""

    groups: Mapping[int, Group] = field(default_factory=dict)
    payloads: Mapping[int, GroupFacts] = field(default_factory=dict)
    steps: Mapping[int, Step] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Step, ...] = ()
    """All steps of the live history, for the rules alone: the ledger forgets those that it has compacted."""

    def commit(self, changes: Changes, payloads: Mapping[int, GroupFacts]) -> "Stored":
        """With one round written, rows copied: the machine goes on changing its own.

        Raises:
            Violation: a step is there already; its row is inserted, never replaced.
        """
        steps = {number: step for number, step in self.steps.items() if number not in changes.gone_steps}
        for step in changes.steps:
            if step.step in steps:
                raise Violation("P18", f"step {step.step} is composed a second time, of {step.ordinals}")
            steps[step.step] = step
        gone = set(changes.gone_groups)
        compacted = {**self.values, **changes.values}.get("folded", {"step": 0})["step"]
        cut = {number for number in changes.gone_steps if number > compacted}
        return Stored(
            _without(gone, self.groups) | {ordinal: clone(group) for ordinal, group in changes.groups.items()},
            _without(gone, {**self.payloads, **payloads}),
            steps,
            {**self.values, **clone(changes.values)},
            (*(step for step in self.history if step.step not in cut), *changes.steps),
        )


def _without(gone: set[int], rows: Mapping[int, Any]) -> dict[int, Any]:
    return {ordinal: row for ordinal, row in rows.items() if ordinal not in gone}


class Draw:
    """Examples in order: how many have been drawn is committed with the tickets, as the curriculum's state is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, excluded: Collection[str] = ()) -> ExampleRef:
        """The next one."""
        number, self.number = self.number, self.number + 1
        return ExampleRef("words", number, f"k{number}")


@dataclass(frozen=True)
class Product:
    """What the search drives; a test puts its bug in here."""

    machine: Callable[..., Machine] = Machine
    stages: tuple[str, ...] = ("hear", "decide", "record", "commit", "send")
    takes_over: Callable[[Mapping[str, Any]], bool] = lambda values: values["term"] > 1
    """Whether there is anything to restore, by what is stored."""
    run: str = RUN


def start_machine(product: Product, settings: Settings, num_evals: int, stored: Stored, now: float) -> Machine:
    """A packer's start: the one place that knows how a machine takes over what is stored."""
    evals = [ExampleRef("held_out", number, f"e{number}") for number in range(num_evals)]
    draw = Draw(stored.values.get("curriculum", 0))
    machine = product.machine(settings, product.run, stored.values["term"], now, draw, evals, "ipc://packer")
    if product.takes_over(stored.values):
        rows = [clone(stored.groups[ordinal]) for ordinal in sorted(stored.groups)]
        digests = {ordinal: facts.digest for ordinal, facts in stored.payloads.items()}
        machine.restore(now, rows, list(stored.steps.values()), dict(stored.values), digests)
    return machine


class Packer:
    """One packer process and its ledger. `copy.copy` makes another one, as long as no round changes the machine."""

    def __init__(self, product: Product, settings: Settings, num_evals: int, stored: Stored, now: float) -> None:
        self._given = (product, settings, num_evals)
        values = {**stored.values, "term": stored.values.get("term", 0) + 1}
        self.stored = replace(stored, values=values)
        self.machine = start_machine(product, settings, num_evals, self.stored, now)
        self.inflow: tuple[Inflow, ...] = ()
        """What has come since the newest round, in order."""
        self.time_has_passed = True
        """So that there is a reason for a round, though nothing has come."""
        self.reports: frozenset[int] = frozenset()
        """Steps that rank 0 has reported, of the incarnation and of those before."""
        self.incarnation = self.machine.gang.incarnation
        self.out: list[Parcel] = []
        """What the newest round has sent."""
        self.probes: set[str] = set()
        """Holders of contested names, whose connections the newest round looks at."""
        self.over = False
        """The newest round has said that the run is done."""
        self._renewed: set[str] = set()
        """Peers that have repeated their newest heartbeat."""
        self._settled: dict[int, GroupFacts] = {}
        self._evals: dict[str, str] | None = None
        """Evaluations in the record that the next commit writes; None if there is nothing new."""
        self._keys: dict[str, tuple[Any, Hashable]] = {}

    def successor(self, now: float) -> "Packer":
        """The process that its supervisor starts after its death."""
        return Packer(*self._given, self.stored, now)

    def forked(self, now: float, at_most: int | None) -> "Packer":
        """The process that `actors up --fork` starts after this one's end, or `actors up` after `actors rewind`."""
        packer = self.successor(now)
        packer.machine.rewind(at_most)
        packer.stored = packer.stored.commit(packer.machine.take_changes(), {})
        return packer

    @property
    def stirred(self) -> bool:
        """Whether a round could change anything."""
        return bool(self.inflow) or self.time_has_passed or bool(self.machine._changes) or self._evals is not None

    # --- the round -----------------------------------------------------------------------------------------------

    def round(self, now: float, last: str = "", num_sent: int = 0) -> list[Parcel]:
        """Go round; returns what is sent.

        Args:
            now: the packer's clock.
            last: the stage after which the process dies; none: it lives.
            num_sent: how many messages it has sent when it dies after sending.
        """
        self.machine, self.time_has_passed, self._settled, self.out = clone(self.machine), False, {}, []
        self.probes, self._renewed = set(), set()
        for stage in self._given[0].stages:
            getattr(self, stage)(now)
            if stage == last:
                return self.out[:num_sent]
        return self.out

    def hear(self, now: float) -> None:
        """Take what has come; the payload of a scored group goes into the same commit as the verdict."""
        for event in self.inflow:
            if isinstance(event, GroupFacts):
                if self.machine.scored(event) is Verdict.SETTLED:
                    self._settled[event.ordinal] = event
                continue
            if isinstance(event, Lost):
                self.machine.lost(now, event.identity)
                continue
            if hear(self.machine, now, *event):
                self._renewed.add(event[0])
            if isinstance(event[1], TrainerHeartbeat) and event[1].rank == 0:
                self.reports |= {report.step for report in event[1].reports}
        self.inflow = ()

    def decide(self, now: float) -> None:
        """What follows from it."""
        self.machine.decide(now)

    def record(self, now: float) -> None:
        """Write down evaluations, and the steps that rank 0 has reported, in order, as `RunRecord.follow` does."""
        machine = self.machine
        if machine.rewound is not None:
            evals = self.stored.values.get("evals", {})
            kept = {version: text for version, text in evals.items() if int(version) <= machine.rewound.step}
            self.reports, self._evals, machine.rewound = frozenset(), kept, None
        if machine.gang.incarnation != self.incarnation:  # it trains the steps after its checkpoint again
            self.incarnation = machine.gang.incarnation
            self.reports = frozenset(step for step in self.reports if step <= machine.gang.checkpoint)
        while machine.recorded_step < machine.trained_step and self._can_record(machine.recorded_step + 1):
            machine.note_recorded(machine.recorded_step + 1)
        if machine.finished_evals:
            evals = {str(version): "written" for version in machine.finished_evals}
            before = self.stored.values.get("evals", {}) if self._evals is None else self._evals
            self._evals = {**before, **evals}
            machine.finished_evals = []
            machine.note_evaluated(map(int, self._evals))

    def _can_record(self, step: int) -> bool:
        """Whether its report is here, or died with the trainer that had saved the step."""
        gang = self.machine.gang
        heartbeat = self.machine.peers.heartbeat_of(gang.members.get(0, ""))
        joined = isinstance(heartbeat, TrainerHeartbeat) and heartbeat.incarnation == gang.incarnation
        return step in self.reports or (joined and step <= gang.checkpoint)

    def commit(self, now: float) -> None:
        """Write it."""
        changes = self.machine.take_changes()
        if self._evals is not None:
            changes.values["evals"], self._evals = self._evals, None
        if "num_issued" in changes.values:
            draw = self.machine.examples.draw
            assert isinstance(draw, Draw)
            changes.values["curriculum"] = draw.number
        if changes or self._settled:
            self.stored = self.stored.commit(changes, self._settled)

    def send(self, now: float) -> None:
        """Say it: the batches that ranks lack, and the directives of all concerned."""
        machine, run = self.machine, self.machine.run
        self.out = [
            Parcel(
                f"batch {step.step} to {heartbeat.name}",
                identity,
                Batch(machine.term, machine.gang.incarnation, step),
                run,
            )
            for identity, heartbeat, step in machine.batches_wanted()
        ]
        directives = {identity.decode(): directive for identity, directive in replies.directives(machine).items()}
        for identity in self._renewed - directives.keys():
            # as the control server does: a repeated heartbeat of a rollout actor at rest is answered as before
            directives[identity] = machine.told_alike[RolloutDirective][0]
        for identity, directive in sorted(directives.items()):
            if directive is not None:
                self.out.append(Parcel(f"directive to {identity.partition('/')[0]}", identity, directive, run))
        self.probes = machine.peers.take_contested()
        self.over = machine.phase == "done"

    # --- its key -------------------------------------------------------------------------------------------------

    def key(self, names: Names, now: float) -> Hashable:
        """The same for two packers that will behave the same."""
        memory = self._cached("machine", (self.machine, names, now), lambda: key_of(self.machine, names, now))
        groups = self._cached("groups", (self.stored, names), lambda: key_of(self.stored.groups, names, now))
        unwritten = None if self._evals is None else frozenset(self._evals)
        rest = (tuple(self.stored.steps), self.time_has_passed, self.over, self.reports, self.incarnation, unwritten)
        return memory, groups, rest, tuple(_key_of_event(event, names) for event in self.inflow)

    def _cached(self, what: str, of: tuple[Any, ...], make: Callable[[], Hashable]) -> Hashable:
        known = self._keys.get(what)
        if known is None or not all(mine is theirs for mine, theirs in zip(known[0], of, strict=True)):
            known = (of, make())
            self._keys = {**self._keys, what: known}
        return known[1]


def _key_of_event(event: Inflow, names: Names) -> Hashable:
    if isinstance(event, Lost):
        return "lost", names.get(event.identity)
    return event if isinstance(event, GroupFacts) else (names.get(event[0]), key_of(event[1], names, 0.0))
