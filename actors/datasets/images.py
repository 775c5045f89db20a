"""Images of prompts: from a row's values to the bytes of their files, with limits that hold before anything is decoded.

A message keeps `{"type": "image", "digest": …}` in the place of each image, so an example's key depends on its images.
"""

import base64
import binascii
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from actors.datasets.image_header import check_sides, size_of
from actors.datasets.prepared import digest_of
from schemas.config import RunConfig
from schemas.config.images import ImagesConfig
from schemas.errors import ConfigError

SOURCES = frozenset({"bytes", "url", "image_url", "image", "path"})
"""Fields of an object that name its image."""


@dataclass(frozen=True)
class Image:
    """Image as its file has it: bytes, and size in pixels."""

    data: bytes
    height: int
    width: int

    @cached_property
    def digest(self) -> str:
        """Digest (BLAKE3, 32 hex digits) of the bytes."""
        return digest_of(self.data)


class ImageSource(NamedTuple):
    """Origin of the images of a data set, and their limits."""

    keys: ImagesConfig
    folder: Path | None
    """Folder of relative paths; None: there is none, as for a data set on the hub."""
    section: str = "environments[].images"
    """Section of the configuration with the limits, for errors."""

    def load(self, value: Any, where: str) -> Image:
        """Return the image that a value of a row stands for.

        Args:
            value: bytes, a data URL, a path, or an object with `bytes`, `path`, `url` or `image`.
            where: example and number of the image, for errors.

        Raises:
            ConfigError: there is no such image, it is beyond a limit, or it is no still image. The text names the
                example, and the key of a limit.
        """
        try:
            data = self._bytes(value)
            self._check_length(len(data))
            height, width = size_of(data)
            if height * width > self.keys.max_pixels:
                raise ValueError(
                    f"has {width} × {height} pixels, and {self.section}.max_pixels is {self.keys.max_pixels}"
                )
            check_sides(height, width)
        except ValueError as error:
            raise ConfigError(f"{where} {error}") from None
        return Image(data, height, width)

    def _bytes(self, value: Any) -> bytes:
        while isinstance(value, Mapping):
            given = [name for name in SOURCES if value.get(name) is not None]
            if not given:
                raise ValueError("is an object without bytes, path or url")
            # a row of the library `datasets` has bytes, and the path that they came from
            value = value["bytes" if "bytes" in given else min(given)]
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if not isinstance(value, str) or not value:
            raise ValueError(f"is a {type(value).__name__}, and must be bytes, a path or a data URL")
        scheme, _, rest = value.partition(":")
        if scheme == "data":
            return self._of_data_url(rest)
        if "://" in value[:20]:
            raise ValueError(
                f"is at {value[:200]!r}: images are not loaded from elsewhere, since each process must see the same "
                "bytes; download it next to the data"
            )
        return self._of_file(value)

    def _of_data_url(self, rest: str) -> bytes:
        kind, comma, text = rest.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise ValueError("is a data URL without base64: data:image/png;base64,…")
        # four characters are three bytes
        self._check_length(len(text) // 4 * 3 - 2)
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"is a data URL whose base64 is damaged: {error}") from None

    def _of_file(self, path: str) -> bytes:
        name = repr(path[:200])
        if self.folder is None:
            raise ValueError(f"has the path {name}, and there is no folder of files here; it must have bytes")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"has the path {name}; it must be relative to {self.folder}, without `..`")
        file = self.folder / path
        try:
            found = file.stat()
            # a pipe would be waited for
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"has the path {name}, which is no file in {self.folder}")
            self._check_length(found.st_size)
            with file.open("rb") as opened:
                # a file may grow while it is read
                return opened.read(self.keys.max_bytes + 1)
        except OSError as error:
            raise ValueError(f"has the path {name} in {self.folder}, which can't be read: {error.strerror}") from None

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self.keys.max_bytes:
            raise ValueError(f"has {num_bytes} bytes, and {self.section}.max_bytes is {self.keys.max_bytes}")


def why_not_taken(config: RunConfig) -> str:
    """Return why a run takes no prompts with images, with the key to change; empty if it takes them."""
    engine = config.inference.engine
    if not engine.takes_images:
        return (
            f"inference.engine.type {engine.type} takes no images; take embedded, vllm or sglang, or leave out the "
            "rows with images"
        )
    return ""


def values_of(column: Any) -> list[Any]:
    """Return the images in a row's column: none, one, or a list."""
    if column is None:
        return []
    return list(column) if isinstance(column, Sequence) and not isinstance(column, str | bytes) else [column]
