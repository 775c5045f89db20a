"""How many tickets leave (P15), which is what bounds lag, and that none is owed when the run ends."""

import pytest

from tests.actors.ledger.driver import Engine, Ring, Rollout, Trainer, policy, settings


def issued(ring: Ring) -> int:
    """Train ordinals so far."""
    return ring.machine.groups.num_issued["train"]


def ring_with_slots(slots: int = 99, **changes: object) -> tuple[Ring, Rollout, Engine]:
    """One rollout with room for everything, one engine at version 0."""
    ring = Ring(settings(**{"max_steps": 10} | changes))
    engine = ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=slots))
    ring.turn()
    return ring, rollout, engine


@pytest.mark.parametrize(("level", "expected"), [(0, 3), (1, 6), (4, 15)])
def test_issue_runs_the_level_ahead_of_the_served_version(level: int, expected: int) -> None:
    """Three groups a step: (version 0 + level + 1) × 3, and 3 more with each version served (P15)."""
    ring, _, engine = ring_with_slots(groups_per_step=3, max_async_level=level)
    assert issued(ring) == expected
    engine.policy = policy(1)
    ring.turn()
    assert issued(ring) == expected + 3


def test_level_zero_alternates() -> None:
    """The groups of step 2 are issued when an engine serves version 1, and not before; all have lag 0 (P15)."""
    ring, rollout, engine = ring_with_slots(max_async_level=0, max_steps=3)
    trainer = ring.add(Trainer("t", last_step=3))
    seen = []
    for _ in range(20):
        ring.turn()
        engine.load(trainer)
        for hold in rollout.to_sample:
            seen.append((hold[0], engine.policy.version))
        ring.settle(rollout, engine.policy)
        if trainer.can_train:
            trainer.train()
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_a_dropped_ordinal_makes_room_for_another() -> None:
    """Budget counts issued − dropped (P15)."""
    ring, rollout, _ = ring_with_slots()
    assert issued(ring) == 4
    for _ in range(3):
        rollout.fail(rollout.to_sample[-1])
        ring.turn()
    assert ring.row(3).reason == "poison"
    assert issued(ring) == 5


def test_nothing_is_issued_without_an_engine_that_takes_new_work() -> None:
    """None at all, starting, updating, dirty, quarantined, draining: each time nobody could sample (P15, P25)."""
    ring = Ring(settings())
    ring.add(Rollout("a"))
    ring.turn()
    engine = ring.add(Engine("e"))
    for state in ("clean", "updating", "dirty", "quarantined"):
        engine.policy, engine.engine_state = (policy(0) if state != "clean" else None), state
        ring.turn()
    engine.engine_state, engine.phase = "clean", "draining"
    ring.turn()
    assert issued(ring) == 0
    engine.phase = "running"
    ring.turn()
    assert issued(ring) == 4


def test_the_newest_version_served_counts() -> None:
    """Of two engines at versions 0 and 1 the newer takes the new work (P15)."""
    ring, _, _ = ring_with_slots()
    ring.add(Engine("f", policy=policy(1)))
    ring.turn()
    assert issued(ring) == 6


def test_a_version_that_is_no_longer_served_takes_no_ticket_back() -> None:
    """Its engine died: 6 are out, and no more leave until version 1 is served again (P15)."""
    ring, _, engine = ring_with_slots()
    engine.policy = policy(1)
    ring.turn()
    engine.policy = policy(0)
    ring.turn()
    assert issued(ring) == 6


def test_the_run_issues_exactly_what_its_steps_need() -> None:
    """5 steps of 2: 10 ordinals and one for each that was dropped, however far ahead the level allows (P15)."""
    ring, rollout, _ = ring_with_slots(max_steps=5, max_async_level=50)
    assert issued(ring) == 10
    for attempt in (1, 2, 3):
        rollout.fail((9, attempt))
        ring.turn()
    assert issued(ring) == 11


def test_evaluation_tickets_do_not_use_the_budget() -> None:
    """They go out first, and the train budget is as large as without them (P15, P26)."""
    ring = Ring(settings(eval_at_start=True), num_evals=3)
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=3))
    ring.turn()
    assert sorted(rollout.held) == [(-3, 1), (-2, 1), (-1, 1)]
    rollout.slots = 99
    ring.turn()
    assert issued(ring) == 4


def test_lag_never_exceeds_the_level_in_ordinal_order() -> None:
    """Whatever drops and delays do: here one ordinal in five fails for good, and engines are slow (P10, P16)."""
    ring, rollout, engine = ring_with_slots(max_steps=8, max_async_level=2)
    trainer = ring.add(Trainer("t", last_step=8))
    for turn in range(120):
        ring.turn()
        for hold in rollout.to_sample:
            if hold[0] % 5 == 4:
                rollout.fail(hold)
            elif rollout.held[hold].min_version <= engine.policy.version:
                ring.settle(rollout, engine.policy, hold[0])
        if trainer.can_train:
            trainer.train()
        if turn % 7 == 0:
            engine.load(trainer)
    steps = ring.machine.steps.composed
    assert len(steps) == 8
    lags = [k - 1 - ring.row(o).oldest_version for k, step in steps.items() for o in step.ordinals]
    assert max(lags) == 2


@pytest.mark.parametrize(("level", "strict"), [(0, True), (1, True), (2, True), (1, False)])
def test_a_strict_level_samples_each_step_by_the_version_of_the_level(level: int, strict: bool) -> None:
    """Sampling is slower than training: step k by version k − 1 − level, where a free level has newer ones (P22)."""
    changes = {"max_async_level": level, "max_steps": 6, "strict_async_level": strict}
    ring, rollout, engine = ring_with_slots(**changes)
    trainer = ring.add(Trainer("t", last_step=6, keep_published=level + 2))
    lags: list[int] = []
    for _ in range(80):
        ring.turn()
        # the engine takes a version at once, between two groups too, and trains before it samples the next group
        engine.load(trainer)
        if trainer.can_train:
            trainer.train()
        elif rollout.to_sample:
            ordinal = min(hold[0] for hold in rollout.to_sample)
            lags.append(ordinal // 2 - engine.policy.version)
            ring.settle(rollout, engine.policy, ordinal)
    assert len(lags) == 12
    expected = [min(level, ordinal // 2) for ordinal in range(12)]
    assert (lags == expected) is strict


def test_a_strict_level_goes_on_after_a_dropped_group_and_a_version_that_is_gone() -> None:
    """The last groups of a version are poison; the trainer has only newer versions (P11, P22)."""
    ring, rollout, engine = ring_with_slots(max_async_level=1, max_steps=4, strict_async_level=True)
    trainer = ring.add(Trainer("t", last_step=4, keep_published=1))
    for turn in range(120):
        ring.turn()
        engine.load(trainer)
        if turn < 9 and rollout.to_sample:
            rollout.fail(rollout.to_sample[-1])
            continue
        ring.settle(rollout, engine.policy)
        if trainer.can_train:
            trainer.train()
    assert trainer.next_step == 5
