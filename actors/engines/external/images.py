"""Prompts with images for a server that gives images their tokens by itself.

The server gets one placeholder for each image, and its answer has the prompt that the server has made of them:

    our prompt   1 5 ▒ ▒ ▒ ▒ 6 ▒ ▒ 7        sent   1 5 ▒ 6 ▒ 7        answered   1 5 ▒ ▒ ▒ ▒ 6 ▒ ▒ 7

A server with another image processor would make another number of tokens; rollouts and trainer would not notice.
"""

import base64
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

from actors.engines.protocol import PromptImage, RequestError, SampleRequest
from actors.models.image_tokens import ImageTokens
from actors.models.tokenizer import model_file
from actors.models.vision.files import check_pillow, decoded
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

KEPT_BYTES = 256 << 20
"""Bytes of images that an engine keeps for further requests: continuations, and other groups of the same example."""


def image_token(model: ModelConfig) -> int | None:
    """Return the token id of images in a model's prompts, from config.json; None for a model of text alone."""
    settings = json.loads(model_file(model, "config.json").read_text(encoding="utf-8"))
    found = settings.get("image_token_id")
    return found if type(found) is int else None


def check_places(asked: SampleRequest, placeholder: int | None) -> None:
    """Check that each image has tokens at its place.

    Args:
        placeholder: token id of images; None: the model sees none.

    Raises:
        RequestError: the model sees no images, or the prompt has no token of an image at a place.
    """
    if asked.images and placeholder is None:
        raise RequestError("images: the model sees none; model.path names a model of text alone")
    for image in asked.images:
        if asked.prompt_ids[image.start : image.start + 1] != [placeholder]:
            raise RequestError(
                f"images: image {image.digest} has no tokens with the id {placeholder} from {image.start} on"
            )


def with_placeholders(asked: SampleRequest) -> list[int]:
    """Return a prompt with one token for each image, in place of all tokens of the image."""
    ids, sent, end = asked.prompt_ids, list[int](), 0
    starts = [image.start for image in asked.images]
    for start, behind in zip(starts, [*starts[1:], len(ids)], strict=True):
        sent += ids[end : start + 1]
        end = start + 1
        while end < behind and ids[end] == ids[start]:
            end += 1
    return sent + ids[end:]


class Pixels:
    """Maker of images for a server: the pixels that trainers see, in the size that the model's processor gives them.

    A server decodes and resizes images with libraries of its own: it reads damaged files that no trainer reads, and
    rounds in another way. What it gets here is a PNG of the final size, so nothing is left to resize.

    Args:
        model: model of the policy.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._num_bytes = 0

    def urls(self, images: Sequence[PromptImage]) -> list[str]:
        """Return the images as data URLs. May be called from any thread.

        Raises:
            RequestError: an image can't be decoded, or the model's processor is of no known kind.
        """
        return [self._url(image) for image in images]

    @cached_property
    def _rule(self) -> ImageTokens:
        return ImageTokens.of_model(self._model)

    def _url(self, image: PromptImage) -> str:
        with self._lock:
            if (found := self._kept.get(image.digest)) is not None:
                self._kept.move_to_end(image.digest)
                return found
        try:
            made = f"data:image/png;base64,{base64.b64encode(self._png(image.data)).decode()}"
        except (ValueError, ConfigError) as error:
            raise RequestError(f"images: image {image.digest}: {error}") from error
        with self._lock:
            if image.digest not in self._kept:
                self._kept[image.digest] = made
                self._num_bytes += len(made)
            while self._num_bytes > KEPT_BYTES:
                _, gone = self._kept.popitem(last=False)
                self._num_bytes -= len(gone)
        return made

    def _png(self, data: bytes) -> bytes:
        check_pillow()
        from PIL import Image

        plain = decoded(data)
        rows, columns = self._rule.grid(plain.height, plain.width)
        size = columns * self._rule.patch_size, rows * self._rule.patch_size
        file = io.BytesIO()
        # little compression: the bytes only cross the loopback, or a local network
        plain.resize(size, Image.Resampling.BICUBIC).save(file, "PNG", compress_level=1)
        return file.getvalue()


def check_prompt(asked: SampleRequest, found: Sequence[int] | None, server: str) -> None:
    """Check that a server has sampled behind the prompt that was asked for.

    Args:
        found: token ids of the prompt with the tokens of images, as the server's answer has them.
        server: name of the software.

    Raises:
        RequestError: the prompts differ, or the server does not tell its own.
    """
    if found is None:
        raise RequestError(f"images: {server} does not tell the tokens of the prompt; a newer version does")
    if list(found) == asked.prompt_ids:
        return
    token = asked.prompt_ids[asked.images[0].start]
    if (stray := with_placeholders(asked).count(token) - len(asked.images)) > 0:
        raise RequestError(
            f"images: the prompt has {stray} times token {token} outside of its images, sampled by the policy itself, "
            f"and {server} takes this token for the place of an image"
        )
    ours, theirs = asked.prompt_ids.count(token), list(found).count(token)
    raise RequestError(
        f"images: {server} makes {theirs} tokens of the {len(asked.images)} images, and {len(found)} of the prompt; "
        f"this run makes {ours} and {len(asked.prompt_ids)}. Both must have the image processor of model.path: its "
        "files, and no options for it at the server"
    )
