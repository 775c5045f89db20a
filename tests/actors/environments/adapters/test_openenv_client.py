"""The client of OpenEnv against a server of our own: what a real server rarely does, and what a user writes wrongly."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from actors.environments.adapters.openenv_client import Env

Json = dict[str, Any]
Answer = Callable[[str, Json], Json | None]
"""Answer of the server to a message, by type and data; None closes the connection."""


class Said:
    """Policy that says given things, and remembers what it was shown."""

    def __init__(self, *messages: str | Json) -> None:
        self._messages = [{"role": "assistant", "content": m} if isinstance(m, str) else m for m in messages]
        self.shown: list[list[Json]] = []
        self.tools: Any = None
        self.rewards: dict[str, float] = {}
        """Rewards given to turns, by content."""

    async def sample(self, messages: list[Json], tools: Any = None) -> Json:
        """Say the next one; at the end the trajectory is over, as a worker tells it."""
        self.shown.append(list(messages))
        self.tools = tools
        if len(self.shown) > len(self._messages):
            raise RuntimeError("TrajectoryOverError: 3 turns are the limit (max_turns)")
        return self._messages[len(self.shown) - 1]

    def reward(self, message: Json, reward: float) -> None:
        """Remember the reward of what was said."""
        self.rewards[message["content"]] = reward


def seen(observation: Json, reward: float | None = None, done: bool = False) -> Json:
    """Answer to a reset or a step."""
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def failed(code: str, words: str, **more: Any) -> Json:
    """Answer of a server that refuses."""
    return {"type": "error", "data": {"code": code, "message": words, **more}}


@contextlib.asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[str]:
    """The address of a server that answers so."""

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            if (said := answer(asked["type"], asked["data"])) is None:
                break
            await socket.send_str(json.dumps(said))
            if said["type"] == "error" and said["data"]["code"] == "CAPACITY_REACHED":
                break
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/ws", talk)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


def done_at_once(kind: str, data: Json) -> Json:
    """Server whose first step ends the episode."""
    return seen({"text": "go"}) if kind == "reset" else seen({}, 1.0, True)


async def test_tools_beside_actions_are_called_over_mcp() -> None:
    """A server whose steps take other actions refuses a call; its tools bring no reward then."""
    asked: list[tuple[str, Json]] = []

    def answer(kind: str, data: Json) -> Json:
        asked.append((kind, data))
        if kind == "reset":
            return seen({"text": "go"})
        if kind == "step":
            return failed("VALIDATION_ERROR", "Invalid message")
        if data["method"] == "tools/list":
            return {"type": "mcp", "data": {"result": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}}}
        result = {"content": [{"type": "text", "text": "seven"}], "isError": False}
        return {"type": "mcp", "data": {"result": result}}

    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": 1}'}}
    policy = Said({"role": "assistant", "content": "", "tool_calls": [call, call]}, "Seven.")
    async with served(answer) as url:
        assert await Env(url, tools=True).run({}, policy) == {"openenv": None}
    assert policy.tools[0]["function"] == {"name": "look", "description": "", "parameters": {"type": "object"}}
    assert [m["content"] for m in policy.shown[1] if m["role"] == "tool"] == ["seven", "seven"]
    assert [kind for kind, _ in asked] == ["reset", "mcp", "step", "mcp", "mcp"], "a step is tried once"


@pytest.mark.parametrize("by_turn", [False, True])
async def test_rewards_of_steps_are_of_the_episode_or_of_their_turns(by_turn: bool) -> None:
    """Once in each case; a step without a reward gives its turn none."""
    rewards: list[float | None] = [0.25, None, 0.5]

    def answer(kind: str, data: Json) -> Json:
        return seen({"text": "go"}) if kind == "reset" else seen({}, rewards.pop(0), not rewards)

    policy = Said("a", "b", "c")
    async with served(answer) as url:
        earned = await Env(url, action={"text": "{text}"}, turn_rewards=by_turn).run({}, policy)
    assert (earned, policy.rewards) == (({}, {"a": 0.25, "c": 0.5}) if by_turn else ({"openenv": 0.75}, {}))


async def test_the_calls_of_a_turn_share_its_reward() -> None:
    """Each call is a step; with rewards of turns, those of one message are added."""

    def answer(kind: str, data: Json) -> Json:
        if kind == "mcp":
            return {"type": "mcp", "data": {"result": {"tools": [{"name": "look"}]}}}
        return seen({"result": "seven"}, None if kind == "reset" else 0.5)

    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
    twice, once = (
        {"role": "assistant", "content": text, "tool_calls": [call] * n} for text, n in (("two", 2), ("one", 1))
    )
    policy = Said(twice, once, "Seven.")
    async with served(answer) as url:
        assert await Env(url, tools=True, turn_rewards=True).run({}, policy) == {}
    assert policy.rewards == {"two": 1.0, "one": 0.5}


async def test_all_episodes_of_an_example_get_the_same_seed() -> None:
    """Their own seeds differ; another example has another one."""
    resets: list[Json] = []

    def answer(kind: str, data: Json) -> Json:
        if kind == "reset":
            resets.append(data)
        return done_at_once(kind, data)

    async with served(answer) as url:
        for index, seed in ((1, 5), (1, 6), (2, 7)):
            env = Env(url, action={"text": "{text}"}, reset={"level": 3})
            row = {"index": index, "split": "eval", "seed": seed, "prompt": ""}
            assert await env.run(row, Said("a")) == {"openenv": 1.0}
    first, second, third = resets
    assert first == second
    assert third["seed"] != first["seed"]
    assert first | {"index": 1, "split": "test", "level": 3} == first


async def test_a_place_on_a_full_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that does not come is told with what to raise."""
    answers = [failed("CAPACITY_REACHED", "full", max_sessions=2)] * 2

    def answer(kind: str, data: Json) -> Json:
        return answers.pop() if kind == "reset" and answers else done_at_once(kind, data)

    async with served(answer) as url:
        assert await Env(url, action={}).run({}, Said("a")) == {"openenv": 1.0}
        answers.append(failed("CAPACITY_REACHED", "full", max_sessions=2))
        with pytest.raises(TimeoutError, match=r"no place on .* for -1 s: full \(2 sessions\); raise the server"):
            await Env(url, action={}, capacity_seconds=-1).run({}, Said("a"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda kind, data: None, "ended the connection during a reset"),
        (lambda kind, data: seen({}) if kind == "reset" else None, "ended the connection during a step"),
        (lambda kind, data: failed("FACTORY_ERROR", "no memory"), "answered FACTORY_ERROR: no memory"),
    ],
)
async def test_a_server_that_fails_is_no_reward(answer: Answer, words: str) -> None:
    """The episode fails with its words."""
    async with served(answer) as url:
        with pytest.raises((ConnectionError, RuntimeError), match=words):
            await Env(url, action={}).run({}, Said("a"))


