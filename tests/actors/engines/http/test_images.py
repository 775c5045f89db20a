"""Requests with images: what the client sends is what the engine gets, and other bodies are refused by name."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from actors.datasets.prepared import digest_of
from actors.engines.fake import FakeEngine
from actors.engines.http import images
from actors.engines.http.client import CompletionClient, RequestRefusedError
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import PromptImage, SampleRequest
from schemas import limits
from schemas.config.fake_engine import FakeEngineConfig
from tests.actors.datasets.pictures import jpeg, picture, png, turned
from tests.actors.engines.engines import WAIT
from tests.actors.engines.http.test_client import PROMPT, peer, ticket

RED, BLUE = picture(40, 30), picture(20, 50, "JPEG")


def shown(*places: tuple[int, bytes]) -> list[PromptImage]:
    """Images at these places."""
    return [PromptImage(start, digest_of(data), data) for start, data in places]


class Seeing(FakeEngine):
    """A fake engine that keeps the requests, and samples as if the prompt were text alone."""

    def __init__(self) -> None:
        super().__init__(FakeEngineConfig(vocab_size=30))
        self.asked: list[SampleRequest] = []

    def submit(self, request: SampleRequest) -> Any:
        """Keep it."""
        self.asked.append(request)
        return super().submit(SampleRequest(request.prompt_ids, request.num_completions, 4, request.seed))


@pytest.fixture
def engine() -> Iterator[Seeing]:
    """Keeps requests."""
    made = Seeing()
    yield made
    made.close()


async def sent(given: list[PromptImage]) -> tuple[str, bytes]:
    """Type and body of the client's request to a server that refuses it."""
    found: list[tuple[str, bytes]] = []

    async def keep(request: web.Request) -> web.Response:
        found.append((request.content_type, await request.read()))
        return web.Response(status=400)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/completions", keep)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = CompletionClient("tiny", WAIT, 4)
    try:
        with pytest.raises(RequestRefusedError):
            await client.sample(peer(runner.addresses[0][1]), ticket(), PROMPT, images=given)
    finally:
        await client.close()
        await runner.cleanup()
    return found[0]


async def test_images_reach_the_engine_with_their_places_and_digests(
    client: CompletionClient, server: CompletionServer, engine: Seeing
) -> None:
    """An image shown twice, too, for all three completions."""
    given = shown((0, RED), (1, BLUE), (2, RED))
    found = await client.sample(peer(server.port), ticket(), PROMPT, images=given)
    assert len(found) == 3
    [asked] = engine.asked
    assert asked.images == tuple(given)
    assert (asked.prompt_ids, asked.num_completions, asked.seed) == (PROMPT, 3, 9)
    assert asked.images[0].data is asked.images[2].data


@pytest.mark.parametrize("number", [1, 3, limits.IMAGES])
async def test_a_body_has_each_image_once_and_a_head(number: int) -> None:
    """The bytes as they are: base64 would be a third more."""
    files = [picture(8, 8 + one) for one in range(number)]
    prompt_places = [(start, data) for start, data in enumerate([*files, *files])]
    kind, body = await sent(shown(*prompt_places))
    assert kind == images.CONTENT_TYPE
    assert all(body.count(file) == 1 for file in files)
    assert len(body) - sum(map(len, files)) < 300 + 30 * 2 * number


async def test_a_request_without_images_is_the_same_json_as_ever() -> None:
    """Byte for byte, in the order of its fields."""
    kind, body = await sent([])
    assert kind == "application/json"
    fields = {"model": "tiny", "prompt": PROMPT, "n": 3, "max_tokens": 6, "seed": 9}
    assert body == json.dumps(fields | ticket().sampling.model_dump()).encode()


def body_of(*files: bytes, head: Any = None, **fields: Any) -> bytes:
    """The body of a request with images, with other fields in its head or another head."""
    good = {"model": "tiny", "prompt": PROMPT, "image_bytes": [*map(len, files)]}
    good["image_places"] = [(number, number) for number in range(len(files))]
    text = json.dumps({**good, **fields}).encode() if head is None else head
    return struct.pack("<I", len(text)) + text + b"".join(files)


