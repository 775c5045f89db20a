"""Prompts with images for servers that give images their tokens: what is sent, and what must come back."""

import base64
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from actors.datasets.image_header import size_of
from actors.datasets.prepared import digest_of
from actors.engines.external import images
from actors.engines.external.continuation import joined, rest_of
from actors.engines.protocol import Completion, PromptImage, RequestError, SampleRequest
from actors.models import served_images
from actors.models.image_tokens import ImageTokens
from actors.models.vision.images import ImageReader
from schemas.config.model import ModelConfig
from tests import models
from tests.actors.datasets.pictures import FORMATS, jpeg, part, picture, png
from tests.actors.models.vision.seeing import model_config
from tests.conftest import ModelFolder

IMAGE = models.IMAGE


def asked(ids: list[int], *starts: int) -> SampleRequest:
    """A request with images at these places."""
    files = [picture(8, 8 + number) for number in range(len(starts))]
    shown = (PromptImage(start, digest_of(data), data) for start, data in zip(starts, files, strict=True))
    return SampleRequest(ids, 2, 8, 5, images=tuple(shown))


@pytest.mark.parametrize(
    ("ids", "starts", "sent"),
    [
        ([1, 5, IMAGE, IMAGE, IMAGE, 6], [2], [1, 5, IMAGE, 6]),
        ([1, IMAGE, IMAGE, 6, IMAGE], [1, 4], [1, IMAGE, 6, IMAGE]),
        ([IMAGE, IMAGE, IMAGE], [0, 2], [IMAGE, IMAGE]),
        # sampled behind the prompt, where a policy may draw this id too
        ([1, IMAGE, IMAGE, 6, IMAGE, IMAGE], [1], [1, IMAGE, 6, IMAGE, IMAGE]),
    ],
)
def test_a_server_gets_one_placeholder_for_each_image(ids: list[int], starts: list[int], sent: list[int]) -> None:
    """In the place of all its tokens; other tokens stay as they are."""
    assert images.with_placeholders(asked(ids, *starts)) == sent


def test_placeholders_are_what_the_expansion_of_prompts_began_with() -> None:
    """Of a thousand prompts with up to six images of all sizes."""
    rule, rng = ImageTokens(IMAGE, patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024), random.Random(0)
    for _ in range(1000):
        sizes = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(rng.randint(1, 6))]
        ids = [1]
        for _ in sizes:
            ids += [models.VISION_START, IMAGE, models.VISION_END, *rng.choices(range(4, 30), k=rng.randint(0, 3))]
        expanded, places = rule.expand(ids, sizes)
        assert images.with_placeholders(asked(expanded, *(place.start for place in places))) == ids


def test_a_continuation_has_the_images_of_its_prompt() -> None:
    """Interrupted groups too; the sampled tokens follow the whole prompt."""
    begun = asked([1, IMAGE, IMAGE, 6], 1)
    rest = rest_of(begun, 1, joined(Completion([7], [-1.0]), Completion([8, IMAGE], [-1.0] * 2)))
    assert rest.images == begun.images
    assert images.with_placeholders(rest) == [1, IMAGE, 6, 7, 8, IMAGE]


@pytest.mark.parametrize("family", models.SEEING)
def test_a_server_gets_the_pixels_that_a_trainer_sees(model_folder: ModelFolder, family: str) -> None:
    """To the bit, of images of every format, color and size: no processor has anything left to resize."""
    config = model_config(model_folder(family))
    pixels, reader, rule = served_images.Pixels(config), ImageReader(config), ImageTokens.of_model(config)
    modes = {"PNG": ["RGB", "L", "P", "1"], "JPEG": ["RGB", "L", "CMYK"], "WEBP": ["RGB"]}
    for file_format, mode in ((kind, mode) for kind in FORMATS for mode in modes[kind]):
        for width, height in ((1, 1), (8, 8), (64, 50), (300, 200), (3, 90), (199, 1), (41, 333)):
            data = picture(width, height, file_format, mode)
            url = pixels.url(digest_of(data), data)
            kind, _, text = url.partition(",")
            assert kind == "data:image/png;base64"
            sent, seen = reader.read(base64.b64decode(text)), reader.read(data)
            assert (sent.grid_height, sent.grid_width) == (seen.grid_height, seen.grid_width)
            assert size_of(base64.b64decode(text)) == tuple(side * rule.patch_size for side in rule.grid(height, width))
            assert torch.equal(sent.pixels_PD, seen.pixels_PD)