@pytest.mark.parametrize(
    ("template", "text", "action"),
    [
        ({"move": "{number}", "by": ["{text}", 1]}, "I take 3, no: 4", {"move": 4, "by": ["I take 3, no: 4", 1]}),
        (None, 'First {"a": 1}.\n```json\n{"a": {"b": 2}}\n```\n', {"a": {"b": 2}}),
        (None, 'I say {"a": 1}.', {"a": 1}),
        ({"move": "{number}"}, "north", "No number was found"),
        (None, "north [1]", "No action was found"),
    ],
)
async def test_an_action_is_made_from_the_answer(template: Json | None, text: str, action: Json | str) -> None:
    """By the template, or as the last JSON object; without one the model is told so, at the cost of a turn."""
    steps: list[Json] = []

    def answer(kind: str, data: Json) -> Json:
        if kind == "step":
            steps.append(data)
        return done_at_once(kind, data)

    policy = Said(text)
    async with served(answer) as url:
        rewards = await Env(url, action=template, unrewarded=-1.0).run({}, policy)
    if isinstance(action, dict):
        assert (steps, rewards) == ([action], {"openenv": 1.0})
    else:
        assert (steps, rewards) == ([], {"openenv": -1.0})
        assert action in policy.shown[1][-1]["content"]


@pytest.mark.parametrize(
    ("prompt", "options", "observation", "expected"),
    [
        ("", {}, {"text": "go"}, [("user", "go")]),
        ("Play.", {"system": "s"}, {"text": "go"}, [("system", "s"), ("user", "Play.\n\ngo")]),
        (
            [{"role": "assistant", "content": "Hi."}],
            {},
            {"n": 1, "metadata": {}},
            [("assistant", "Hi."), ("user", '{"n": 1}')],
        ),
        ("", {"observation": "{n} of {m}"}, {"n": 1, "m": 2, "text": "x"}, [("user", "1 of 2")]),
        ("", {}, {"metadata": {"task": "x"}}, [("user", '{"metadata": {"task": "x"}}')]),
    ],
)
async def test_the_first_observation_follows_the_prompt(
    prompt: Any, options: Json, observation: Json, expected: list[tuple[str, str]]
) -> None:
    """As a text of its own choice."""
    policy = Said()
    async with served(lambda kind, data: seen(observation)) as url:
        assert await Env(url, **options).run({"prompt": prompt}, policy) == {"openenv": None}
    assert [(message["role"], message["content"]) for message in policy.shown[0]] == expected


async def test_what_a_user_writes_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option to change."""
    with pytest.raises(ValueError, match="url: 'localhost:8000' must begin with http://"):
        Env("localhost:8000")
    with pytest.raises(ValueError, match="action: the model calls tools here"):
        Env("http://h", tools=True, action={})
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(ValueError, match="headers_from: the environment variable NO_SUCH is not set"):
        Env("http://h", headers_from={"Authorization": "NO_SUCH"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'sesions'"):
        await Env.examples("train", url="http://h", sesions=3)
    async with served(lambda kind, data: seen({"n": 1, "m": 2})) as url:
        with pytest.raises(ValueError, match="observation: KeyError: 'k'; the fields of this observation are: n, m"):
            await Env(url, observation="{k}").run({}, Said())


async def test_a_sample_that_fails_is_raised() -> None:
    """Only a limit of the trajectory ends an episode well."""

    class Failing(Said):
        async def sample(self, messages: list[Json], tools: Any = None) -> Json:
            await asyncio.sleep(0)
            raise RuntimeError("EngineError: no engine")

    async with served(done_at_once) as url:
        with pytest.raises(RuntimeError, match="EngineError: no engine"):
            await Env(url).run({}, Failing())
