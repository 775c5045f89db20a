"""The search finds nothing in the machine as it is, and finds the mistakes that it is there for."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from actors.ledger import Changes, Group, GroupFacts, GroupState, Machine, Step, Store, replies
from actors.ledger.peers import Peers
from actors.ledger.turns import Turns
from actors.ledger.witness import START, next_chain
from bus.fence import Fence
from schemas.messages import RolloutDirective
from tests.actors.ledger.driver import Hold
from tests.explore import scenarios
from tests.explore.packer import Product, Stored
from tests.explore.peers import RESEND_SECONDS, UNNAMED_SECONDS, Sampler, Scorer, Server, identity_of
from tests.explore.rules import Violation
from tests.explore.scenarios import COMPACTING, DROPS, EVALS, FILTERS, FORKS, ONE_STEP, STEPS, STRAYS, TURNS
from tests.explore.schedule import fair
from tests.explore.search import FoundError, search
from tests.explore.walks import replay, walk
from tests.explore.world import Action, Scenario, World

STATES, SLOW_STATES = 1_500, 30_000
WALKS, SLOW_WALKS, WALK_ACTIONS = 8, 60, 150
BUG_STATES, BUG_WALKS = 30_000, 200
"""Within which a planted bug has to be found."""


def found(scenario: Scenario, seed: int = 0) -> FoundError:
    """What the search finds; printed, so that `pytest -s` shows the trace."""
    with pytest.raises(FoundError) as caught:
        search(scenario, BUG_STATES, seed)
    print(f"\n{caught.value}")
    return caught.value


def found_by_walks(scenario: Scenario) -> FoundError:
    """What random walks find, shrunk."""
    try:
        for seed in range(BUG_WALKS):
            walk(scenario, seed, WALK_ACTIONS)
    except FoundError as bug:
        print(f"\n{bug}")
        return bug
    pytest.fail("nothing found")


@pytest.mark.parametrize(
    "scenario",
    [scenarios.ALL[0], *(pytest.param(scenario, marks=pytest.mark.slow) for scenario in scenarios.ALL[1:])],
    ids=lambda one: one.name,
)
def test_no_history_with_few_troubles_breaks_a_rule(scenario: Scenario) -> None:
    """Crashes, losses, copies, late messages and silence, and each ends well once the trouble does."""
    print(f"\n{search(scenario, STATES)}")
    for seed in range(WALKS):
        walk(scenario, seed, WALK_ACTIONS)


@pytest.mark.long
@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda one: one.name)
def test_no_history_breaks_a_rule(scenario: Scenario) -> None:
    """The same, further."""
    print(f"\n{search(scenario, SLOW_STATES, seed=1)}")
    for seed in range(1_000, 1_000 + SLOW_WALKS):
        walk(scenario, seed, WALK_ACTIONS)


# --- what the search has found ---------------------------------------------------------------------------------------


def test_a_rank_is_not_blamed_for_a_checkpoint_that_came_after_its_last_beat() -> None:
    """Its next heartbeat is lost, rank 0 saves for the first time and dies: the whole run would end (P19)."""
    world = World(ONE_STEP)
    while not world.disk.checkpoints:
        has_joined = world.peers["t1"].incarnation > 0
        action = fair(world)
        assert action is not None
        if action == Action("heartbeat", "t1") and has_joined:
            action = action.with_fates(("heartbeat of t1", "lose"))
        world = world.after(action)
    world = world.after(Action("crash", "t0"))
    while (action := fair(world)) is not None:
        world = world.after(action)


def test_an_old_beat_is_not_believed_after_the_lease_of_its_process() -> None:
    """A gang would start from the checkpoints of long ago, which the ledger may have compacted away."""
    world = World(STEPS)
    for action in (
        Action("heartbeat", "t1", fates=(("heartbeat of t1", "double"),)),
        Action("second"),
        Action("round"),
    ):
        world = world.after(action)
    identity = world.peers["t1"].identity
    newest = world.packer.machine.peers.heartbeat_of(identity)
    for action in (Action("pause"), Action("round"), Action("deliver", detail=0), Action("round")):
        world = world.after(action)
    assert newest is not None
    assert world.packer.machine.peers.heartbeat_of(identity) is None


@pytest.mark.slow
def test_a_late_beat_of_a_dead_process_does_not_replace_a_living_one() -> None:
    """The living one would be refused, which ends the run; so a process has to have heard this packer first (P3)."""
    for seed in (*range(WALKS), 64):  # in 64 the packer starts anew between two heartbeats of the dead
        walk(replace(STEPS, ghosts=True), seed, WALK_ACTIONS)


def test_rewards_that_are_all_equal_for_ever_end_the_run_and_do_not_hold_it_up() -> None:
    """Two steps of one group: each place is resampled once, and one group on the way is poison (P15)."""
    world = World(FILTERS)
    while (action := fair(world)) is not None:
        world = world.after(action)
    machine = world.packer.machine
    assert machine.phase == "done"
    assert machine.groups.dropped["train"] == {"zero_variance": 2, "poison": 1}
    assert machine.groups.num_issued["train"] == 5
    assert machine.groups.counters["resampled_in_vain"] == 2


def test_trainer_and_engine_work_in_turns() -> None:
    """From the load of the model on, with nobody's turn between two."""
    world, holders = World(TURNS), [""]
    while (action := fair(world)) is not None and not world.packer.over:
        world = world.after(action)
        if world.packer.machine.turns.holder != holders[-1]:
            holders.append(world.packer.machine.turns.holder)
    taken = [holder for holder in holders if holder]
    assert taken[:2] == ["trainer", "engines"]
    assert all(one != other for one, other in pairwise(taken))
    assert len(taken) >= 4


