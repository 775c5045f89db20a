"""Which groups make a step, in which order, what is too old; a step is durable before it is wanted (P16–P20)."""

import pytest

from actors.ledger import GroupState
from actors.ledger.witness import START, next_chain
from schemas.messages import DroppedOrdinal
from tests.actors.ledger.driver import Engine, Ring, Rollout, Trainer, digest_of, policy, settings


def ring_with_groups(**changes: object) -> tuple[Ring, Rollout, Engine]:
    """A rollout with all tickets that the budget allows, one engine at version 0."""
    ring = Ring(settings(**changes))
    engine = ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=99))
    ring.turn()
    ring.turn()
    return ring, rollout, engine


def composed(ring: Ring) -> list[tuple[int, ...]]:
    """Ordinals by step."""
    return [ring.machine.steps.composed[step].ordinals for step in sorted(ring.machine.steps.composed)]


def test_ordinal_order_waits_for_the_oldest_ordinal() -> None:
    """1, 2 and 3 are there; step 1 needs 0 (P16)."""
    ring, rollout, _ = ring_with_groups()
    ring.settle(rollout, policy(0), 1, 2, 3)
    ring.turn()
    assert composed(ring) == []
    ring.settle(rollout, policy(0), 0)
    ring.turn()
    assert composed(ring) == [(0, 1), (2, 3)]


def test_ordinal_order_passes_over_what_was_dropped() -> None:
    """Ordinal 0 is poison: the first step is 1 and 2 (P16)."""
    ring, rollout, _ = ring_with_groups()
    ring.settle(rollout, policy(0), 1, 2, 3)
    for attempt in (1, 2, 3):
        rollout.fail((0, attempt))
        ring.turn()
    assert composed(ring) == [(1, 2)]


def test_arrival_order_takes_groups_as_they_settled() -> None:
    """3, then 1, then 0, then 2 (P16)."""
    ring, rollout, _ = ring_with_groups(order="arrival")
    for ordinal in (3, 1, 0, 2):
        ring.settle(rollout, policy(0), ordinal)
    ring.turn()
    assert composed(ring) == [(3, 1), (0, 2)]


def test_arrival_order_survives_a_restart_of_the_packer() -> None:
    """The order of settlement is in the rows (P16)."""
    ring, rollout, _ = ring_with_groups(order="arrival", groups_per_step=3)
    for ordinal in (4, 1):
        ring.settle(rollout, policy(0), ordinal)
    ring.turn()
    ring.restart_packer()
    ring.turn()
    ring.settle(rollout, policy(0), 0)
    ring.turn()
    assert composed(ring) == [(4, 1, 0)]


def test_no_more_than_two_steps_are_composed_ahead_of_the_trainer() -> None:
    """Its next one and one more to have at hand; a later one might still find fresher groups (P18)."""
    ring, rollout, _ = ring_with_groups(max_async_level=9, max_steps=8)
    ring.settle(rollout, policy(0))
    ring.turn()
    assert composed(ring) == [(0, 1), (2, 3)]


def test_a_group_too_old_for_its_step_is_dropped_and_its_example_returns() -> None:
    """In step 3 a token of version 0 lags 2, one more than allowed; a new ordinal repeats the example (P17)."""
    ring, rollout, engine = ring_with_groups(order="arrival", max_off_policy_steps=1, max_async_level=1)
    trainer = ring.add(Trainer("t"))
    ring.turn()
    ring.turn()
    ring.settle(rollout, policy(0), 0, 1, 2, 3)
    ring.turn()
    trainer.train()
    engine.policy = policy(1)
    ring.turn()
    ring.turn()
    assert rollout.to_sample == [(4, 1), (5, 1)]
    for hold in rollout.to_sample:
        rollout.held[hold] = rollout.held[hold].model_copy(update={"min_version": 0})
        ring.row(hold[0]).min_version = 0
    ring.settle(rollout, policy(0), 4)
    ring.settle(rollout, policy(1), 5)
    ring.turn()
    assert (ring.row(4).state, ring.row(4).reason) == (GroupState.DROPPED, "stale")
    repeat = ring.row(6)
    assert (repeat.example, repeat.origin, repeat.seed != ring.row(4).seed) == (ring.row(4).example, 4, True)
    assert ring.row(5).state is GroupState.SETTLED
    ring.turn()
    ring.settle(rollout, policy(1), 6)
    ring.turn()
    assert composed(ring)[2] == (5, 6)
    assert ring.machine.steps.composed[3].dropped == (DroppedOrdinal(ordinal=4, reason="stale"),)


def test_a_group_exactly_as_old_as_allowed_is_trained() -> None:
    """In step 2 a token of version 0 lags 1, and 1 is allowed (P17)."""
    ring, rollout, _ = ring_with_groups(max_off_policy_steps=1)
    ring.settle(rollout, policy(0))
    ring.turn()
    assert composed(ring) == [(0, 1), (2, 3)]


