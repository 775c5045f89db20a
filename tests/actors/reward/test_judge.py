"""The client of other people's models, against our own engine server and against one that misbehaves; the example."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.http.server import CompletionServer
from actors.reward import judge as module
from actors.reward.judge import ChatClient, Endpoint, EndpointError, EndpointRefusedError
from tests.actors.engines.conftest import make_engine  # noqa: F401 - a fixture
from tests.actors.engines.engines import WAIT
from tests.actors.engines.http.test_openai import MESSAGES, chat_folder, embedded  # noqa: F401 - fixtures

EXAMPLE = Path(__file__).parents[3] / "examples/judge/rewards.py"


@pytest.fixture
def served(embedded: EmbeddedEngine) -> Iterator[str]:  # noqa: F811
    """The embedded engine behind HTTP, with a key."""
    server = CompletionServer(embedded, "tiny", "boot7", "127.0.0.1", 0, WAIT, api_key="secret")
    yield f"http://127.0.0.1:{server.port}"
    server.close()


class Judge:
    """A server that answers what it is told to, in this order, and a grade after that."""

    def __init__(self) -> None:
        self.said: list[tuple[int, Any]] = []
        self.asked: list[Any] = []
        self.now = self.most = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        """One chat completion."""
        self.asked.append(await request.json())
        self.now, self.most = self.now + 1, max(self.most, self.now + 1)
        await asyncio.sleep(0.02)
        self.now -= 1
        status, content = self.said.pop(0) if self.said else (200, "Grade: 7")
        message = {"choices": [{"message": {"content": content}}]} if isinstance(content, str) else content
        return web.json_response(message, status=status)


@pytest.fixture
async def judge(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Judge]:
    """It stands on this event loop; pauses are short."""
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.001)
    module.client_of.cache_clear()
    made = Judge()
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", made.answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


def graded() -> Any:
    """The example's reward function."""
    spec = importlib.util.spec_from_file_location("judge_rewards", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.graded


async def test_our_own_server_answers_as_a_judge(
    served: str,
    embedded: EmbeddedEngine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its key, in whichever form the URL comes; the text is the engine's."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    for url in (served, f"{served}/v1/"):
        client = ChatClient(Endpoint(url, "tiny", "JUDGE_KEY", timeout=WAIT))
        text = await client.chat(MESSAGES, max_tokens=6, seed=3)
        assert 1 <= len(text) <= 6
        await client.close()
    endpoint = {"url": served, "model": "tiny", "api_key_env": "JUDGE_KEY", "timeout": WAIT}
    function = graded()
    function.__globals__["QUESTION"] = "{prompt}{answer}"  # the tiny model's context has no room for more
    assert await function(["ab"], ["cd"], judge=endpoint) == [None]  # this one does not know how to grade
    await module.client_of(Endpoint(**endpoint)).close()  # type: ignore[arg-type]


async def test_a_key_that_is_wrong_or_not_there_is_named(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once; so is a model that is not served."""
    client = ChatClient(Endpoint(served, "tiny"))
    with pytest.raises(EndpointRefusedError, match=r"tiny at http.*: HTTP 401: .*\(api_key_env is not set\)"):
        await client.chat(MESSAGES)
    await client.close()
    with pytest.raises(EndpointRefusedError, match="the environment has no JUDGE_KEY"):
        await ChatClient(Endpoint(served, "tiny", "JUDGE_KEY")).chat(MESSAGES)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    client = ChatClient(Endpoint(served, "other", "JUDGE_KEY"))
    with pytest.raises(EndpointRefusedError, match=r"HTTP 404: .*'other' is not served here"):
        await client.chat(MESSAGES)
    await client.close()


async def test_what_may_pass_is_tried_again(judge: Judge) -> None:
    """Too many requests, a server that fails; then the answer, or after the last try an error that counts them."""
    client = ChatClient(Endpoint(judge.url, "m", retries=2))
    judge.said = [(429, {}), (503, {})]
    assert await client.chat(MESSAGES, temperature=0.0) == "Grade: 7"
    assert judge.asked == [{"model": "m", "messages": MESSAGES, "temperature": 0.0}] * 3
    judge.said = [(500, {"error": "out of memory"})] * 3
    with pytest.raises(EndpointError, match=r"m at http.*: HTTP 500: .*out of memory.*; tried 3 times \(retries 2\)"):
        await client.chat(MESSAGES)
    judge.said = [(200, {"choices": []})]
    with pytest.raises(EndpointError, match="answered no chat completion"):
        await client.chat(MESSAGES)
    await client.close()


async def test_one_that_does_not_answer_is_named(judge: Judge) -> None:
    """In time, or at all."""
    client = ChatClient(Endpoint(judge.url, "m", timeout=0.001, retries=1))
    with pytest.raises(EndpointError, match=r"did not answer within 0.001 s \(timeout\); tried 2 times"):
        await client.chat(MESSAGES)
    await client.close()
    client = ChatClient(Endpoint("http://127.0.0.1:1", "m", retries=0))
    with pytest.raises(EndpointError, match="ClientConnectorError"):
        await client.chat(MESSAGES)
    await client.close()


async def test_a_reward_function_grades_with_bounded_concurrency(judge: Judge) -> None:
    """Twenty completions of two groups, four at a time; prompts and answers are in the question."""
    endpoint = {"url": judge.url, "model": "m", "max_concurrent": 4}
    judge.said = [(200, "Grade: 10"), (200, "I would rather not."), (200, "Grade: 99")]
    chat = [[{"role": "user", "content": "why?"}]] * 10
    answers = [[{"role": "assistant", "content": f"because {i}"}] for i in range(10)]
    function = graded()
    first, second = await asyncio.gather(
        function(chat, answers, judge=endpoint, column=[1] * 10), function(["why?"] * 10, ["so"] * 10, judge=endpoint)
    )
    assert sorted(first + second, key=str) == [0.7] * 17 + [1.0, 1.0, None]
    assert judge.most == 4
    questions = [asked["messages"][0]["content"] for asked in judge.asked]
    assert any("why?" in question and "because 9" in question for question in questions)
    await module.client_of(Endpoint(**endpoint)).close()  # type: ignore[arg-type]