# --- planted bugs ----------------------------------------------------------------------------------------------------


def test_search_finds_a_packer_that_speaks_before_its_commit() -> None:
    """Stands for one that answers heartbeats from memory while the commit of the round is still under way."""
    hasty = Product(stages=("hear", "decide", "record", "send", "commit"))
    bug = found(replace(STEPS, product=hasty))
    assert bug.violation.rule in ("P9", "P11", "P18", "P19", "P22")
    assert [action.verb for action in bug.deviating] == ["round"]  # in which the packer dies after a word


@pytest.mark.slow
def test_search_finds_a_release_that_is_told_a_round_before_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in one place: settlements are written a round late, as by a writer with a thread of its own."""
    commit = Stored.commit

    def late(self: Stored, changes: Changes, payloads: Mapping[int, GroupFacts]) -> Stored:
        waiting = self.values.get("waiting", {})
        settled = {o: g for o, g in changes.groups.items() if g.state is GroupState.SETTLED}
        now = {o: g for o, g in changes.groups.items() if o not in settled} | waiting
        values = changes.values | {"waiting": {o: replace(g) for o, g in settled.items()}}
        return commit(self, replace(changes, groups=now, values=values), payloads)

    monkeypatch.setattr(Stored, "commit", late)
    bug = found(STEPS)
    assert bug.violation.rule == "P11"
    assert "to let" in str(bug.violation)


class Rebuilding(Machine):
    """Stands for a ledger without a table of steps: after a restart they are rebuilt from the rows, by ordinal."""

    def restore(
        self, now: float, groups: Iterable[Group], steps: list[Step], values: dict[str, Any], digests: Mapping[int, str]
    ) -> None:
        """With the ordinals of all steps in order: that of their arrival is lost."""
        in_order = iter(sorted(ordinal for step in steps for ordinal in step.ordinals))
        chain, rebuilt = values.get("folded", {}).get("chain", START), []
        for step in steps:
            ordinals = tuple(next(in_order) for _ in step.ordinals)
            of_them = tuple(digests[ordinal] for ordinal in ordinals)
            chain = next_chain(chain, step.step, ordinals, step.dropped, of_them)
            rebuilt.append(Step(step.step, ordinals, step.dropped, of_them, chain))
        super().restore(now, groups, rebuilt, values, digests)


@pytest.mark.long
def test_walks_find_a_step_that_is_composed_of_other_groups_after_a_restart() -> None:
    """P18: it takes groups that arrive in another order than theirs, and a packer that dies."""
    bug = found_by_walks(replace(DROPS, product=Product(machine=Rebuilding)))
    assert bug.violation.rule == "P18"
    assert "after a restart step" in str(bug.violation)
    assert len(bug.steps) < WALK_ACTIONS / 2


class Forgetting(Machine):
    """Stands for a step that is written in a later transaction than its groups: a restart finds them settled."""

    def restore(self, now: float, groups: Iterable[Group], steps: list[Step], *rest: Any) -> None:
        """Without the newest step."""
        lost = steps[-1].step if steps else 0
        super().restore(now, [_settled_again(row, lost) for row in groups], steps[:-1], *rest)


def _settled_again(row: Group, lost: int) -> Group:
    if row.state is not GroupState.COMPOSED or row.step != lost:
        return row
    return replace(row, state=GroupState.SETTLED, step=None)


def test_search_finds_a_step_that_a_restart_forgets() -> None:
    """It is composed a second time (P18), or a rank knows more than the ledger (P5)."""
    bug = found(replace(STEPS, product=Product(machine=Forgetting)))
    assert bug.violation.rule in ("P5", "P18")


class Endless(Machine):
    """Stands for a place that forgets how often it was resampled."""

    def _replace_filtered(self, group: Group, filtered: int) -> None:
        super()._replace_filtered(group, 0)


def test_search_finds_resampling_without_bound() -> None:
    """All rewards are equal for ever: the third group that is dropped in two places, and no step is filled (P15)."""
    bug = found(replace(FILTERS, product=Product(machine=Endless)))
    assert bug.violation.rule == "P15"
    assert bug.deviating == []


class SendsOnce(Scorer):
    """Stands for a reward actor that forgets why it keeps a scored group: nobody sends it to the next packer."""

    def _has_sent(self, hold: Hold) -> bool:
        return hold in self.sent


@pytest.mark.slow
def test_search_finds_a_scored_group_that_is_never_sent_again() -> None:
    """It would take the deadline of the attempt, and a new one, to get on (P13)."""
    bug = found(replace(STEPS, peers={"Scorer": SendsOnce}))
    assert bug.violation.rule == "liveness"
    assert len(bug.deviating) == 1  # one lost message


class Impatient(Sampler):
    """Stands for a rollout that takes whoever the directive does not name for gone; it once was so."""

    def _obey(self, directive: RolloutDirective) -> None:
        super()._obey(directive)
        named = {identity_of(peer) for peer in directive.rewards}
        self.sent_to = {hold: to for hold, to in self.sent_to.items() if to in named}


def scoring_world(scenario: Scenario) -> World:
    """The fair schedule up to where both reward actors hold a group."""
    world = World(scenario)
    while not all(scorer.held for scorer in world.all(Scorer)):
        action = fair(world)
        assert action is not None
        world = world.after(action)
    return world


@pytest.mark.parametrize(
    "trouble",
    [
        [Action("drain", "r0"), Action("heartbeat", "r0"), Action("round")],
        [Action("crash", "packer"), Action("second", fates=(("heartbeat of r0", "lose"),)), Action("round")],
    ],
    ids=["a reward actor drains", "a new packer has not heard it yet"],
)
def test_a_group_is_not_sent_again_while_the_reward_actor_that_holds_it_lives(trouble: list[Action]) -> None:
    """P13: paid judges would be asked twice, and one reward actor would get the groups of all."""
    violation, _ = replay(scoring_world(replace(ONE_STEP, peers={"Sampler": Impatient})), trouble)
    assert violation is not None
    assert violation.rule == "P13"
    violation, _ = replay(scoring_world(ONE_STEP), trouble)
    assert violation is None


class OwnClock(Sampler):
    """Stands for a rollout that sends again what is late by its own clock; it once was so."""

    def second(self) -> None:
        """Take a group for lost though no directive has come to tell so."""
        super().second()
        self.sent_to = {hold: to for hold, to in self.sent_to.items() if self.clock - self.sent[hold] < RESEND_SECONDS}


class GivesUp(Sampler):
    """Stands for a rollout that fails by its own clock what nobody names; it once was so."""

    def second(self) -> None:
        """Fail an attempt though its group may be held."""
        super().second()
        for hold in self.sampled:
            if (
                hold not in self.named
                and hold not in self.failed
                and self.clock - self.accepted[hold] > UNNAMED_SECONDS
            ):
                self.fail(hold, "timeout")


class Deaf(Sampler):
    """Stands for a rollout that does not read what the directive says of the groups that are being scored."""

    scoring = frozenset()


AWAY = [Action("second")] * (UNNAMED_SECONDS + 2)


@pytest.mark.parametrize("trouble", [[], [Action("crash", "packer")]], ids=["the packer stands still", "and then dies"])
@pytest.mark.parametrize("bug", [OwnClock, GivesUp])
def test_while_the_packer_is_away_nothing_is_sent_again_and_nothing_fails(
    bug: type[Sampler], trouble: list[Action]
) -> None:
    """P13: whoever holds a group can't say so; for paid judges, and for finished work, that is no reason."""
    violation, _ = replay(scoring_world(replace(ONE_STEP, peers={"Sampler": bug})), AWAY)
    assert violation is not None
    assert violation.rule == "P13"
    world = scoring_world(ONE_STEP)
    for action in (*AWAY, *trouble, Action("second"), Action("round")):
        world = world.after(action)
    assert not any(sampler.to_send or sampler.failed for sampler in world.all(Sampler))
    violation, _ = replay(world, [])
    assert violation is None


