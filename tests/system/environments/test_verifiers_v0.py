"""Episodes of verifiers 0.1.11 and 0.3.1, each in its own interpreter."""

import asyncio
from pathlib import Path

import pytest

from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool
from actors.trajectories.recorder import TurnLimits
from tests.system.environments.scripted import THOUGHT, WAIT, call, played, python_of, workers

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
VERSIONS = ["verifiers-v0", "verifiers-v03"]
versions = pytest.mark.parametrize("version", VERSIONS)
ID = "verifiers-v0-worlds"


def world(version: str, kind: str) -> WorkerPool:
    """Our own environment of a kind."""
    return workers("verifiers_v0", python_of(version), id=ID, path=str(HERE), args={"kind": kind})


@versions
async def test_tools_are_played_scored_and_never_fail_as_zero(version: str) -> None:
    """One worker, so that its start is paid once: a whole episode, limits, and each way to fail."""
    async with world(version, "tools") as pool:
        async with await pool.episode(WAIT) as episode:
            texts = [THOUGHT + call("add", a=2, b=1), THOUGHT + "3"]
            trajectory = await played(episode, texts, index=2, family="qwen3")
            assert trajectory.rewards | {ID: 0.5, "right": 1.0, "length": 1.0, "add_calls": 1.0} == trajectory.rewards
            assert (trajectory.stop, trajectory.recorder.num_calls, trajectory.tree.num_branches) == ("done", 1, 0)
            assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
            assert trajectory.messages[3]["content"] == "3"
            assert trajectory.messages[2]["reasoning_content"] == "Well."
            assert episode.columns["answer"] == "3"
        assert pool.examples == {"train": 3, "eval": 1}
        async with await pool.episode(WAIT) as episode:
            # an answer that is wrong, and one without a text, are the model's, not failures
            assert (await played(episode, [""])).rewards[ID] == 0.0
        async with await pool.episode(WAIT) as episode:
            with pytest.raises(EpisodeError, match=r"the rubric's function right raised KeyError: 'no such key'"):
                await played(episode, ["boom"])
        async with await pool.episode(WAIT) as episode:
            with pytest.raises(EpisodeError, match=r"the rollout failed: .*the sandbox is gone"):
                await played(episode, [call("add", a=13, b=1), "14"])
        async with await pool.episode(WAIT) as episode:
            limited = await played(
                episode, [call("add", a=1, b=1)] * 9, split="eval", limits=TurnLimits(10_000, 99, max_turns=2)
            )
            assert (limited.stop, limited.tree.num_turns, limited.rewards[ID]) == ("max_turns", 2, 0.0)
        async with await pool.episode(WAIT) as episode:
            with pytest.raises(IndexError, match="list index out of range"):
                # the engine's failure keeps its own name, and is not the environment's
                await played(episode, [])


@versions
async def test_a_group_rubric_scores_all_episodes_together(version: str) -> None:
    """On one worker; a function that raises fails the group."""
    async with world(version, "group") as pool:
        async with await pool.group(3, WAIT) as group:
            texts = ["long answer", "short", "long answer"]
            ended = await asyncio.gather(*(played(one, [text]) for one, text in zip(group, texts, strict=True)))
            assert [one.rewards for one in ended] == [{}] * 3
            rewards = await group.score()
            assert [(one[ID], one["longest"], one["length"]) for one in rewards] == [
                (2.0, 1.0, 11.0),
                (0.0, 0.0, 5.0),
                (2.0, 1.0, 11.0),
            ]
        assert pool.has_group_scores
        async with await pool.group(2, WAIT) as group:
            for one, text in zip(group, ["a", "bc"], strict=True):
                await played(one, [text])
            with pytest.raises(EpisodeError, match="the rubric's function longest raised KeyError: 'too short'"):
                await group.score()


@versions
async def test_a_game_in_plain_text_is_played_to_its_own_end(version: str) -> None:
    """The environment's last word belongs to the conversation that it scores, and costs no turn of the model."""
    async with world(version, "guess") as pool:
        for texts, reward in ((["5", "8"], 0.5), (["5", "6", "7", "9"], 0.0)):
            async with await pool.episode(WAIT) as episode:
                trajectory = await played(episode, texts, index=1)
                assert (trajectory.rewards[ID], trajectory.tree.num_turns) == (reward, len(texts))
                assert (trajectory.stop, trajectory.tree.num_branches) == ("done", 0)
                assert episode.columns["info"] == {"target": 8}
        assert pool.examples == {"train": 2, "eval": 2}, "without rows for evaluation, those for training"


@versions
async def test_an_empty_rubric_has_no_reward(version: str) -> None:
    """It is meant to come from elsewhere; a total of 0 would be a reward."""
    async with world(version, "unrewarded") as pool, await pool.episode(WAIT) as episode:
        assert (await played(episode, ["1"])).rewards == {"num_turns": 1.0}


@versions
async def test_an_environment_of_the_registry_is_played_by_its_id(version: str) -> None:
    """Its own metrics are further columns beside its total."""
    name = "sophistry-bench-sprint"
    text = "<claim>One.</claim>\n<quote>none</quote>"
    async with workers("verifiers_v0", python_of(version), id=name, args={"n_items": 2}) as pool:
        async with await pool.episode(WAIT) as episode:
            trajectory = await played(episode, [text], index=1, limits=TurnLimits(100_000, 1000))
        assert pool.examples == {"train": 4, "eval": 4}
        assert trajectory.rewards[name] == trajectory.rewards["aggregate_reward"]
        assert trajectory.rewards.keys() >= {"correctness_reward", "n_claims_metric", "num_turns"}
        assert trajectory.rewards["num_turns"] == 1.0


async def test_an_environment_that_is_not_installed_is_told_at_once() -> None:
    """With verifiers' own words."""
    async with workers("verifiers_v0", python_of(VERSIONS[0]), id="no-such-environment") as pool:
        with pytest.raises(EpisodeError, match="Could not import 'no-such-environment' environment") as failure:
            await pool.episode(WAIT)
    assert failure.value.cause == "env_load"


@versions
async def test_turns_have_the_rewards_of_steps(version: str) -> None:
    """Those that the environment or a function of the rubric has set, and not what verifiers fills in itself."""
    texts = ["5", "6", "8"]
    async with world(version, "paid") as pool, await pool.episode(WAIT) as episode:
        trajectory = await played(episode, texts, index=1)
        # by the distance to 8; the rubric's function has paid the first step
        assert trajectory.turn_rewards == [(0, 0.75), (1, -0.5), (2, 0.0)]
        assert trajectory.rewards[ID] == 2.0
    async with world(version, "paid group") as pool, await pool.group(2, WAIT) as group:
        limits = TurnLimits(10_000, 99, max_turns=1)
        long, short = group[0], group[1]
        ended = [await played(long, texts, index=1), await played(short, texts, index=1, limits=limits)]
        assert [one.turn_rewards for one in ended] == [[(0, -0.75), (1, -0.5), (2, 0.0)], [(0, -0.75)]]
        await group.score()
        assert [one.turn_rewards for one in group] == [[(0, 0.75), (1, -0.5), (2, 0.0)], [(0, 0.75)]]
    async with world(version, "group") as pool, await pool.group(2, WAIT) as group:
        for one, text in zip(group, ["long", "short"], strict=True):
            await played(one, [text])
        await group.score()
        assert [one.turn_rewards for one in group] == [[], []]
