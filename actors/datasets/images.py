"""Images of prompts: from a row's values to the bytes of their files, with limits that hold before anything is decoded.

A message keeps `{"type": "image", "digest": …}` in the place of each image, so an example's key depends on its images.
"""

import base64
import binascii
import hashlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from actors.datasets.image_header import check_sides, size_of
from actors.datasets.prepared import digest_of
from schemas.config import RunConfig
from schemas.config.images import ImagesConfig
from schemas.config.origins import origin_of
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


UNSEEN = Image(b"", 1, 1)
"""Stand-in of an image that is not downloaded yet, in checks before a run. No image has fewer tokens."""


class ImageSource(NamedTuple):
    """Origin of the images of a data set, and their limits."""

    keys: ImagesConfig
    folder: Path | None
    """Folder of relative paths; None: there is none, as for a data set on the hub."""
    section: str = "environments[].images"
    """Section of the configuration with the limits, for errors."""
    downloads: Path | None = None
    """Folder of downloaded images; None: images of allowed URLs are not looked at."""
    takes_urls: bool = True
    """False for images of turns, for which no origin can be allowed."""

    def load(self, value: Any, where: str) -> Image:
        """Return the image that a value of a row stands for.

        Args:
            value: bytes, a data URL, a path, a URL, or an object with `bytes`, `path`, `url` or `image`.
            where: example and number of the image, for errors.

        Raises:
            ConfigError: there is no such image, it is beyond a limit, or it is no still image. The text names the
                example, and the key of a limit.
        """
        try:
            value = named_in(value)
            if is_url(value):
                self.check_origin(value)
                where = f"{where} at {value[:200]!r}"
                if self.downloads is None:
                    return UNSEEN
            data = self._bytes(value)
            self.check_length(len(data))
            height, width = size_of(data)
            if height * width > self.keys.max_pixels:
                raise ValueError(
                    f"has {width} × {height} pixels, and {self.section}.max_pixels is {self.keys.max_pixels}"
                )
            check_sides(height, width)
        except ValueError as error:
            raise ConfigError(f"{where} {error}") from None
        return Image(data, height, width)

    def check_origin(self, url: str) -> None:
        """Check that images may be downloaded from a URL.

        Raises:
            ValueError: the origin is not allowed; the text follows the image's name, and has the key.
        """
        at, elsewhere = f"is at {url[:200]!r}", "download it next to the data"
        if not self.takes_urls:
            raise ValueError(f"{at}, and images are not loaded from elsewhere; send its bytes")
        try:
            origin = origin_of(url)
        except ValueError as error:
            raise ValueError(f"{at}, which {error}; or {elsewhere}") from None
        if origin not in self.keys.origins:
            raise ValueError(f"{at}, and {self.section}.origins does not name {origin}; add it there, or {elsewhere}")

    def check_length(self, num_bytes: int) -> None:
        """Check the size of an image's file.

        Raises:
            ValueError: the file is too large; the text follows the image's name, and has the key.
        """
        if num_bytes > self.keys.max_bytes:
            raise ValueError(f"has {num_bytes} bytes, and {self.section}.max_bytes is {self.keys.max_bytes}")

    def _bytes(self, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if not isinstance(value, str) or not value:
            raise ValueError(f"is a {type(value).__name__}, and must be bytes, a path or a URL")
        scheme, _, rest = value.partition(":")
        if scheme == "data":
            return self._of_data_url(rest)
        if self.downloads is not None and is_url(value):
            return self._read(self.downloads / file_name(value), f"was downloaded to {self.downloads}")
        return self._of_file(value)

    def _of_data_url(self, rest: str) -> bytes:
        kind, comma, text = rest.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise ValueError("is a data URL without base64: data:image/png;base64,…")
        # four characters are three bytes
        self.check_length(len(text) // 4 * 3 - 2)
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
        return self._read(self.folder / path, f"has the path {name} in {self.folder}")

    def _read(self, file: Path, words: str) -> bytes:
        try:
            found = file.stat()
            # a pipe would be waited for
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{words}, which is no file")
            self.check_length(found.st_size)
            with file.open("rb") as opened:
                # a file may grow while it is read
                return opened.read(self.keys.max_bytes + 1)
        except OSError as error:
            raise ValueError(f"{words}, which can't be read: {error.strerror}") from None


def named_in(value: Any) -> Any:
    """Return the bytes, path or URL that a value of a row names.

    Raises:
        ValueError: the value is an object that names no image.
    """
    while isinstance(value, Mapping):
        given = [name for name in SOURCES if value.get(name) is not None]
        if not given:
            raise ValueError("is an object without bytes, path or url")
        # a row of the library `datasets` has bytes, and the path that they came from
        value = value["bytes" if "bytes" in given else min(given)]
    return value


def is_url(value: Any) -> TypeGuard[str]:
    """Return whether a value is the URL of an image elsewhere; a data URL is not."""
    return isinstance(value, str) and "://" in value[:20] and not value.startswith("data:")


def file_name(url: str) -> str:
    """Return the name of the file with the image of a URL: the URL's sha256 (hex)."""
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()


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