def test_a_step_is_in_the_store_before_it_is_wanted_by_a_rank() -> None:
    """Commit first, then the first byte (P18)."""
    ring, rollout, _ = ring_with_groups()
    ring.add(Trainer("t"))
    ring.turn()
    ring.turn()
    ring.settle(rollout, policy(0), 0, 1)
    ring.machine.decide(ring.now)
    assert ring.store.steps() == []
    ring.commit()
    assert [step.ordinals for step in ring.store.steps()] == [(0, 1)]
    assert [step.step for _, _, step in ring.machine.batches_wanted()] == [1]


def test_a_batch_is_wanted_until_the_rank_says_that_it_has_it() -> None:
    """It may be lost on its way (P18)."""
    ring, rollout, _ = ring_with_groups()
    trainer = ring.add(Trainer("t"))
    ring.turn()
    ring.turn()
    ring.settle(rollout, policy(0))
    ring.lose = lambda what, who: what == "batch"
    ring.turn()
    assert [step.step for _, _, step in ring.machine.batches_wanted()] == [1, 2]
    ring.lose = lambda what, who: False
    ring.turn()
    ring.turn()
    assert ring.machine.batches_wanted() == []
    trainer.train()
    ring.turn()
    assert ring.machine.batches_wanted() == []


def test_a_committed_step_is_sent_again_to_a_new_incarnation_as_it_was() -> None:
    """The same step to a trainer that starts anew, and after a restart of the packer (P18, P19)."""
    ring, rollout, _ = ring_with_groups()
    trainer = ring.add(Trainer("t"))
    ring.turn()
    ring.turn()
    ring.settle(rollout, policy(0))
    ring.turn()
    first = dict(trainer.batches)
    trainer.train()
    ring.turn()
    trainer.restart()
    ring.restart_packer()
    for _ in range(3):
        ring.turn()
    assert trainer.incarnation == 2
    assert trainer.batches == first
    assert sorted(first) == [1, 2]


def test_each_ordinal_is_in_one_step_or_among_the_drops_of_one_step() -> None:
    """Trained and dropped ordinals of the steps are 0 … n without gap or repeat (P20)."""
    ring, rollout, _ = ring_with_groups(groups_per_step=1, max_steps=3, max_async_level=9)
    for attempt in (1, 2, 3):
        rollout.fail((1, attempt))
        ring.turn()
    trainer = ring.add(Trainer("t", last_step=3))
    for _ in range(8):
        ring.turn()
        ring.settle(rollout, policy(0))
        if trainer.can_train:
            trainer.train()
    assert composed(ring) == [(0,), (2,), (3,)]
    dropped = [d.ordinal for step in ring.machine.steps.composed.values() for d in step.dropped]
    assert dropped == [1]


def test_a_drop_is_carried_by_one_step_though_the_packer_restarts() -> None:
    """Step 1 has told it; step 2, composed by another packer, does not repeat it (P18, P20)."""
    ring, rollout, _ = ring_with_groups(groups_per_step=1, max_async_level=9)
    for attempt in (1, 2, 3):
        rollout.fail((0, attempt))
        ring.turn()
    ring.settle(rollout, policy(0), 1)
    ring.turn()
    ring.restart_packer()
    ring.settle(rollout, policy(0), 2)
    ring.turn()
    assert [len(step.dropped) for step in ring.store.steps()] == [1, 0]


def test_the_chain_is_what_the_trainer_computes_from_its_batches() -> None:
    """Both start from nothing and see the same steps (P20)."""
    ring, rollout, _ = ring_with_groups()
    trainer = ring.add(Trainer("t"))
    ring.turn()
    ring.turn()
    ring.settle(rollout, policy(0))
    ring.turn()
    trainer.train()
    first = next_chain(START, 1, (0, 1), (), (digest_of(0), digest_of(1)))
    assert trainer.chain == first == ring.machine.steps.chains[1]
    trainer.train()
    assert trainer.chain == ring.machine.steps.chains[2] == next_chain(first, 2, (2, 3), (), map(digest_of, (2, 3)))


CHAIN_ARGS = {
    "chain": "c",
    "step": 1,
    "ordinals": (0, 1),
    "dropped": (DroppedOrdinal(ordinal=2, reason="stale"),),
    "digests": ("d", "e"),
}


@pytest.mark.parametrize(
    "change",
    [
        {"chain": "x"},
        {"step": 2},
        {"ordinals": (1, 0)},
        {"dropped": ()},
        {"dropped": (DroppedOrdinal(ordinal=2, reason="poison"),)},
        {"digests": ("e", "d")},
    ],
)
def test_every_part_of_the_history_changes_the_chain(change: dict[str, object]) -> None:
    """What came before, the number, the ordinals and their order, drops, reasons, payloads (P20)."""
    assert next_chain(**CHAIN_ARGS) != next_chain(**CHAIN_ARGS | change)
