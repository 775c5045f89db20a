"""Environments of gymnasium through their adapter, played by text."""

from typing import Any

import pytest

from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool, describe
from tests.system.environments.playing import adapter, contents, play_one

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

LAKE = {"id": "FrozenLake-v1", "options": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
WAY = ["I go down.", "1", "Right, not left: right", "right", "down", "2"]
ROW = {"index": 0, "split": "train"}


async def test_the_way_over_the_lake_is_rewarded_at_its_end() -> None:
    """By numbers and by names; the player's place is named by its colour."""
    async with WorkerPool(adapter("gymnasium", **LAKE)) as pool:
        assert pool.examples is None or pool.examples == {"train": None, "eval": 100}
        trajectory, _ = await play_one(pool, WAY, ROW)
        assert (trajectory.stop, trajectory.rewards) == ("done", {})
        assert trajectory.turn_rewards == [*((turn, 0.0) for turn in range(5)), (5, 1.0)]
        said = contents(trajectory)
        assert said[0].startswith("This is FrozenLake-v1. Answer each turn with an action: a number from 0 to 3, or")
        assert "<red>S</red>FFF" in said[0]
        assert "<red>G</red>" in said[-1]


async def test_an_answer_without_an_action_costs_a_turn() -> None:
    """It has no reward, and the end of the turns is no success."""
    async with WorkerPool(adapter("gymnasium", **LAKE, max_steps=3, instructions="Cross it.")) as pool:
        trajectory, _ = await play_one(pool, ["hm", "downwards", "down"], ROW)
        assert (trajectory.stop, trajectory.turn_rewards) == ("env_truncated", [(2, 0.0)])
        assert contents(trajectory)[0].startswith("Cross it.\n\n")
        assert contents(trajectory)[2].startswith("No action was found. Answer with a number from 0 to 3, or one of")


async def test_the_environments_own_limit_is_no_success_either() -> None:
    """gymnasium tells both apart."""
    async with WorkerPool(adapter("gymnasium", id="Taxi-v4", options={"max_episode_steps": 4})) as pool:
        trajectory, _ = await play_one(pool, 4 * ["0"], ROW)
        assert (trajectory.stop, len(trajectory.turn_rewards)) == ("env_truncated", 4)
        assert "<yellow>" in contents(trajectory)[0]


async def test_an_example_is_the_same_episode_each_time() -> None:
    """Also where the environment throws dice while it is played, and in another process."""
    slippery = adapter("gymnasium", id="FrozenLake-v1", max_steps=8)
    cards = adapter("gymnasium", id="Blackjack-v1")

    async def played(pool: WorkerPool, index: int, seed: int) -> list[str]:
        trajectory, _ = await play_one(pool, 8 * ["1"], {"index": index, "split": "train"}, seed=seed)
        return contents(trajectory)

    for spec in (slippery, cards):
        async with WorkerPool(spec) as pool:
            first = [await played(pool, index, seed=1) for index in range(4)]
            assert [await played(pool, index, seed=2) for index in range(4)] == first
            assert len({tuple(one) for one in first}) > 1
        async with WorkerPool(spec) as pool:
            assert await played(pool, 3, seed=3) == first[3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "Riddles-v1"}, "NameNotFound"),
        ({"id": "Pendulum-v1"}, "only discrete ones can be given as text here"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "actions has 1 names, but there are 4 actions"),
        ({"id": "FrozenLake-v1", "options": {"ice": True}}, "unexpected keyword argument 'ice'"),
    ],
)
async def test_what_can_not_be_played_is_told_before_the_first_episode(options: dict[str, Any], words: str) -> None:
    """The environment can't be loaded."""
    with pytest.raises(EpisodeError, match=words) as failure:
        await describe(adapter("gymnasium", **options))
    assert failure.value.cause == "env_load"
