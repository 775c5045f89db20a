"""Environments that drive give rewards to turns: from the user's coroutine to the advantages of single tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.algorithms.advantages.shaping import RewardColumns
from actors.algorithms.scoring import GroupScore, ScoringRules, score_group
from actors.algorithms.turns import turn_steps
from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool, turn_rewards_of
from actors.environments.spec import EnvironmentSpec, Limits
from actors.rollout.episode import Trajectory, play
from actors.rollout.trajectory_group import build_trajectory_group
from actors.trajectories.recorder import TurnLimits
from schemas.config.actors import RewardConfig
from schemas.messages import RolloutGroup
from tests.actors.environments.test_pool import WAIT, spec
from tests.actors.rollout.test_trajectory_batches import ticket
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import Writer
from tests.docs.pages import page

pytestmark = pytest.mark.slow
TURNS = TurnLimits(100_000, 1000, 3)
TEXTS = (["ab", "c", "defg"], ["h", "ij", "klm"])
"""Answers of two trajectories: each with a history of two turns, and a branch of one. Tokens are bytes, with an end."""


async def played(name: str, *rows: dict[str, Any]) -> tuple[list[Trajectory], WorkerPool]:
    """Trajectories of the texts above."""
    async with WorkerPool(spec(name)) as pool:
        trajectories = []
        for row, texts in zip(rows, TEXTS, strict=False):
            async with await pool.episode(WAIT) as episode:
                trajectories.append(await play(episode, Writer(Chat("qwen2_5"), texts).recorder(TURNS), "", row))
        return trajectories, pool


def grouped(trajectories: list[Trajectory]) -> RolloutGroup:
    """The message of these trajectories."""
    return build_trajectory_group("run", "rollout-0", ticket(0), {}, trajectories)


def scored(group: RolloutGroup, **advantage: Any) -> GroupScore:
    """The score with steps from turns, as the reward actor calls it."""
    config = RewardConfig.model_validate({"functions": [], "steps": {}, "advantage": advantage})
    columns = RewardColumns.of_functions(config.functions, {})
    return score_group(group, group.environment_rewards_EG, ScoringRules(config, columns), turn_steps(group))


def advantages_of_turns(group: RolloutGroup, score: GroupScore) -> list[list[float]]:
    """The advantage of each sampled turn by completion; all of its tokens have the same."""
    found: list[list[float]] = [[] for _ in range(group.num_completions)]
    starts = group.segments[:, 0]
    owners = np.searchsorted(group.completion_offsets, starts, side="right") - 1
    for owner, segment, end in zip(owners, group.segments, [*starts[1:], group.token_ids.size], strict=True):
        values = set(score.token_advantages_N[segment[0] : end].tolist())
        if segment[3] == 0:
            [value] = values
            found[owner].append(value)
        else:
            assert values == {0.0}, "tokens of the environment are not trained"
    return found


async def test_turns_have_the_rewards_that_the_coroutine_has_given_last() -> None:
    """Also by number, and taken back; without a reward of the whole their sum is the reward."""
    trajectories, _ = await played("Paid", {"way": ""}, {"way": "", "reward": 3.0})
    assert [one.turn_rewards for one in trajectories] == [[(0, 0.5), (1, 2.0)]] * 2
    group = grouped(trajectories)
    assert group.turn_rewards.tolist() == [[0, 0, 0.5], [0, 1, 2.0], [1, 0, 0.5], [1, 1, 2.0]]
    assert group.environment_reward_names == ["Paid", "turns"]
    expected = [[np.nan, 3.0], [2.5, 2.5]]
    assert np.array_equal(group.environment_rewards_EG, expected, equal_nan=True)


async def test_process_advantages_of_turns_are_those_computed_by_hand() -> None:
    """Rewards ½, 2, ½, 2 have mean 1¼ and deviation ¾: z-scores ∓1; discount ½. The branch has no reward."""
    trajectories, _ = await played("Paid", {"way": ""}, {"way": ""})
    group = grouped(trajectories)
    found = scored(group, type="process", std="population", eps=0.0, discount=0.5)
    # −1 + ½·1, then 1; behind the last rewarded turn nothing is to come
    assert advantages_of_turns(group, found) == [[-0.5, 1.0, 0.0]] * 2


async def test_gae_counts_the_reward_of_a_turn_once() -> None:
    """At its turn alone: γλ = 1, so a turn has what comes from itself on, and the reward of the whole."""
    trajectories, _ = await played("Paid", {"way": ""}, {"way": "", "reward": 3.0})
    group = grouped(trajectories)
    found = scored(group, type="gae")
    assert advantages_of_turns(group, found) == [[2.5, 2.0, 0.0], [5.5, 5.0, 3.0]]
    assert found.rewards_G.tolist() == [2.5, 5.5]


async def test_rewards_given_before_a_limit_stay() -> None:
    """The coroutine fails with the limit's words, and has no other reward."""
    [trajectory], _ = await played("Paid", {"way": "limit"})
    assert (trajectory.stop, trajectory.rewards, trajectory.failure) == ("max_turns", {}, "")
    assert trajectory.turn_rewards == [(0, 0.5), (1, 2.0)]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("copy", r"policy\.reward: .*Why|policy\.reward: .* is no turn of this episode"),
        ("unknown", r"policy\.reward: '3' is no turn of this episode; pass what policy\.sample returned"),
        ("nan", "the reward of turn 0 is nan, but must be a finite number"),
    ],
)
async def test_a_reward_that_is_none_fails_the_episode(way: str, words: str) -> None:
    """With words for the user; it is no 0."""
    with pytest.raises(EpisodeError, match=words):
        await played("Paid", {"way": way})


async def test_a_score_of_the_group_may_reward_turns_too() -> None:
    """Those given before stay."""
    async with WorkerPool(spec("PaidInGroup")) as pool, await pool.group(2, WAIT) as group:
        for episode, texts in zip(group, TEXTS, strict=True):
            await play(episode, Writer(Chat("qwen2_5"), texts).recorder(TURNS), "", {"way": ""})
        assert await group.score() == [{}, {}]
        assert [one.turn_rewards for one in group] == [[(0, 0.5), (1, 2.0), (2, float(n))] for n in range(2)]


async def test_the_coroutine_of_the_page_gives_each_turn_a_reward(tmp_path: Path) -> None:
    """docs/howto/turns.md."""
    (block,) = [found for found in page("docs/howto/turns.md").blocks if found.title == "two_turns.py"]
    file = tmp_path / "two_turns.py"
    file.write_text(block.text)
    one = EnvironmentSpec("two-turns", f"{file}:run", limits=Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT))
    async with WorkerPool(one) as pool, await pool.episode(WAIT) as episode:
        trajectory = await play(episode, Writer(Chat("qwen2_5"), ["blue", "red"]).recorder(), "", {})
    assert (trajectory.turn_rewards, trajectory.rewards) == ([(0, 1.0), (1, 1.0)], {})


@pytest.mark.parametrize("given", [7, [1], [[0, "x"]], [[0, float("inf")]], [[-1, 1.0]], [[0, 1, 2]]])
def test_a_worker_that_sends_no_rewards_is_refused(given: Any) -> None:
    """Workers may be programs of others."""
    with pytest.raises(EpisodeError, match="turn"):
        turn_rewards_of({"turn_rewards": given})