def test_a_group_that_a_live_reward_actor_names_is_never_sent_again() -> None:
    """P13: however long its scoring takes, as the directive tells (`scoring`)."""
    long = [Action("second"), Action("round")] * (UNNAMED_SECONDS + 2)
    violation, _ = replay(scoring_world(replace(ONE_STEP, peers={"Sampler": Deaf})), long)
    assert violation is not None
    assert violation.rule == "P13"
    world = scoring_world(ONE_STEP)
    for action in long:
        world = world.after(action)
        assert not any(sampler.to_send or sampler.failed for sampler in world.all(Sampler))


def test_a_late_group_that_nobody_names_goes_to_another_reward_actor() -> None:
    """P13: it got lost on its way; after RESEND_SECONDS of directives the other one gets it."""
    world = World(ONE_STEP)
    while (action := fair(world)) is not None and action.verb != "send":
        world = world.after(action)
    assert action is not None
    hold, lost_at = action.detail
    label = f"group {hold[0]}.{hold[1]} to {lost_at.partition('/')[0]}"
    world = world.after(action.with_fates((label, "lose")))
    sampler = action.who
    for _ in range(RESEND_SECONDS):
        world = world.after(Action("second")).after(Action("round"))
        assert hold not in world.peers[sampler].to_send
    world = world.after(Action("second")).after(Action("round"))
    assert hold in world.peers[sampler].to_send
    again = {action.detail[1] for action in world.work() if action.verb == "send" and action.detail[0] == hold}
    assert again == {scorer.identity for scorer in world.all(Scorer)} - {lost_at}


