"""Groups with images: from an example over HTTP to the embedded engine, and back as a message."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.datasets import Example
from actors.datasets.images import ImageSource
from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.http.client import CompletionClient, EngineError
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import PromptImage
from actors.learner.learner import TorchLearner
from actors.models.image_tokens import ImageTokens
from actors.rollout.engine_choice import EngineChoice
from actors.rollout.group import GroupSampler
from actors.rollout.held import AttemptError
from actors.telemetry.metrics import Metrics
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.images import ImagesConfig
from schemas.config.model import ModelConfig
from schemas.messages import EnginePeer, RolloutGroup
from tests import models
from tests.actors.datasets import pictures
from tests.actors.engines.engines import WAIT, ask, policy
from tests.actors.learner.steps import run_config
from tests.actors.rollout.doubles import Client, directive, engine, ticket
from tests.conftest import ModelFolder
from tests.images import png
from tests.marks import first_of
from tests.ring.harness import ring_config

SMALL, WIDE = png(8, 8), png(16, 40, seed=1)
PROMPT = [1, models.VISION_START, models.IMAGE, models.VISION_END, 5, models.IMAGE, 6, models.IMAGE, 7]
"""Token ids of a prompt of three images, with a placeholder for each."""


def example(*files: bytes) -> Example:
    """An example that shows these images."""
    source = ImageSource(ImagesConfig(), None)
    images = tuple(source.load(file, "image") for file in files)
    parts = [{"type": "image", "digest": one.digest} for one in images]
    return Example([{"role": "user", "content": parts}], {}, images=images)


class Served:
    """The embedded engine with a server in front, and samplers of groups that ask it."""

    def __init__(self, folder: Path, output: Path) -> None:
        model = ModelConfig(path=str(folder), dtype="float32", device="cpu")
        engine = EmbeddedEngineConfig(max_sequences=8, max_sequence_len=64)
        self.engine = EmbeddedEngine(model, engine, "interrupt", Decoder(model, engine))
        self.engine.load(policy(0), TorchLearner(run_config(folder, "float32")).weights(), WAIT)
        self.server = CompletionServer(self.engine, "tiny", "b1", "127.0.0.1", 0, WAIT)
        self.config, self.expand = ring_config(output), ImageTokens.of_model(model).expand

    async def sample(self, shown: Example, **changes: Any) -> RolloutGroup:
        """The group of an example."""
        asked = ticket(example_key=shown.key("reverse_text"), min_version=0, **changes)
        engines = EngineChoice(self.config, Metrics("rollout"), lambda: CompletionClient("tiny", WAIT, 4))
        url = f"http://127.0.0.1:{self.server.port}"
        peer = EnginePeer(name="inference-0", boot_id="b1", url=url, policy=engine("b1", 0).policy, load=0)
        engines.note(0.0, directive(engines=[peer]))
        datasets: Any = {("train", "reverse_text"): type("E", (), {"example": lambda self, index: shown})()}
        encode: Any = lambda prompt: PROMPT  # noqa: E731
        async with GroupSampler(self.config, "rollout-0", datasets, encode, engines, expand=self.expand) as sampler:
            return await sampler.sample("r", asked)


@pytest.fixture(params=models.SEEING)
async def served(model_folder: ModelFolder, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """Of each family that sees images."""
    made = Served(model_folder(request.param, eos=models.NEVER), tmp_path)
    yield made
    made.server.close()
    made.engine.close()


async def test_a_group_with_images_is_what_the_engine_samples_for_them(served: Served) -> None:
    """An image shown twice travels once; tokens and logprobs are the engine's own for these pixels and places."""
    shown = example(SMALL, WIDE, SMALL)
    group = await served.sample(shown)
    places = [(place.image, place.start, place.length) for place in group.image_places]
    assert places == [(0, 2, 1), (1, 5, 10), (0, 16, 1)]
    assert group.images == [SMALL, WIDE]
    ids = group.prompt_ids.tolist()
    assert all(ids[start : start + length] == [models.IMAGE] * length for _, start, length in places)
    images = tuple(
        PromptImage(start, image.digest, image.data) for image, (_, start, _) in zip(shown.images, places, strict=True)
    )
    direct = served.engine.submit(ask(ids, n=2, max_tokens=8, seed=7, temperature=0.5, images=images)).result(WAIT)
    assert group.token_ids.tolist() == [token for one in direct for token in one.token_ids]
    assert group.logprobs.tolist() == pytest.approx([logprob for one in direct for logprob in one.logprobs], abs=1e-5)
    other = await served.sample(example(SMALL, png(16, 40, seed=2), SMALL))
    assert other.logprobs.tolist() != group.logprobs.tolist()


def damaged() -> dict[str, bytes]:
    """Files whose headers are sound, and whose pixels are not."""
    return {
        "no pixels": pictures.png(40, 30),
        "no zlib": pictures.png(40, 30, pictures.part(b"IDAT", b"hello")),
        "no tables": pictures.jpeg(40, 30),
        "empty WebP": pictures.webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + bytes([40, 0, 30, 0]) + bytes(20)),
        "text": pictures.png(40, 30, pictures.part(b"zTXt", b"a\0\0" + b"hello"), pictures.part(b"IDAT", b"")),
    }


WORDS = r"images: image \w{32}: \d+ bytes are no image that can be read"


async def test_damaged_pixels_fail_their_group_in_words_and_never_the_engine(served: Served) -> None:
    """A header can't tell; other groups go on, also after more failures than the engine allows of its own."""
    good = example(SMALL, WIDE, SMALL)
    expected = (await served.sample(good)).token_ids.tolist()
    for _ in range(3):
        for kind, data in damaged().items():
            with pytest.raises(AttemptError, match=WORDS) as caught:
                await served.sample(example(SMALL, data, SMALL))
            assert caught.value.reason == "engine", kind
    assert (await served.sample(good)).token_ids.tolist() == expected


@pytest.mark.parametrize("served", first_of(models.SEEING), indirect=True)
async def test_an_engine_without_memory_for_an_image_fails_that_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says why, and the engine serves on: a smaller image may fit."""
    place = Decoder.place

    def full(self: Decoder, start: int, digest: str, data: bytes) -> Any:
        if data == WIDE:
            raise MemoryError("no room")
        return place(self, start, digest, data)

    monkeypatch.setattr(Decoder, "place", full)
    with pytest.raises(AttemptError, match="could not start: MemoryError: no room"):
        await served.sample(example(SMALL, WIDE, SMALL))
    tall = png(40, 16, seed=1)
    assert len((await served.sample(example(SMALL, tall, SMALL))).token_ids) == 16


async def test_another_engine_gets_the_same_images_after_a_failure(tmp_path: Path) -> None:
    """P11: a retry is the whole request again."""
    client = Client({"a": EngineError("gone")})
    engines = EngineChoice(ring_config(tmp_path), Metrics("rollout"), lambda: client)
    engines.note(0.0, directive(engines=[engine("a"), engine("b", load=100)]))
    async with engines:
        await engines.ask(ticket(), [1, 2, 3], images=[PromptImage(1, "d", SMALL)])
    assert client.asked == ["a", "b"]
    assert client.images == [[(1, SMALL)]] * 2