LONG_SIDE, HUGE = png(1, 201), png(20_000, 20_000)
HOSTILE: list[tuple[bytes, str]] = [
    (b"", "body: ends before its head"),
    (b"\1\0\0", "body: ends before its head"),
    (struct.pack("<I", 2**32 - 1) + b"{}", "body: says that its head has 4294967295 bytes, and has 2"),
    (body_of(RED, head=b"hello"), "body: Invalid JSON"),
    (body_of(RED, head=b"[" * 5000), "body: "),
    (body_of(RED)[:-1], f"image_bytes: are {len(RED)} together, and {len(RED) - 1} follow the head"),
    (body_of(RED) + b"more", f"and {len(RED) + 4} follow the head"),
    (body_of(), "image_bytes: List should have at least 1 item"),
    (body_of(RED, image_bytes=None), "image_bytes: Field required"),
    (body_of(RED, image_bytes=[-1]), "image_bytes.0: Input should be greater than or equal to 1"),
    (body_of(RED, image_bytes=[2**63]), "image_bytes.0: Input should be less than or equal to 67108864"),
    (body_of(RED, image_bytes=[1 << 26] * 5, image_places=[(0, n) for n in range(5)]), "image_bytes: 335544320 bytes"),
    (body_of(RED, image_bytes=[1] * 65), "image_bytes: List should have at most 64 items"),
    (body_of(RED, image_places=[(0, 0)] * 8001), "image_places: List should have at most 8000 items"),
    (body_of(RED, image_places=[]), "image_places: List should have at least 1 item"),
    (body_of(RED, image_places=[(0, 1)]), "image_places: must name each of 1 images, and no other"),
    (body_of(RED, BLUE, image_places=[(0, 0)]), "image_places: must name each of 2 images"),
    (body_of(RED, image_places=[(3, 0)]), "image_places: must be in order, inside of a prompt of 3 tokens"),
    (body_of(RED, image_places=[(-1, 0)]), "image_places.0.0: "),
    (body_of(RED, image_places=[(1, 0), (1, 0)]), "image_places: must be in order"),
    (body_of(RED, image_places=[(0, 0, 0)]), "image_places.0: "),
    (body_of(RED, prompt="abc"), "prompt: must be token ids"),
    (body_of(RED, prompt=[PROMPT]), "prompt: must be token ids"),
    (body_of(RED, images=[1]), "images: is not known or not supported here"),
    (body_of(b"hello"), "images: image 0 is no JPEG, PNG or WebP image"),
    (body_of(RED, RED[:-1]), "images: image 1 is cut off"),
    (body_of(turned("JPEG")), "images: image 0 is turned by its EXIF data"),
    (body_of(picture(mode="RGBA")), "images: image 0 has an alpha channel"),
    (body_of(LONG_SIDE), "images: image 0 has 1 × 201 pixels: a side is more than 200 times"),
    (body_of(HUGE), "images: image 0 has 20000 × 20000 pixels, and the limit is 178956970"),
    (body_of(jpeg(3, 3)[:-2]), "images: image 0 is cut off"),
]


async def post(port: int, body: bytes, kind: str, path: str = "completions") -> tuple[int, str]:
    """Status and message of the answer to a body."""
    url = f"http://127.0.0.1:{port}/v1/{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers={"Content-Type": kind}) as response,
    ):
        answer = await response.json()
        return response.status, answer["error"]["message"] if response.status != 200 else ""


async def test_a_hostile_body_is_refused_by_name_and_reaches_no_engine(
    server: CompletionServer, engine: Seeing
) -> None:
    """400 with the field; a good request afterwards is answered."""
    for body, words in HOSTILE:
        status, told = await post(server.port, body, images.CONTENT_TYPE)
        assert (status, words in told) == (400, True), (words, told)
        assert len(told) < 400
    assert not engine.asked
    assert await post(server.port, body_of(RED, BLUE), images.CONTENT_TYPE) == (200, "")


async def test_images_have_no_other_way_in(server: CompletionServer, engine: Seeing) -> None:
    """Neither in JSON, which would have no bytes, nor in a chat; a model that is not served is named before."""
    fields = {"model": "tiny", "prompt": PROMPT, "image_bytes": [1], "image_places": [[0, 0]]}
    status, told = await post(server.port, json.dumps(fields).encode(), "application/json")
    assert (status, told) == (400, "image_bytes: is not known or not supported here")
    status, told = await post(server.port, body_of(RED), images.CONTENT_TYPE, "chat/completions")
    assert (status, told[:5]) == (400, "body:")
    status, told = await post(server.port, body_of(RED, model="other"), images.CONTENT_TYPE)
    assert status == 404
    assert not engine.asked


async def test_a_body_beyond_the_limit_is_refused_and_others_keep_theirs(
    server: CompletionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 16 MiB pass with images alone; the limit with images is 16 MiB and a group's images."""
    assert limits.HTTP_IMAGES_BODY_BYTES > limits.HTTP_BODY_BYTES + limits.IMAGES_BYTES - 1
    large = [picture() + bytes(9 << 20), picture() + bytes(8 << 20)]
    assert await post(server.port, body_of(*large), images.CONTENT_TYPE) == (200, "")
    assert (await post(server.port, body_of(*large), "application/json"))[0] == 413
    monkeypatch.setattr(limits, "HTTP_IMAGES_BODY_BYTES", 1 << 20)
    assert (await post(server.port, body_of(*large), images.CONTENT_TYPE))[0] == 413


async def test_an_engine_without_images_refuses_them_in_words() -> None:
    """The message names the engines that take images."""
    engine = FakeEngine(FakeEngineConfig(vocab_size=30))
    server, client = CompletionServer(engine, "tiny", "boot1", "127.0.0.1", 0, WAIT), CompletionClient("tiny", WAIT, 4)
    try:
        with pytest.raises(RequestRefusedError, match=r"images: engine fake takes no images; use"):
            await client.sample(peer(server.port), ticket(), PROMPT, images=shown((0, RED)))
    finally:
        await client.close()
        server.close()
        engine.close()
