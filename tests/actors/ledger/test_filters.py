"""Groups that a filter rejects: another one takes their place, each step is filled, and it ends (P15)."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from actors.ledger import GroupFacts, GroupState, Verdict
from schemas.config.actors import TemperatureScheduleConfig
from tests.actors.ledger.driver import Engine, Ring, Rollout, Trainer, policy, settings


def ring_with_groups(**changes: object) -> tuple[Ring, Rollout, Engine]:
    """A rollout with all tickets that the budget allows, one engine at version 0."""
    ring = Ring(settings(**{"max_resample_times": 2} | changes))
    engine = ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=99))
    ring.turn()
    ring.turn()
    return ring, rollout, engine


def settle(ring: Ring, rollout: Rollout, rejected: Iterable[int], *ordinals: int) -> list[Verdict]:
    """These ordinals (or all) are scored; those named are rejected."""
    holds = [hold for hold in rollout.to_sample if not ordinals or hold[0] in ordinals]
    facts = [rollout.sample(hold, policy(rollout.held[hold].min_version)) for hold in holds]
    flat = set(rejected)
    return [ring.score(_flat(one) if one.ordinal in flat else one) for one in facts]


def _flat(facts: GroupFacts) -> GroupFacts:
    return replace(facts, rejected_as="zero_variance")


def test_a_rejected_group_is_dropped_in_the_filters_words_and_another_example_takes_its_place() -> None:
    """At once, in the same commit, so that as many are undropped as before; its payload is no business of the store."""
    ring, rollout, _ = ring_with_groups()
    assert settle(ring, rollout, {1}, 1) == [Verdict.FILTERED]
    ring.commit()
    row, successor = ring.row(1), ring.row(4)
    assert (row.state, row.reason) == (GroupState.DROPPED, "zero_variance")
    assert (successor.state, successor.origin, successor.resamples) == (GroupState.ISSUED, 1, 1)
    assert successor.example != row.example
    assert [group.ordinal for group in ring.store.groups()] == [0, 1, 2, 3, 4]
    ring.turn()
    assert rollout.to_sample[-1] == (4, 1)
    assert settle(ring, rollout, (), 0, 2, 3, 4) == [Verdict.SETTLED] * 4
    ring.turn()
    steps = ring.machine.steps.composed
    assert [step.ordinals for step in steps.values()] == [(0, 2), (3, 4)]
    assert [(drop.ordinal, drop.reason) for drop in steps[1].dropped] == [(1, "zero_variance")]


def test_a_place_is_resampled_so_often_and_then_takes_what_comes() -> None:
    """Twice: ordinals 0, 4 and 5 are in one place; 5 is as flat as they were and trains, and that is counted."""
    ring, rollout, _ = ring_with_groups()
    for ordinal, verdict in ((0, Verdict.FILTERED), (4, Verdict.FILTERED), (5, Verdict.SETTLED)):
        assert settle(ring, rollout, {ordinal}, ordinal) == [verdict]
        ring.turn()
    assert [ring.row(ordinal).resamples for ordinal in (0, 4, 5)] == [0, 1, 2]
    assert ring.machine.groups.counters["resampled_in_vain"] == 1
    assert ring.machine.groups.num_issued["train"] == 6


def test_a_second_copy_of_a_rejected_group_counts_for_nothing() -> None:
    """The first verdict stands (P11): no second successor."""
    ring, rollout, _ = ring_with_groups()
    facts = rollout.sample((1, 1), policy(0))
    assert [ring.score(_flat(facts)), ring.score(facts), ring.score(_flat(facts))] == [Verdict.FILTERED] + [
        Verdict.COPY
    ] * 2
    assert ring.machine.groups.num_issued["train"] == 5


def test_an_evaluation_is_never_filtered() -> None:
    """Its rewards are what it is for (P26)."""
    ring = Ring(settings(eval_at_start=True, max_resample_times=2), num_evals=1)
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=1))
    ring.turn()
    assert settle(ring, rollout, {-1}) == [Verdict.SETTLED]


@pytest.mark.parametrize("how", ["poison", "stale", "restart"])
def test_a_place_goes_on_being_counted(how: str) -> None:
    """Else poison between two flat groups, or a restart of the packer, would have it resampled for ever."""
    ring, rollout, _ = ring_with_groups(order="arrival", max_off_policy_steps=1)
    settle(ring, rollout, {0}, 0)
    ring.turn()
    if how == "poison":
        for attempt in (1, 2, 3):
            rollout.fail((4, attempt))
            ring.turn()
    elif how == "stale":
        settle(ring, rollout, (), 4)
        ring.row(4).oldest_version = -2
        settle(ring, rollout, (), 1)
        ring.turn()
    else:
        ring.restart_packer()
        assert ring.row(4).resamples == 1
        return
    assert ring.row(4).reason == how
    assert (ring.row(5).origin, ring.row(5).resamples) == (4, 1)


def test_poison_in_a_place_that_was_not_resampled_leaves_it_to_admission() -> None:
    """As without filters: nobody is its successor by name."""
    ring, rollout, _ = ring_with_groups()
    for attempt in (1, 2, 3):
        rollout.fail((1, attempt))
        ring.turn()
    assert (ring.row(4).origin, ring.row(4).resamples) == (None, 0)


@pytest.mark.parametrize("order", ["ordinal", "arrival"])
@pytest.mark.parametrize("times", [0, 1, 3])
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("share", [1, 2, 5])
def test_each_step_is_filled_and_the_run_ends_however_much_is_rejected(
    order: str, times: int, level: int, share: int
) -> None:
    """Every group, every second one, or one in five is flat, for ever: 1 + times ordinals a place are the most."""
    ring, rollout, engine = ring_with_groups(
        order=order, max_resample_times=times, max_async_level=level, groups_per_step=3, max_steps=4
    )
    trainer = ring.add(Trainer("t", last_step=4))
    for _ in range(60):
        ring.turn()
        flat = {ordinal for ordinal, _ in rollout.to_sample if ordinal % share == 0}
        for hold in rollout.to_sample:
            if rollout.held[hold].min_version <= engine.policy.version:
                facts = rollout.sample(hold, engine.policy)
                ring.score(_flat(facts) if hold[0] in flat else facts)
        if trainer.can_train:
            trainer.train()
        engine.load(trainer)
    machine = ring.machine
    assert (machine.phase, [len(step.ordinals) for step in machine.steps.composed.values()]) == ("done", [3] * 4)
    issued = machine.groups.num_issued["train"]
    assert issued == 12 * (1 + times) if share == 1 else issued <= 12 * (1 + times)
    trained = [ordinal for step in machine.steps.composed.values() for ordinal in step.ordinals]
    dropped = [drop.ordinal for step in machine.steps.composed.values() for drop in step.dropped]
    assert sorted(trained + dropped) == list(range(issued))
    lags = [k - 1 - ring.row(o).oldest_version for k, step in machine.steps.composed.items() for o in step.ordinals]
    assert max(lags) <= level


def test_a_surplus_is_issued_once_and_the_first_groups_win() -> None:
    """Two a step, factor 1.5, level 0: three tickets, then two with each version served; lag 1 is what it costs."""
    ring = Ring(settings(order="arrival", max_async_level=0, max_off_policy_steps=1, surplus=1, max_steps=3))
    engine = ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=99))
    trainer = ring.add(Trainer("t", last_step=3))
    issued = []
    for _ in range(30):
        ring.turn()
        issued.append(ring.machine.groups.num_issued["train"])
        late_first = sorted(rollout.to_sample, reverse=True)
        for hold in late_first[: 2 if len(late_first) > 2 else None]:
            ring.score(rollout.sample(hold, engine.policy))
        if trainer.can_train:
            trainer.train()
        engine.load(trainer)
    assert sorted(set(issued) - {0}) == [3, 5, 6]
    assert ring.machine.steps.composed[1].ordinals == (2, 1)
    assert ring.machine.phase == "done"
    assert ring.machine.groups.num_dropped("train") == 0


def test_a_ticket_has_the_temperature_of_its_step() -> None:
    """1 → 0.4 over four steps of two; the successor of a dropped ordinal is in the last step that was asked for."""
    schedule = TemperatureScheduleConfig(type="linear", end=0.4)
    ring, rollout, _ = ring_with_groups(max_async_level=9, temperature_schedule=schedule)
    temperatures = {ordinal: ticket.sampling.temperature for (ordinal, _), ticket in rollout.held.items()}
    assert temperatures == pytest.approx({0: 1, 1: 1, 2: 0.8, 3: 0.8, 4: 0.6, 5: 0.6, 6: 0.4, 7: 0.4})
    settle(ring, rollout, {0}, 0)
    ring.turn()
    assert rollout.held[8, 1].sampling.temperature == pytest.approx(0.4)
    ring.restart_packer()
    assert ring.row(8).position == 7