def test_search_finds_a_newcomer_that_takes_the_name_of_a_living_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: the living one was refused once, which ended the run; and a rank that was replaced broke its gang."""

    def give_way(self: Peers, now: float, identity: str, name: str, holder: str) -> None:
        self.refuse(holder, "a newer process has the same name")

    monkeypatch.setattr(Peers, "_wait", give_way)
    bug = found(STRAYS)
    assert bug.violation.rule == "P3"
    assert "lives and is refused" in str(bug.violation)
    assert [action.verb for action in bug.deviating] == ["stray"]


def test_search_finds_a_peer_that_follows_an_older_packer(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: a directive that the packer's death has overtaken, or that of a second packer, is taken for the newest."""
    monkeypatch.setattr(Fence, "refuses", lambda self, run, term=None: "")
    world = World(STEPS)
    trouble = [
        Action("heartbeat", "a0"),
        Action("round", fates=(("directive to a0", "hold"),)),
        Action("crash", "packer"),
    ]
    trouble += [Action("heartbeat", "a0"), Action("round"), Action("deliver", detail=0)]
    violation, _ = replay(world, trouble)
    assert violation is not None
    assert violation.rule == "P2"


@pytest.mark.long
def test_walks_find_groups_that_are_sent_again_though_they_are_being_scored() -> None:
    """The same, without being told where to look."""
    assert found_by_walks(replace(ONE_STEP, peers={"Sampler": Impatient})).violation.rule == "P13"


