"""Episodes on a real server of the Open Reward Standard."""

import pytest

from actors.environments.errors import EpisodeError
from actors.trajectories.recorder import TurnLimits
from tests.system.environments.scripted import WAIT, call, played, workers
from tests.system.environments.servers import served

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


async def test_calls_bring_rewards_until_one_finishes_the_episode() -> None:
    """Their sum is the reward; splits are found by their types; nothing that fails is a reward."""
    limits = TurnLimits(100_000, 200, max_turns=3)
    with served("ors_server.py") as url:
        async with workers("ors_client", "", url=url) as pool:
            async with await pool.episode(WAIT) as episode:
                texts = [call("hint", value=1) + call("hint", value="x"), call("nothing"), call("answer", value=3)]
                trajectory = await played(episode, texts, index=2, limits=limits)
                assert trajectory.messages[0]["content"] == "What is 2 + 1?"
                results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
                assert results[0] == "x" * 10_000
                assert results[1].startswith("error: Tool input validation error")
                assert results[2] == "error: 'nothing' is not a valid tool"
                # the last result ends the episode; nobody answers it any more
                assert (trajectory.rewards, trajectory.tree.num_turns) == ({"sums": 0.75}, 3)
            assert pool.examples == {"train": 5, "eval": 2}
            async with await pool.episode(WAIT) as episode:
                trajectory = await played(episode, [call("answer", value=9)], index=1, split="eval", limits=limits)
                assert trajectory.rewards == {"sums": 0.0}
            async with await pool.episode(WAIT) as episode:
                assert (await played(episode, ["Two."], limits=limits)).rewards == {"sums": 0.0}
            async with await pool.episode(WAIT) as episode:
                limited = await played(episode, [call("hint", value=1)] * 9, limits=limits)
                assert (limited.stop, limited.rewards) == ("max_turns", {"sums": -0.75})
            async with await pool.episode(WAIT) as episode:
                trajectory = await played(episode, [call("answer", value=42)], task_spec={"n": 41}, limits=limits)
                assert trajectory.rewards == {"sums": 1.0}
            async with await pool.episode(WAIT) as episode:
                with pytest.raises(EpisodeError, match="the ORS server failed in the tool hint: 'no such key'"):
                    await played(episode, [call("hint", value=13)], limits=limits)
            async with await pool.episode(WAIT) as episode:
                with pytest.raises(EpisodeError, match=r"answered 400: .*Invalid index"):
                    await played(episode, [], index=99, limits=limits)


async def test_turns_may_have_the_rewards_of_their_calls() -> None:
    """A real server's rewards, each with its turn; a call that is the model's mistake brings none."""
    limits = TurnLimits(100_000, 200, max_turns=4)
    with served("ors_server.py") as url:
        async with workers("ors_client", "", url=url, turn_rewards=True) as pool:
            async with await pool.episode(WAIT) as episode:
                texts = [call("hint", value=1) * 2, call("nothing"), call("answer", value=3)]
                trajectory = await played(episode, texts, index=2, limits=limits)
                assert (trajectory.turn_rewards, trajectory.rewards) == ([(0, -0.5), (2, 1.0)], {})
            async with await pool.episode(WAIT) as episode:
                silent = await played(episode, ["Two."], limits=limits)
                assert (silent.turn_rewards, silent.rewards) == ([], {"sums": 0.0})
