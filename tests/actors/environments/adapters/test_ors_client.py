"""The client of the Open Reward Standard against a server of our own: lost connections, images, signs of life."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from actors.environments.adapters import ors_client
from actors.environments.adapters.ors_client import Env
from tests.actors.environments.adapters.test_openenv_client import Said

Json = dict[str, Any]

TEXT = [{"type": "text", "text": "What is 2 + 1?"}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "function": {"name": "answer", "arguments": '{"value": 3}'}}],
}


class Double:
    """Server with one environment and one tool.

    Args:
        drops: connections of a call that are lost: after the name of the task, or at once.
    """

    def __init__(self, drops: str = "", num_drops: int = 0, prompt: list[Json] | None = None) -> None:
        self.drops, self.num_drops, self.prompt = drops, num_drops, prompt or TEXT
        self.requests: list[tuple[str, Json, str]] = []
        self.heard: dict[str, asyncio.Event] = {name: asyncio.Event() for name in ("ping", "delete")}
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        body = await request.json() if request.can_read_body else {}
        self.requests.append((path, body, request.headers.get("X-Session-ID", "")))
        if path in self.heard:
            self.heard[path].set()
        if path == "create_session":
            return await self._stream(request, [("task_id", "s1"), ("end", "")])
        if path == "sums/call":
            return await self._call(request)
        answers = {
            "list_environments": ["Sums"],
            "sums/splits": [{"name": "val", "type": "validation"}, {"name": "main", "type": "train"}],
            "sums/num_tasks": {"num_tasks": 4},
            "sums/prompt": self.prompt,
            "sums/task_tools": {"tools": [{"name": "answer", "description": "", "input_schema": None}]},
        }
        return web.json_response(answers.get(path, {}))

    async def _call(self, request: web.Request) -> web.StreamResponse:
        output = {"blocks": [{"type": "text", "text": "Thanks."}], "reward": 0.5, "finished": True}
        result = json.dumps({"ok": True, "output": output})
        events = [("task_id", "t1"), ("chunk", result[:9]), ("end", result[9:])]
        if self.num_drops:
            self.num_drops -= 1
            return await self._stream(request, events[:1] if self.drops == "late" else [], is_lost=True)
        return await self._stream(request, events)

    async def _stream(
        self, request: web.Request, events: list[tuple[str, str]], is_lost: bool = False
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b": ping\r\n\r\n")
        for event, data in events:
            await stream.write(f"event: {event}\r\ndata: {data}\r\n\r\n".encode())
        if is_lost:
            assert request.transport is not None
            request.transport.abort()
        return stream

    def asked(self, path: str) -> list[Json]:
        """Bodies of the requests for a path."""
        return [body for one, body, _ in self.requests if one == path]


async def played(double: Double, policy: Said, row: Json | None = None, **options: Any) -> dict[str, float | None]:
    """An episode against a server."""
    async with double.server as server:
        row = {"index": 3, "split": "train", "prompt": ""} if row is None else row
        return await Env(str(server.make_url("")), **options).run(row, policy)


async def test_a_lost_connection_asks_for_the_result_of_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call acts once, and its reward counts once."""
    monkeypatch.setattr(ors_client, "PAUSE_SECONDS", 0.0)
    double = Double("late", num_drops=2)
    assert await played(double, Said(CALL)) == {"sums": 0.5}
    call = {"name": "answer", "input": {"value": 3}}
    assert double.asked("sums/call") == [call, call | {"task_id": "t1"}, call | {"task_id": "t1"}]


async def test_rewards_of_calls_are_of_their_turn_where_this_is_asked_for() -> None:
    """Of two calls in a message both count, for this message."""
    policy = Said(CALL | {"content": "both", "tool_calls": CALL["tool_calls"] * 2})
    assert await played(Double(), policy, turn_rewards=True) == {}
    assert policy.rewards == {"both": 1.0}
    assert await played(Double(), Said("no call"), turn_rewards=True, unrewarded=0.0) == {"sums": 0.0}


async def test_a_call_without_a_name_is_not_repeated() -> None:
    """It might act twice; the episode fails, and the session is given back."""
    double = Double("early", num_drops=1)
    with pytest.raises(ConnectionError, match=r"no answer from .*sums/call"):
        await played(double, Said(CALL))
    assert len(double.asked("sums/call")) == 1
    assert double.requests[-1][::2] == ("delete", "s1")


async def test_a_session_lives_while_the_model_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server forgets a session without any sign of life."""
    monkeypatch.setattr(ors_client, "PING_SECONDS", 0.0)
    double = Double()

    class Slow(Said):
        async def sample(self, messages: list[Json], tools: Any = None) -> Json:
            async with asyncio.timeout(60):
                await double.heard["ping"].wait()
            return await super().sample(messages, tools)

    assert await played(double, Slow(CALL)) == {"sums": 0.5}


async def test_images_are_parts_of_the_prompt() -> None:
    """In OpenAI's form, behind the row's own prompt."""
    prompt = [*TEXT, {"type": "image", "data": "QUJD", "mimeType": "image/png"}]
    policy = Said("Three.")
    row = {"task_spec": {"n": 2}, "prompt": "Look."}
    assert await played(Double(prompt=prompt), policy, row, system="s", name="r", unrewarded=None) == {"r": None}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    assert [(message["role"], message["content"]) for message in policy.shown[0]] == [
        ("system", "s"),
        ("user", "Look."),
        ("user", [TEXT[0], image]),
    ]


@pytest.mark.parametrize(
    ("row", "options", "task"),
    [
        ({"index": 3}, {}, {"split": "main", "index": 3}),
        ({"index": 3, "split": "eval"}, {}, {"split": "val", "index": 3}),
        ({"index": 3, "split": "eval"}, {"evaluation_split": "x"}, {"split": "x", "index": 3}),
        ({"task_spec": {"n": 2}}, {"secrets_from": {"key": "A_KEY"}}, {"task_spec": {"n": 2}, "secrets": {"key": "k"}}),
    ],
)
async def test_a_row_names_its_task(row: Json, options: Json, task: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its place in a split of the server's, or by itself."""
    monkeypatch.setenv("A_KEY", "k")
    double = Double()
    await played(double, Said(CALL), row, **options)
    assert double.asked("create") == [{"env_name": "sums"} | task]


async def test_what_a_user_writes_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option to change."""
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(ValueError, match="key_from: the environment variable NO_SUCH is not set"):
        Env("http://h", key_from="NO_SUCH")
    with pytest.raises(ValueError, match="the row has neither task_spec nor index"):
        await played(Double(), Said(CALL), {"question": "Why?"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'enviroment'"):
        await Env.examples("train", url="http://h", enviroment="sums")
    with pytest.raises(ConnectionError, match="start the server, or correct url"):
        await Env.examples("train", url="http://127.0.0.1:9")
    async with (double := Double()).server as server:
        assert await Env.examples("eval", url=str(server.make_url(""))) == 4
        assert double.asked("sums/num_tasks") == [{"split": "val"}]