@pytest.mark.long
def test_walks_find_a_release_of_what_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for taking "nobody holds it" for "it is over": the rollout died, its scored group is on its way."""
    ended = replies._Replies._ended

    def too_soon(self: Any, ordinal: int, attempt: int) -> bool:
        group = self._machine.groups.rows.get(ordinal)
        return ended(self, ordinal, attempt) or group.holder is None

    monkeypatch.setattr(replies._Replies, "_ended", too_soon)
    bug = found_by_walks(STEPS)
    assert bug.violation.rule == "P11"
    assert "not settled" in str(bug.violation)


class Forgetful(Machine):
    """Stands for a fork that forgets the history that it has given up."""

    def _give_up_after(self, base: int) -> int:
        given_up = super()._give_up_after(base)
        self._dead_chains.clear()
        return given_up


def to_the_end_after_a_late_rewind(machine: type[Machine]) -> None:
    """Trainers that start have looked at the checkpoints, and then the run is rewound to step 2."""
    world = World(replace(FORKS, product=Product(machine=machine)))
    while 3 not in world.disk.checkpoints:
        action = fair(world)
        assert action is not None
        world = world.after(action)
    world = world.after(Action("crash", "t0"))
    while not (world.peers["t1"].phase == "running" and not world.peers["t1"].incarnation and world.peers["t1"].seen):
        action = fair(world)
        assert action is not None
        world = world.after(action)
    assert 3 in dict(world.peers["t1"].seen)
    world = world.after(Action("fork", detail=2))
    while (action := fair(world)) is not None:
        world = world.after(action)


@pytest.mark.slow
def test_a_checkpoint_of_a_dead_history_is_no_sign_of_lost_commits() -> None:
    """A rank that has seen it before it was buried names it in all its heartbeats (P5, P23)."""
    to_the_end_after_a_late_rewind(Machine)
    with pytest.raises(Violation, match="P5"):
        to_the_end_after_a_late_rewind(Forgetful)


class Adopting(Machine):
    """Stands for a fork that lets the trainers of the dead history go on."""

    def rewind(self, at_most: int | None = None, sample_anew: bool = True) -> None:
        """As it should be done, but for the gang."""
        expected = dict(self.gang._expected)
        super().rewind(at_most, sample_anew)
        self.gang._expected = expected


def test_search_finds_a_fork_that_adopts_the_gang_of_the_dead_history() -> None:
    """Its weights were trained on the groups that are given up, or it stands still."""
    bug = found(replace(FORKS, product=Product(machine=Adopting)))
    assert [action.verb for action in bug.deviating] == ["fork"]


class ByLedger(Machine):
    """Stands for a fork at the step that the ledger knows to be durable, which may be older than the checkpoints."""

    def rewind(self, at_most: int | None = None, sample_anew: bool = True) -> None:
        """Back to that step at once: what the trainer has saved while the packer was away is not there."""
        super().rewind(at_most, sample_anew)
        self._roll_back_to(min(self.durable_step, self.steps.last if at_most is None else at_most))
        assert self.rewind_order is not None
        self._carry_out(self.rewind_order, self.durable_step)


def test_search_finds_a_fork_of_a_run_whose_trainer_has_saved_while_the_packer_was_away() -> None:
    """The checkpoint that the ledger knew may be gone by then, and a new gang begins without any."""
    bug = found(replace(FORKS, settings=replace(FORKS.settings, num_ranks=1), product=Product(machine=ByLedger)))
    assert "fork" in [action.verb for action in bug.deviating]


# --- mistakes that were made -----------------------------------------------------------------------------------------


def test_search_finds_a_record_that_is_told_before_its_commit() -> None:
    """The packer once wrote a step down between its commit and its directives; rank 0 forgot the report too early."""
    hasty = Product(stages=("hear", "decide", "commit", "record", "send"))
    bug = found(replace(STEPS, product=hasty))
    assert bug.violation.rule == "P18"
    assert "is recorded" in str(bug.violation)


@pytest.mark.long
def test_search_finds_a_ledger_that_is_not_taken_over_before_its_first_ticket() -> None:
    """Its gang has an incarnation by then, and engines a target: the next gang would have the same lineage (P4)."""
    bug = found(replace(STEPS, product=Product(takes_over=lambda values: "num_issued" in values)))
    assert bug.violation.rule in ("P19", "P22")
    assert len(bug.deviating) == 1


class Obedient(Server):
    """Takes whatever the directive comes last for the newest."""

    @property
    def target(self) -> Any:
        """Older or not."""
        return super(Server, self).target


@pytest.mark.long
def test_walks_find_an_engine_that_goes_back_when_a_state_is_late() -> None:
    """P22: it would sample for tickets that ask for more."""
    bug = found_by_walks(replace(STEPS, peers={"Server": Obedient}))
    assert bug.violation.rule == "P22"


# --- the search itself -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_fair_schedule_alone_ends_each_run_without_a_drop() -> None:
    """What the search finds is due to the trouble that it makes."""
    for scenario in (STEPS, ONE_STEP, EVALS, COMPACTING):
        violation, steps = replay(World(scenario), [])
        assert violation is None
        world = World(scenario)
        for action, _ in steps:
            world = world.after(action)
        machine = world.packer.machine
        assert machine.phase == "done"
        assert machine.groups.num_dropped("train") == 0
        assert machine.groups.num_issued["train"] == scenario.settings.groups_per_step * scenario.settings.max_steps


def test_a_world_is_not_changed_by_what_comes_after_it() -> None:
    """Though it shares most of its parts with it."""
    world, again = World(STEPS), World(STEPS)
    for number in range(40):
        action = fair(world)
        assert action is not None
        branch = world.after(Action("crash", ("packer", "t0", "a0", "r0")[number % 4])).after(Action("second"))
        assert branch.key != world.key
        world, again = world.after(action), again.after(action)
        assert world.key == again.key


def test_a_process_that_comes_back_the_same_makes_the_same_world() -> None:
    """Numbers of boots and of heartbeats are not in the key, or no two histories would ever meet."""
    world, crashed = World(STEPS), World(STEPS)
    for actions in ([], [Action("crash", "a0"), Action("heartbeat", "a1"), Action("heartbeat", "a1")]):
        crashed = World(STEPS)
        for action in actions:
            crashed = crashed.after(action)
    world = world.after(Action("heartbeat", "a1"))
    crashed = World(STEPS).after(Action("crash", "a0")).after(Action("heartbeat", "a1"))
    assert crashed.key == world.key


@pytest.mark.slow
def test_the_double_of_the_store_keeps_what_the_store_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same changes, through packers that die, give the same rows, steps, values and payloads."""
    real, commit = Store(":memory:"), Stored.commit

    def both(self: Stored, changes: Changes, payloads: Mapping[int, GroupFacts]) -> Stored:
        real.commit(changes, {ordinal: (facts.digest, []) for ordinal, facts in payloads.items()})
        return commit(self, changes, payloads)

    monkeypatch.setattr(Stored, "commit", both)
    for scenario in (DROPS, EVALS, COMPACTING, FILTERS, FORKS):
        real, world, number = Store(":memory:"), World(scenario), 0
        while (action := fair(world)) is not None:
            number += 1
            world = world.after(action if number % 17 else Action("round", detail=("send", 1)))
        stored = world.packer.stored
        # the two fields that are not stored
        rows = [replace(stored.groups[ordinal], issued_at=0.0, sampled_from=0) for ordinal in sorted(stored.groups)]
        assert real.groups() == rows
        assert real.steps() == list(stored.steps.values())
        assert real.digests() == {ordinal: facts.digest for ordinal, facts in stored.payloads.items()}
        kept = {name: value for name, value in stored.values.items() if name != "term"}
        assert {name: real.value(name) for name in kept} == json.loads(json.dumps(kept))


