"""The client of rollout actors, against the real server in front of a fake engine."""

import asyncio
from collections.abc import Iterator
from unittest import mock

import aiohttp
import msgpack
import pytest
from aiohttp import web

from actors.engines.fake import FakeEngine
from actors.engines.http import binary
from actors.engines.http.client import CompletionClient, EngineError, RequestRefusedError
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import Completion
from bus.weights import Weights
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


CHOICE = {"text": "a", "token_ids": b"", "logprobs": b"", "segments": [], "finish_reason": "stop"}
NO_ANSWERS: list[tuple[bytes, str]] = [
    (b"hello", "text/plain"),
    (b'{"boot_id": "boot1", "choices": []}', "application/json"),
    *(
        (body, binary.CONTENT_TYPE)
        for body in (
            b"", b"hello", b"\xc1", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
            msgpack.packb([]), msgpack.packb({"boot_id": "boot1"}), msgpack.packb({"boot_id": 7, "choices": []}),
            msgpack.packb({"boot_id": "boot1", "choices": {"a": 1}}),
            *(
                msgpack.packb({"boot_id": "boot1", "choices": [{**CHOICE, name: value}]})
                for name, value in {
                    "text": 1, "token_ids": b"123", "logprobs": [0.5], "segments": [[0, 1]], "finish_reason": None
                }.items()
            ),
            *(
                msgpack.packb({"boot_id": "boot1", "choices": [{k: v for k, v in CHOICE.items() if k != name}]})
                for name in CHOICE
            ),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "content_type"), NO_ANSWERS)
async def test_an_answer_that_is_no_completion_is_an_engine_error(
    client: CompletionClient, body: bytes, content_type: str
) -> None:
    """Some other server listens there, or an engine of another version."""

    async def respond(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type)

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


@pytest.mark.parametrize("num_completions", [1, 30, 1000])
async def test_an_answer_holds_what_the_same_answer_in_json_holds(
    client: CompletionClient, server: CompletionServer, engine: FakeEngine, num_completions: int
) -> None:
    """To the last bit of each logprob, whatever the size: larger answers are read in a thread."""
    engine.load(policy(3), Weights("full", {}), WAIT)
    asked = ticket().model_copy(update={"num_completions": num_completions})
    body = {
        "model": "tiny", "prompt": PROMPT, "n": num_completions, "max_tokens": 6, "seed": 9,
        "logprobs": 0, "return_token_ids": True, **asked.sampling.model_dump(),
    }  # fmt: skip
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        expected = (await response.json())["choices"]
    found = await client.sample(peer(server.port), asked, PROMPT)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.segments
        assert (ours.token_ids, ours.text) == (theirs["token_ids"], theirs["text"])
        assert (ours.logprobs, ours.finish_reason) == (theirs["logprobs"]["token_logprobs"], theirs["finish_reason"])
        assert [list(segment) for segment in ours.segments] == theirs["segments"]


def test_texts_and_numbers_that_json_has_no_words_for_come_through() -> None:
    """Half a surrogate pair, a null, and a logprob of minus infinity."""
    completion = Completion([0, 2**31 - 1], [float("-inf"), -0.1], [(0, 1, 2**40)], "length")
    boot_id, [(found, text)] = binary.decode(binary.encode("b", [completion], ["\ud83d\0"]))
    assert (boot_id, found, text) == ("b", completion, "\ud83d\0")


async def test_other_requests_go_on_while_a_large_answer_is_read(client: CompletionClient) -> None:
    """The loop takes turns with the thread that reads 40 MB: all requests of a rollout actor share it."""
    completion = Completion([7] * 32_768, [-0.5] * 32_768, [(0, 1, 1)], "length")
    body = binary.encode("boot1", [completion] * 100, ["x" * 30_000] * 100)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    with mock.patch.object(client, "_post", return_value=body):
        ticking = asyncio.create_task(tick())
        found = await client.sample(peer(1), ticket(), PROMPT)
        ticking.cancel()
    assert len(found) == 100
    # a thread that decodes holds the interpreter for milliseconds at a time
    assert turns > 3
