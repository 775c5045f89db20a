"""Sessions over HTTP: keys, retries, budgets, hang-ups, and what each call leaves in the record."""

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actors.engines.http.access import server_tls
from actors.rollout.sessions.server import SessionServer
from actors.rollout.sessions.session import Session
from actors.rollout.sessions.table import SessionTable
from actors.trajectories.recorder import Recorder, TurnLimits
from schemas import limits
from schemas.config.actors import SessionsConfig
from schemas.errors import ConfigError
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import Writer, language

ASKED = [{"role": "user", "content": "Hello?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = '<tool_call>\n{"name": "add", "arguments": {"number":  2}}\n</tool_call>'


class Endpoint:
    """A server with one open session, whose model writes given texts."""

    def __init__(self, stack: AsyncExitStack, texts: list[str], limits: TurnLimits | None) -> None:
        self._stack = stack
        family = Chat("qwen2_5")
        self.writer = Writer(family, texts)
        self.hold = asyncio.Event()
        """The model waits for it."""
        self.hold.set()
        self.recorder: Recorder = self.writer.recorder(limits)
        self.table, self.told = SessionTable(), []
        chat = language(family)
        self.session = Session("game", self._ask, chat, {"question": "Hello?"})
        self.server = SessionServer(
            self.table, {"game": chat}, "tiny", 1000, admin_key="admin", count=lambda *call: self.told.append(call)
        )

    async def open(self) -> "Endpoint":
        """Start to serve."""
        await self._stack.enter_async_context(self.server)
        await self._stack.enter_async_context(self.table.opened(self.session))
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        return self

    async def _ask(self, messages: Any, options: Any, prompt_ids: Any) -> Any:
        await self.hold.wait()
        return await self.recorder.turn(
            messages, options["tools"], options["max_tokens"], options["stop"], None, prompt_ids
        )

    async def post(
        self, path: str, body: Any, key: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and answer of a request with the session's key, or another one."""
        bearer = {"Authorization": f"Bearer {self.session.key if key is None else key}"}
        async with self.http.post(self.server.url + path, json=body, headers=bearer | (headers or {})) as answer:
            return answer.status, await answer.json()

    async def chat(self, messages: Any, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
        """Status and answer of a chat."""
        return await self.post("/v1/chat/completions", {"model": "any", "messages": messages} | body, None, headers)


@pytest.fixture
async def make() -> AsyncIterator[Any]:
    """Makes an endpoint of texts and limits."""
    async with AsyncExitStack() as stack:
        yield lambda texts, limits=None: Endpoint(stack, texts, limits).open()


async def test_the_key_names_the_session_in_four_places(make: Any) -> None:
    """Without one, or with another one, nothing is told but that; the path counts more than a dummy key."""
    end = await make(["a", "b", "c", "d"])
    body, url = {"messages": ASKED}, end.server.url
    places = [
        ("/v1/chat/completions", {"Authorization": f"Bearer {end.session.key}"}),
        ("/v1/chat/completions", {"x-api-key": end.session.key}),
        ("/v1/chat/completions", {"X-Session-ID": end.session.key}),
        (f"/s/{end.session.key}/v1/chat/completions", {"Authorization": "Bearer EMPTY"}),
    ]
    for path, headers in places:
        async with end.http.post(url + path, json=body, headers=headers) as answer:
            assert answer.status == 200
    for headers in ({}, {"Authorization": "Bearer no"}, {"x-api-key": end.session.key[:-1]}):
        async with end.http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 401
            assert answer.headers["x-should-retry"] == "false"
            assert (await answer.json())["error"]["message"] == "key: no session has this key"


async def test_history_that_clients_write_anew_continues_the_turn(make: Any) -> None:
    """Thoughts dropped, blanks stripped, arguments with other blanks, empty fields: still the recorded answer."""
    end = await make([f"<think>\nAdd.\n</think>\n\nNow. {CALLS}", "Done."])
    status, first = await end.chat(ASKED, tools=[TOOL], return_token_ids=True)
    message = first["choices"][0]["message"]
    assert (status, first["choices"][0]["finish_reason"]) == (200, "tool_calls")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"number":  2}'
    back = {"role": "assistant", "content": (message["content"] or "").strip(), "refusal": None}
    back["tool_calls"] = [dict(message["tool_calls"][0])]
    back["tool_calls"][0]["function"] = {"name": "add", "arguments": '{"number": 2}'}
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    status, second = await end.chat([*ASKED, back, tool], tools=[TOOL], return_token_ids=True)
    assert status == 200
    assert end.recorder.tree.num_branches == 0
    ids = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    assert second["prompt_token_ids"][: len(ids)] == ids


@pytest.mark.parametrize("headers", [{"Idempotency-Key": "k"}, {"x-stainless-retry-count": "1"}])
async def test_a_repeated_call_is_answered_from_the_record(make: Any, headers: dict[str, str]) -> None:
    """One turn, however often it is asked; without a sign of a repetition it is another turn."""
    end = await make(["a", "b"])
    first = await end.chat(ASKED, {"Idempotency-Key": "k"} if "Idempotency-Key" in headers else None)
    again = await end.chat(ASKED, headers)
    assert again[1]["id"] == first[1]["id"]
    assert end.recorder.tree.num_turns == 1
    other = await end.chat(ASKED)
    assert other[1]["id"] != first[1]["id"]
    assert end.told == [("game", "answered"), ("game", "repeated"), ("game", "answered")]


async def test_a_client_that_leaves_gets_the_same_answer_later_and_one_that_never_comes_trains_nothing(
    make: Any,
) -> None:
    """The turn goes on without its client; its answer is untaken until somebody has got all of it."""
    end = await make(["a", "b"])
    end.hold.clear()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await end.chat(ASKED, {"Idempotency-Key": "k"})
    end.hold.set()
    while not end.session.untaken:
        await asyncio.sleep(0.01)
    assert end.session.untaken == [0]
    end.recorder.tree.leave_out(0)
    assert sum(end.recorder.tree.samples()[0].loss_mask) == 0
    assert (await end.chat(ASKED, {"Idempotency-Key": "k"}))[0] == 200
    assert (end.session.untaken, end.recorder.tree.num_turns) == ([], 1)


async def test_limits_are_told_with_their_status(make: Any) -> None:
    """Over budget 429, too long 400 by OpenAI's code, after the end 409; OpenAI's client asks none of them again."""
    end = await make(["a"], TurnLimits(200, 9, max_turns=1))
    status, answer = await end.chat([{"role": "user", "content": "x" * 400}])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await end.chat(ASKED))[0] == 200
    status, answer = await end.chat(ASKED)
    assert (status, answer["error"]["message"]) == (429, "budget: 1 turns are the limit (max_turns)")
    assert (await end.post("/rl/end_session", {"reward": 0.5}))[0] == 200
    assert (await end.chat(ASKED))[0] == 409
    assert end.session.split({}) == {"game": 0.5}
    await end._stack.aclose()


async def test_sampling_parameters_are_pinned_and_told(make: Any) -> None:
    """They would bias the ratio; unknown ones are told too."""
    end = await make(["a"])
    await end.chat(ASKED, temperature=0.2, top_p=0.5, store=True, user="me")
    assert end.session.info == {"pinned": "temperature, top_p", "ignored": "store"}
    status, answer = await end.chat(ASKED, n=2)
    assert (status, answer["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "body: is no JSON"),
        (b"[1]", 400, "body: must be a JSON object"),
        (b"{}", 400, "messages: must be a list"),
        (b'{"messages": [{"role": 3}]}', 400, "messages.0: must be a message with a role"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            400,
            "messages.0.content.0.image_url",
        ),
        (b'{"messages": [{"role": "user"}], "max_tokens": 0}', 400, "max_tokens: must be a whole number"),
        (b'{"messages": [{"role": "user"}], "tools": [{}]}', 400, "tools.0: must be"),
        (b'{"messages": [{"role": "user"}], "stop": [""]}', 400, "stop: must be"),
        (b"[" * 100_000, 400, "body: is no JSON"),
        (b" " * (17 << 20), 400, "body: more than the 1048576 bytes of any conversation with 1000 tokens"),
    ],
)
async def test_hostile_bodies_are_refused_in_words(make: Any, body: bytes, status: int, words: str) -> None:
    """And the session goes on."""
    end = await make(["a"])
    headers = {"Authorization": f"Bearer {end.session.key}"}
    async with end.http.post(f"{end.server.url}/v1/chat/completions", data=body, headers=headers) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["message"].startswith(words)
    assert (await end.chat(ASKED))[0] == 200


async def test_a_stream_is_the_answer_replayed_whole(make: Any) -> None:
    """Chunks as OpenAI's client joins them."""
    end = await make([CALLS])
    body = {"messages": ASKED, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {end.session.key}"}
    async with end.http.post(f"{end.server.url}/v1/chat/completions", json=body, headers=headers) as answer:
        lines = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:-1]] == ["assistant", None, None]
    assert chunks[1]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert chunks[2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[3]["usage"]["completion_tokens"] == len(end.writer.answers[0].token_ids)
    assert end.session.untaken == []


async def test_rewards_are_of_calls_or_of_the_whole(make: Any) -> None:
    """By id, of the newest call, or in what the agent returns; other names are rewards of the trajectory."""
    end = await make(["a", "b", "c"])
    first = (await end.chat(ASKED))[1]["id"]
    second = (await end.chat([{"role": "user", "content": "Other."}]))[1]["id"]
    await end.post("/rl/set_reward", {"interaction_id": first, "reward": 1})
    await end.post("/rl/set_reward", {"interaction_id": None, "reward": 2.5})
    assert end.session.turn_rewards == [(0, 1.0), (1, 2.5)]
    assert (await end.post("/rl/set_reward", {"interaction_id": "no", "reward": 1}))[0] == 404
    assert (await end.post("/rl/set_reward", {"reward": "nan"}))[0] == 400
    assert end.session.split({second: -1.0, "style": 0.5}) == {"style": 0.5}
    assert end.session.turn_rewards == [(0, 1.0), (1, -1.0)]


async def test_a_service_takes_a_waiting_trajectory_once(make: Any) -> None:
    """With the key of services alone; the next one waits for its time."""
    end = await make(["a"])
    end.table.offer(end.session)
    assert (await end.post("/rl/start_session", {}, "wrong"))[0] == 401
    status, taken = await end.post("/rl/start_session", {"wait": 1}, "admin")
    assert (status, taken["data"], taken["api_key"]) == (200, {"question": "Hello?"}, end.session.key)
    assert (await end.post("/rl/start_session", {"wait": 0.1}, "admin"))[0] == 429


async def test_tokens_are_counted_and_prompts_of_tokens_continue_exactly(make: Any) -> None:
    """As verifiers' token client does: /tokenize at the root, then the prompt's ids beside the messages."""
    end = await make(["a", "b"])
    _, first = await end.chat(ASKED, return_token_ids=True)
    _, told = await end.post("/tokenize", {"model": "any", "messages": ASKED})
    assert told["tokens"] == first["prompt_token_ids"]
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 1000)
    ids = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    more = (await end.post("/tokenize", {"prompt": "\nuser: And?\n"}))[1]["tokens"]
    body = {"messages": [*ASKED, {"role": "user", "content": "And?"}], "tokens": [*ids, *more]}
    status, second = await end.post("/v1/chat/completions/tokens", body)
    assert (status, second["prompt_token_ids"]) == (200, [*ids, *more])
    assert end.recorder.tree.num_branches == 0
    assert len(end.recorder.tree.samples()) == 1


async def test_every_path_of_the_page_is_served(make: Any) -> None:
    """Each API by its own body; each answer has the ids that the engine sampled, or their text."""
    end = await make(["a", "b", "c", "d"])
    asked = {"model": "any", "max_tokens": 9}
    status, answer = await end.post("/v1/messages", asked | {"messages": ASKED})
    assert (status, answer["content"]) == (200, [{"type": "text", "text": "a"}])
    status, answer = await end.post("/v1/responses", {"model": "any", "input": "Hello?"})
    assert (status, answer["output"][0]["content"][0]["text"]) == (200, "b")
    status, answer = await end.post("/v1/completions", asked | {"prompt": "Hello?"})
    assert (status, answer["choices"][0]["text"]) == (200, "c")
    body = {"model": "any", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9}}
    status, answer = await end.post("/inference/v1/generate", body)
    assert (status, answer["choices"][0]["token_ids"]) == (200, end.writer.answers[3].token_ids)
    _, counted = await end.post("/v1/messages/count_tokens", asked | {"messages": ASKED})
    assert counted == {"input_tokens": len(end.writer.requests[0].prompt_ids)}
    async with end.http.get(f"{end.server.url}/s/{end.session.key}/v1/models") as answer:
        assert (await answer.json())["data"][0]["max_model_len"] == 1000


