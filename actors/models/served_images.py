"""Prompts with images for a server that gives images their tokens by itself.

The server gets one placeholder for each image, and its answer has the prompt that the server has made of them:

    our prompt   1 5 ▒ ▒ ▒ ▒ 6 ▒ ▒ 7        sent   1 5 ▒ 6 ▒ 7        answered   1 5 ▒ ▒ ▒ ▒ 6 ▒ ▒ 7

A server with another image processor would make another number of tokens; rollouts and trainer would not notice.
"""

import base64
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

from actors.models.image_tokens import ImageTokens
from actors.models.vision.files import check_pillow, decoded
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

KEPT_BYTES = 256 << 20
"""Bytes of images that are kept for further requests: continuations, and other groups of the same example."""


def with_placeholders(token_ids: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return a prompt with one token for each image, in place of all tokens of the image.

    Args:
        token_ids: prompt with all tokens of images.
        starts: place of the first token of each image, in order.
    """
    sent, end = list[int](), 0
    for start, behind in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        sent += token_ids[end : start + 1]
        end = start + 1
        while end < behind and token_ids[end] == token_ids[start]:
            end += 1
    return [*sent, *token_ids[end:]]


def check_strays(token_ids: Sequence[int], starts: Sequence[int], server: str) -> None:
    """Check that a prompt has the token of images at its images alone.

    Args:
        token_ids, starts: as for `with_placeholders`; at least one image.
        server: name of the software.

    Raises:
        ValueError: the token is elsewhere too, so the server can't tell which is the place of an image.
    """
    token = token_ids[starts[0]]
    if (stray := with_placeholders(token_ids, starts).count(token) - len(starts)) > 0:
        raise ValueError(
            f"the prompt has {stray} times token {token} outside of its images, sampled by the policy itself, and "
            f"{server} takes this token for the place of an image"
        )


def check_prompt(token_ids: Sequence[int], starts: Sequence[int], found: Sequence[int] | None, server: str) -> None:
    """Check that a server has made the prompt that was asked for.

    Args:
        token_ids, starts: as for `with_placeholders`; at least one image.
        found: token ids of the prompt with the tokens of images, as the server's answer has them.
        server: name of the software.

    Raises:
        ValueError: the prompts differ, or the server does not tell its own.
    """
    if found is None:
        raise ValueError(f"{server} does not tell the tokens of the prompt; a newer version does")
    if list(found) == list(token_ids):
        return
    check_strays(token_ids, starts, server)
    token = token_ids[starts[0]]
    ours, theirs = list(token_ids).count(token), list(found).count(token)
    raise ValueError(
        f"{server} makes {theirs} tokens of the {len(starts)} images, and {len(found)} of the prompt; this run makes "
        f"{ours} and {len(token_ids)}. Both must have the image processor of model.path: its files, and no options for "
        "it at the server"
    )


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
        self._being_made: dict[str, threading.Lock] = {}
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._num_bytes = 0

    def url(self, digest: str, data: bytes) -> str:
        """Return an image as a data URL. May be called from any thread.

        Args:
            digest: digest of the bytes.
            data: bytes of the image file.

        Raises:
            ValueError: the image can't be decoded, or the model's processor is of no known kind.
        """
        if (found := self._found(digest)) is not None:
            return found
        with self._lock:
            own = self._being_made.setdefault(digest, threading.Lock())
        # completions of one prompt ask for its images at the same time: one of them makes each, the others wait for it
        with own:
            try:
                if (found := self._found(digest)) is not None:
                    return found
                made = f"data:image/png;base64,{base64.b64encode(self._png(data)).decode()}"
                self._keep(digest, made)
                return made
            except (ValueError, ConfigError) as error:
                raise ValueError(f"image {digest}: {error}") from error
            finally:
                with self._lock:
                    self._being_made.pop(digest, None)

    def _found(self, digest: str) -> str | None:
        with self._lock:
            if (found := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
            return found

    def _keep(self, digest: str, made: str) -> None:
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = made
                self._num_bytes += len(made)
            while self._num_bytes > KEPT_BYTES:
                _, gone = self._kept.popitem(last=False)
                self._num_bytes -= len(gone)

    @cached_property
    def _rule(self) -> ImageTokens:
        return ImageTokens.of_model(self._model)

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
