"""Episodes on real OpenEnv servers: actions, tools, a full server."""

import asyncio
import json
from typing import Any

import pytest

from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool
from actors.trajectories.recorder import TurnLimits
from tests.system.environments.scripted import WAIT, call, played, workers
from tests.system.environments.servers import served

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SIX = TurnLimits(10_000, 200, max_turns=6)


def client(url: str, **options: Any) -> WorkerPool:
    """A worker whose interpreter is ours: it needs aiohttp alone."""
    return workers("openenv_client", "", url=url, **options)


async def test_a_text_becomes_an_action_until_the_environment_is_done() -> None:
    """The seed belongs to the example, so that all episodes of a group play the same game."""
    with served("openenv_server.py", "echo", "8") as url:
        options = {"action": {"message": "{text}"}, "observation": "You said {echoed_message}", "tasks": "echo"}
        async with client(url, system="Talk.", **options) as pool:
            async with await pool.episode(WAIT) as episode, await pool.episode(WAIT) as other:
                first = await played(episode, ["hello", "bye"], index=3, limits=SIX)
                second = await played(other, ["x" * 30, "bye"], index=3, limits=SIX)
                assert (first.stop, first.rewards) == ("done", {"openenv": pytest.approx(0.8)})
                texts = [message["content"] for message in first.messages]
                assert texts[0] == "Talk."
                assert texts[1].endswith("[('index', 3), ('split', 'train')]")
                assert texts[2:] == ["hello", "You said hello", "bye"]
                assert second.messages[1] == first.messages[1]
                # a message that the action does not take is the model's mistake, and costs a turn
                assert "The action was refused" in second.messages[3]["content"]
                assert "at most 20 characters" in second.messages[3]["content"]
            assert pool.examples == {"train": 7, "eval": 2}
            async with await pool.episode(WAIT) as episode:
                limited = await played(episode, ["a"] * 9, index=4, split="eval", limits=SIX)
                assert (limited.stop, limited.rewards) == ("max_turns", {"openenv": pytest.approx(0.6)})
                assert "('split', 'test')" in limited.messages[1]["content"]
            async with await pool.episode(WAIT) as episode:
                with pytest.raises(EpisodeError, match="answered EXECUTION_ERROR: 'no such key'"):
                    await played(episode, ["boom"], limits=SIX)
            async with await pool.episode(WAIT) as episode:
                with pytest.raises(IndexError, match="list index out of range"):
                    await played(episode, [], limits=SIX)


async def test_turns_may_have_the_rewards_of_their_steps() -> None:
    """A real server's rewards, each with its turn; a refused action has none."""
    with served("openenv_server.py", "echo", "8") as url:
        pool = client(url, action={"message": "{text}"}, turn_rewards=True)
        async with pool, await pool.episode(WAIT) as episode:
            trajectory = await played(episode, ["hello", "x" * 30, "bye"], index=3, limits=SIX)
    assert trajectory.rewards == {}
    assert [turn for turn, _ in trajectory.turn_rewards] == [0, 2]
    assert sum(reward for _, reward in trajectory.turn_rewards) == pytest.approx(0.8)


async def test_without_a_template_the_model_writes_the_action_as_json() -> None:
    """An answer without an action is told so; an episode without a reward has none."""
    with served("openenv_server.py", "echo", "8") as url:
        async with client(url) as pool:
            async with await pool.episode(WAIT) as episode:
                texts = ["Hello.", 'So:\n```json\n{"message": "bye"}\n```']
                trajectory = await played(episode, texts, limits=SIX)
                assert "No action was found" in trajectory.messages[2]["content"]
                assert trajectory.rewards == {"openenv": pytest.approx(0.3)}
                assert json.loads(trajectory.messages[0]["content"])["message_length"] == 0
            assert pool.examples == {"train": None, "eval": None}
            async with await pool.episode(WAIT) as episode:
                assert (await played(episode, ["Hello."] * 9, limits=SIX)).rewards == {"openenv": None}


async def test_tools_of_the_server_are_called_by_steps_with_rewards() -> None:
    """An answer without a call ends the episode; a wrong call is the model's to learn from."""
    with served("openenv_server.py", "adder", "8") as url:
        async with client(url, tools=True, name="adder") as pool, await pool.episode(WAIT) as episode:
            texts = [call("add", a=1, b=2) + call("add", a="x"), call("nothing"), "3"]
            trajectory = await played(episode, texts, limits=SIX)
            results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
            assert results[0] == "3"
            assert all("error" in one for one in results[1:])
            assert (trajectory.stop, trajectory.rewards) == ("done", {"adder": 0.5})
            assert trajectory.recorder.num_calls == 3


async def test_a_full_server_is_waited_for_and_then_told() -> None:
    """One place: a second episode begins once the first has ended; a third that waits in vain says what to raise."""
    with served("openenv_server.py", "echo", "1") as url:
        options = {"action": {"message": "{text}"}}
        async with client(url, **options) as pool:
            async with await pool.episode(WAIT) as first, await pool.episode(WAIT) as second:
                ended = await asyncio.gather(played(first, ["bye"]), played(second, ["bye"]))
            assert [one.rewards["openenv"] for one in ended] == [pytest.approx(0.3)] * 2
        async with client(url, capacity_seconds=0, **options) as pool:
            async with await pool.episode(WAIT) as first, await pool.episode(WAIT) as second:
                both = await asyncio.gather(
                    played(first, ["a"] * 40 + ["bye"]), played(second, ["a"] * 40 + ["bye"]), return_exceptions=True
                )
            [failure] = [one for one in both if isinstance(one, BaseException)]
            assert isinstance(failure, EpisodeError)
            assert "raise the server's max_concurrent_envs" in str(failure)


async def test_a_server_that_is_not_there_is_named() -> None:
    """Before any episode, where it counts the examples; otherwise in the first."""
    async with client("ws://127.0.0.1:9/ws", tasks="echo") as pool:
        with pytest.raises(EpisodeError, match=r"no answer from http://127\.0\.0\.1:9/echo/num_tasks: .*correct url"):
            await pool.episode(WAIT)
    async with client("ws://127.0.0.1:9/ws") as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError, match=r"no WebSocket at http://127\.0\.0\.1:9/ws: .*correct url"):
            await played(episode, ["a"])
