"""How much of the data may be lost, and whether an error of a reward function ends the run."""

import pytest

from actors.ledger.rows import DROP_WINDOW
from tests.actors.ledger.driver import Engine, Reward, Ring, Rollout, policy, settings


def run_of(good_of_ten: int, **changes: object) -> Ring:
    """Go through 2 × DROP_WINDOW groups, of which this many in ten settle and the others fail three times."""
    ring = Ring(settings(groups_per_step=1, max_steps=10_000, max_async_level=9_999, **changes))
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=4))
    for _ in range(12 * DROP_WINDOW):
        ring.turn()
        for hold in list(rollout.to_sample):
            if hold[0] % 10 < good_of_ten:
                ring.score(rollout.sample(hold, policy(0)))
            else:
                rollout.fail(hold)
        if ring.machine.failure or ring.machine.groups.num_issued["train"] > 2 * DROP_WINDOW:
            break
    return ring


@pytest.mark.parametrize(("good", "fails"), [(3, True), (6, False)])
def test_more_poison_than_is_allowed_fails_the_run(good: int, fails: bool) -> None:
    """70 % is more than half, and never 32 in a row; 40 % is less."""
    failure = run_of(good, max_drop_fraction=0.5).machine.failure
    assert bool(failure) is fails
    if fails:
        assert "of the last 100 groups were dropped as poison after three failed attempts each" in failure
        assert "packer.max_drop_fraction 0.5" in failure
        assert "engine: it broke" in failure


def test_a_fraction_of_one_allows_all_that_is_not_hopeless() -> None:
    """Nine of ten are dropped, and the run goes on."""
    assert not run_of(1, max_drop_fraction=1.0).machine.failure


@pytest.mark.parametrize(
    ("reason", "fails"), [("reward_raised", True), ("reward_invalid", True), ("reward_timeout", False)]
)
def test_an_error_of_a_reward_function_ends_the_run_where_that_is_asked_for(reason: str, fails: bool) -> None:
    """The first one, with the example; a late function is no error."""
    ring = Ring(settings(fails_on_reward_error=True))
    ring.add(Engine("e", policy=policy(0)))
    rollout, reward = ring.add(Rollout("a", slots=1)), ring.add(Reward("r"))
    ring.turn()
    (hold,) = rollout.to_sample
    reward.fail(hold, reason)
    ring.turn()
    failure = ring.machine.failure
    assert bool(failure) is fails
    if fails:
        assert failure.startswith("a reward function failed (reward.on_error: fail): it broke; ")
        assert "example 0 (k0)" in failure