async def test_a_body_that_does_not_come_is_given_up(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of a slow client is not held for good."""
    monkeypatch.setattr(limits, "HTTP_HEAD_SECONDS", 0.3)
    end = await make(["a"])

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    headers = {"Authorization": f"Bearer {end.session.key}"}
    async with end.http.post(f"{end.server.url}/v1/chat/completions", data=slow(), headers=headers) as answer:
        assert answer.status == 408
        assert (await answer.json())["error"]["message"].startswith("body: not here within")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_over_tls_the_address_says_so(tmp_path: Path) -> None:
    """Clients that trust the certificate are answered; the agent is given https and the advertised host."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make_cert = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make_cert, *names], check=True, capture_output=True, timeout=60)
    tls = server_tls(SessionsConfig(tls_cert=str(cert), tls_key=str(key)), "rollout.sessions")
    async with SessionServer(SessionTable(), {}, "tiny", 1000, advertised="localhost", tls=tls) as server:
        assert server.url.startswith("https://localhost:")
        trusted = ssl.create_default_context(cafile=str(cert))
        async with aiohttp.ClientSession() as http, http.get(f"{server.url}/health", ssl=trusted) as answer:
            assert answer.status == 200
    with pytest.raises(ConfigError, match=r"rollout\.sessions\.tls_cert, rollout\.sessions\.tls_key: can't be used"):
        server_tls(SessionsConfig(tls_cert=str(key), tls_key=str(key)), "rollout.sessions")