def test_an_image_is_decoded_once_while_there_is_room(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By digest; the one unused for longest goes first, and an image without room is made again."""
    pixels = served_images.Pixels(model_config(model_folder("qwen3_vl")))
    files = [picture(8, 8 + number) for number in range(3)]
    first = [pixels.url(digest_of(data), data) for data in files]
    assert [pixels.url(digest_of(data), b"gone") for data in files] == first
    monkeypatch.setattr(served_images, "KEPT_BYTES", len(first[0]) + len(first[1]))
    more = picture(8, 8, "JPEG")
    pixels.url(digest_of(more), more)
    with pytest.raises(ValueError, match="are no image that can be read"):
        pixels.url(digest_of(files[0]), b"gone")
    assert [pixels.url(digest_of(data), data) for data in files] == first


def test_an_image_that_many_ask_for_at_once_is_decoded_once(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight completions of one prompt, in threads; a damaged one is told to each of them, and nothing is left."""
    pixels, decoded = served_images.Pixels(model_config(model_folder("qwen3_vl"))), list[bytes]()
    plain = served_images.decoded

    def counted(data: bytes) -> object:
        decoded.append(data)
        time.sleep(0.05)
        return plain(data)

    monkeypatch.setattr(served_images, "decoded", counted)
    good, bad = picture(64, 50), png(40, 30)
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(pixels.url, digest_of(good), good) for _ in range(8)]
        assert len({future.result(60) for future in made}) == 1
        refused = [pool.submit(pixels.url, digest_of(bad), bad) for _ in range(8)]
        assert all("no image that can be read" in str(future.exception(60)) for future in refused)
    assert decoded.count(good) == 1
    assert pixels._being_made == {}


def test_damaged_pixels_are_refused_before_a_server_sees_them(model_folder: ModelFolder) -> None:
    """vLLM reads files that are cut off, and a trainer does not."""
    pixels, intact = served_images.Pixels(model_config(model_folder("qwen3_vl"))), asked([1, IMAGE], 1)
    for data in (png(40, 30), png(40, 30, part(b"IDAT", b"hello")), jpeg(40, 30)):
        damaged = replace(intact, images=(PromptImage(1, digest_of(data), data),))
        with pytest.raises(RequestError, match=rf"images: image {digest_of(data)}: {len(data)} bytes are no image"):
            images.urls_of(damaged, pixels)


def test_a_server_with_another_prompt_is_refused_with_both_counts() -> None:
    """Of tokens of images, and of the whole prompt; also where the server does not tell, or only the order differs."""
    request = asked([1, IMAGE, IMAGE, 6], 1)
    images.check_prompt(request, [1, IMAGE, IMAGE, 6], "vLLM")
    words = "vLLM makes 3 tokens of the 1 images, and 5 of the prompt; this run makes 2 and 4"
    with pytest.raises(RequestError, match=words):
        images.check_prompt(request, [1, IMAGE, IMAGE, IMAGE, 6], "vLLM")
    with pytest.raises(RequestError, match="does not tell the tokens of the prompt"):
        images.check_prompt(request, None, "vLLM")
    with pytest.raises(RequestError, match="vLLM makes 2 tokens"):
        images.check_prompt(request, [IMAGE, IMAGE, 1, 6], "vLLM")


def test_a_token_of_images_that_the_policy_has_sampled_is_named() -> None:
    """vLLM takes the first such token for the first image, and none behind all images; SGLang takes any."""
    behind = asked([1, IMAGE, IMAGE, 6, IMAGE], 1)
    images.check_prompt(behind, behind.prompt_ids, "vLLM")
    images.check_strays(asked([1, IMAGE, IMAGE, 6], 1), "SGLang")
    with pytest.raises(RequestError, match=f"has 1 times token {IMAGE} outside of its images"):
        images.check_strays(behind, "SGLang")
    before = asked([1, IMAGE, 6, IMAGE, IMAGE], 3)
    with pytest.raises(RequestError, match=f"has 1 times token {IMAGE} outside of its images, sampled by the policy"):
        images.check_prompt(before, [1, IMAGE, IMAGE, 6, IMAGE], "vLLM")


def test_places_without_tokens_of_an_image_are_refused(model_folder: ModelFolder) -> None:
    """Before anything is sent; and all images for a model of text."""
    seeing, blind = (images.image_token(ModelConfig(path=str(model_folder(one)))) for one in ("qwen3_vl", "qwen3"))
    assert (seeing, blind) == (IMAGE, None)
    images.check_places(asked([1, IMAGE], 1), seeing)
    images.check_places(asked([1, IMAGE]), blind)
    for start in (0, 2, 99):
        with pytest.raises(RequestError, match=f"has no tokens with the id {IMAGE} from {start} on"):
            images.check_places(asked([1, IMAGE], start), seeing)
    with pytest.raises(RequestError, match=r"images: the model sees none; model\.path"):
        images.check_places(asked([1, IMAGE], 1), blind)
