"""The client of rollout actors, against the real server in front of a fake engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web

from actors.engines.fake import FakeEngine
from actors.engines.http.client import CompletionClient, EngineError, RequestRefusedError
from actors.engines.http.server import CompletionServer
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.sampling import SamplingParams
from schemas.messages import EnginePeer, Ticket
from tests.actors.engines.engines import WAIT, ask, policy, sample

PROMPT = [3, 4, 5]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Deterministic."""
    made = FakeEngine(FakeEngineConfig(vocab_size=30))
    yield made
    made.close()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[CompletionServer]:
    """In front of it."""
    made = CompletionServer(engine, "tiny", "boot1", "127.0.0.1", 0, WAIT)
    yield made
    made.close()


@pytest.fixture
async def client() -> AsyncIterator[CompletionClient]:
    """With patience."""
    made = CompletionClient("tiny", WAIT, 4)
    yield made
    await made.close()


def peer(port: int, boot_id: str = "boot1") -> EnginePeer:
    """The engine as the directive names it."""
    return EnginePeer.model_construct(
        name="inference-0", boot_id=boot_id, url=f"http://127.0.0.1:{port}", policy=policy(1), load=0
    )


def ticket(max_tokens: int = 6) -> Ticket:
    """Three completions, seed 9."""
    return Ticket.model_construct(num_completions=3, max_tokens=max_tokens, sampling=SamplingParams(), seed=9)


async def test_a_tickets_completions_arrive_as_the_engine_sampled_them(
    client: CompletionClient, server: CompletionServer, engine: FakeEngine
) -> None:
    """Tokens, logprobs, policies, reasons and texts."""
    [expected] = sample(engine, ask(PROMPT, n=3, max_tokens=6, seed=9))
    found = await client.sample(peer(server.port), ticket(), PROMPT)
    assert len(found) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.logprobs, ours.segments) == (theirs.token_ids, theirs.logprobs, theirs.segments)
        assert (ours.finish_reason, ours.text) == (theirs.finish_reason, engine.detokenize(theirs.token_ids))


async def test_an_answer_of_another_process_is_discarded(client: CompletionClient, server: CompletionServer) -> None:
    """The engine restarted between choice and answer (P25)."""
    with pytest.raises(EngineError, match=r"inference-0 .* has restarted"):
        await client.sample(peer(server.port, boot_id="boot0"), ticket(), PROMPT)


async def test_a_request_that_is_wrong_is_not_worth_repeating(
    client: CompletionClient, server: CompletionServer
) -> None:
    """4xx is told apart from all other failures, with the engine's own words."""
    with pytest.raises(RequestRefusedError, match=r"HTTP 400: .*prompt: token ids must be"):
        await client.sample(peer(server.port), ticket(), [99])


async def test_an_engine_that_is_gone_is_an_engine_error(client: CompletionClient, server: CompletionServer) -> None:
    """Connection refused: another engine may do it."""
    server.close()
    with pytest.raises(EngineError, match="inference-0 at http"):
        await client.sample(peer(server.port), ticket(), PROMPT)


async def test_an_engine_that_has_failed_is_an_engine_error(
    client: CompletionClient, server: CompletionServer, engine: FakeEngine
) -> None:
    """5xx."""
    engine.close()
    with pytest.raises(EngineError, match=r"HTTP 503: .*closed"):
        await client.sample(peer(server.port), ticket(), PROMPT)


async def test_an_engine_that_does_not_answer_in_time_is_an_engine_error() -> None:
    """The message names the key."""
    client = CompletionClient("tiny", 0.1, 4)
    slow = FakeEngine(FakeEngineConfig(vocab_size=30, token_seconds=WAIT))
    server = CompletionServer(slow, "tiny", "boot1", "127.0.0.1", 0, WAIT)
    try:
        with pytest.raises(EngineError, match=r"did not answer in time \(inference\.request_timeout\)"):
            await client.sample(peer(server.port), ticket(), PROMPT)
    finally:
        await client.close()
        await asyncio.to_thread(server.close)
        slow.close()


async def test_an_answer_that_is_no_completion_is_an_engine_error(client: CompletionClient) -> None:
    """Some other server listens there: text, or JSON of another shape."""
    for answer in ("hello", '{"boot_id": "boot1"}', "[]", '{"boot_id": "boot1", "choices": [{"text": "a"}]}'):

        async def respond(request: web.Request, answer: str = answer) -> web.Response:
            return web.Response(text=answer, content_type="application/json")

        app = web.Application()
        app.router.add_post("/v1/completions", respond)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            with pytest.raises(EngineError, match="inference-0 at http"):
                await client.sample(peer(runner.addresses[0][1]), ticket(), PROMPT)
        finally:
            await runner.cleanup()
