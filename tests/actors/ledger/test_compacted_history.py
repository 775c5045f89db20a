"""What the ledger forgets: steps before the oldest kept checkpoint, their rows, never their counts (P21)."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ledger import GroupState, Store
from actors.ledger.compacted_history import CompactedHistory, Ranges
from tests.actors.ledger.driver import Engine, Reward, Ring, Rollout, Trainer, settings

NUMBERS = st.lists(st.lists(st.integers(0, 40), max_size=8), max_size=8)


@given(NUMBERS)
def test_ranges_are_a_set(batches: list[list[int]]) -> None:
    """Against Python's own: members, length, how many were no news; sorted, disjoint, not touching."""
    ranges, seen = Ranges(), set[int]()
    for batch in batches:
        assert ranges.add(batch) == len(batch) - len(set(batch) - seen)
        seen.update(batch)
    assert [number for number in range(42) if number in ranges] == sorted(seen)
    assert len(ranges) == len(seen)
    assert ranges.first_missing == next(number for number in range(42) if number not in seen)
    bounds = [bound for pair in ranges.bounds for bound in pair]
    assert bounds == sorted(set(bounds))


def test_folded_counts_survive_json() -> None:
    """As the store keeps them."""
    import json

    compacted = CompactedHistory(7, "chain", Ranges([(0, 4), (6, 9)]), 6, 0, 3)
    compacted.dropped["train"]["poison"] = 1
    again = CompactedHistory.of(json.loads(json.dumps(compacted.record())))
    assert again == compacted
    assert again.counts() == {
        ("train", "durable", None): 6,
        ("eval", "settled", None): 3,
        ("train", "dropped", "poison"): 1,
    }


def run_to(ring: Ring, step: int) -> None:
    """Turn the ring, everybody doing its work at once, until a step has been trained."""
    rollout, _, engine, trainer = ring.doubles
    assert isinstance(rollout, Rollout) and isinstance(engine, Engine) and isinstance(trainer, Trainer)  # noqa: PT018
    for _ in range(20 * step):
        if ring.machine.trained_step >= step:
            return
        ring.turn()
        engine.load(trainer)
        if engine.policy:
            ring.settle(rollout, engine.policy)
        if trainer.can_train:
            trainer.train()
            for old in sorted(trainer.disk.chains)[:-2]:  # keep_last: 2
                del trainer.disk.chains[old]
    raise AssertionError(f"step {step} was not reached, but {ring.machine.trained_step}")


@pytest.fixture
def ring() -> Ring:
    """Twelve steps, a checkpoint every second one, two of them kept."""
    made = Ring(settings(max_steps=12), compact=True)
    made.add(Rollout("a"), Reward("r"), Engine("e"), Trainer("t", last_step=12))
    return made


def test_nothing_folds_before_there_are_two_checkpoints(ring: Ring) -> None:
    """One alone may turn out bad, and then the run begins anew."""
    run_to(ring, 3)
    assert ring.machine.compacted.step == 0
    assert sorted(ring.machine.steps.composed)[0] == 1


def test_steps_fold_up_to_the_only_checkpoint_where_one_is_kept() -> None:
    """Else the ledger of a run with keep_last 1 would grow for ever."""
    made = Ring(settings(max_steps=12, min_checkpoints=1), compact=True)
    made.add(Rollout("a"), Reward("r"), Engine("e"), Trainer("t", last_step=12))
    run_to(made, 3)
    made.turn()
    assert made.machine.compacted.step == 2


def test_steps_up_to_the_oldest_kept_checkpoint_fold(ring: Ring) -> None:
    """Rows, payload digests, steps and chains before it are gone from memory and file; what is counted stays."""
    run_to(ring, 9)
    ring.turn()
    machine, store = ring.machine, ring.store
    oldest = min(ring.doubles[3].disk.chains)
    assert machine.compacted.step == oldest >= 6
    assert min(machine.steps.composed) == oldest + 1
    assert min(machine.steps.chains) == oldest
    assert min(machine.groups.rows) == 2 * oldest
    assert store.steps()[0].step == oldest + 1
    assert min(group.ordinal for group in store.groups()) == 2 * oldest
    counts = machine.groups.counts("train")
    assert counts.total() == machine.groups.num_issued["train"]
    assert counts[GroupState.DURABLE] + counts[GroupState.TRAINED] == 2 * machine.trained_step
    stored = store.counts()
    assert sum(n for (purpose, *_), n in stored.items() if purpose == "train") == machine.groups.num_issued["train"]
    assert store.trained_twice() == 0


def test_a_packer_that_starts_again_goes_on_behind_what_is_folded(ring: Ring) -> None:
    """Steps, counters and the equation are as before, and the run ends."""
    run_to(ring, 8)
    before = (ring.machine.trained_step, ring.machine.groups.counts("train").total(), ring.machine.compacted)
    ring.restart_packer()
    assert (ring.machine.trained_step, ring.machine.groups.counts("train").total(), ring.machine.compacted) == before
    for facts in list(ring.doubles[0].sampled.values()):
        ring.score(facts)  # what the reward actor keeps until it is released
    run_to(ring, 12)
    assert ring.machine.groups.counts("train").total() == 24


def test_an_ordinal_that_was_dropped_and_folded_long_ago_does_not_hold_up_the_order(ring: Ring) -> None:
    """Ordinal 3 of step 2 is told to be dropped by step 1 already, and is without a row when its turn comes."""
    rollout, _, engine, trainer = ring.doubles
    ring.machine.compacted = CompactedHistory(0)
    for _ in range(3):
        ring.turn()
        engine.load(trainer)
    for _ in range(3):
        ring.turn()
        for hold in [hold for hold in rollout.to_sample if hold[0] == 3]:
            rollout.fail(hold)
        ring.turn()
    assert ring.row(3).reason == "poison"
    run_to(ring, 12)
    assert ring.machine.groups.counts("train")[GroupState.DROPPED] == 1
    trained = [ordinal for step in trainer.trained for ordinal in step.ordinals]
    assert trained == [o for o in range(25) if o != 3]


def test_a_gang_without_a_checkpoint_behind_the_fold_fails_the_run_in_words(ring: Ring) -> None:
    """All checkpoints are bad: the ledger can't give back what it has compacted."""
    run_to(ring, 9)
    ring.turn()
    trainer = ring.doubles[3]
    trainer.disk.chains.clear()
    trainer.restart()
    ring.turn()
    ring.turn()
    assert f"no good checkpoint from step {ring.machine.compacted.step} on is left" in ring.machine.failure
    assert ring.machine.phase == "failed"


def test_a_file_stays_small(tmp_path: Path) -> None:
    """300 steps through a real file: rows and pages are those of a few steps."""
    store = Store(tmp_path / "ledger.sqlite")
    ring = Ring(settings(max_steps=300), store=store, compact=True)
    ring.add(Rollout("a"), Reward("r"), Engine("e"), Trainer("t", last_step=300))
    run_to(ring, 60)
    at_60 = store.database.execute("PRAGMA page_count").fetchone()
    run_to(ring, 300)
    assert store.database.execute("PRAGMA page_count").fetchone() == at_60
    assert len(store.groups()) < 24
    store.close()