# --- planted bugs: turns on a device ---------------------------------------------------------------------------------


class GrantsAtOnce(Turns):
    """Asks no engine whether it rests."""

    def update(self, now: float, ranks: Any, engines: Any, composed: bool) -> bool:
        """As if there were no engines."""
        return super().update(now, ranks, [], composed)


class AsksNobody(Turns):
    """Does not wait for the heartbeats of those that lived before the packer."""

    def update(self, now: float, ranks: Any, engines: Any, composed: bool) -> bool:
        """From the first round on."""
        self.first_at = 0.0
        return super().update(now, ranks, engines, composed)


class BelievesOldNews(Turns):
    """Takes an engine that rested in an earlier turn for one that rests now."""

    def update(self, now: float, ranks: Any, engines: Any, composed: bool) -> bool:
        """Whatever number an engine names."""
        named = [engine.model_copy(update={"turn": self.number}) for engine in engines]
        return super().update(now, ranks, named, composed)


class NeverLoads(Turns):
    """Gives the trainer no turn to load its model."""

    def update(self, now: float, ranks: Any, engines: Any, composed: bool) -> bool:
        """As if no rank wanted anything."""
        free = [rank.model_copy(update={"device": "free"}) for rank in ranks]
        return super().update(now, free, engines, composed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        (GrantsAtOnce, "P28"),
        (AsksNobody, "P28"),
        pytest.param(BelievesOldNews, "P28", marks=pytest.mark.long),
        (NeverLoads, "liveness"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_mistakes_about_turns_are_found(monkeypatch: pytest.MonkeyPatch, bug: type[Turns], rule: str) -> None:
    """Two that hold the device at once, or a run that stands still."""
    monkeypatch.setattr("actors.ledger.machine.Turns", bug)
    with pytest.raises(FoundError) as caught:
        _search_and_walk(TURNS)
    assert caught.value.violation.rule == rule


def _search_and_walk(scenario: Scenario) -> None:
    search(scenario, SLOW_STATES // 10)
    for seed in range(BUG_WALKS):
        walk(scenario, seed, WALK_ACTIONS)
