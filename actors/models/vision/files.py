"""Pixels of image files, decoded once for all: trainers and engines see the same ones. Needs no torch."""

import io
from typing import TYPE_CHECKING

from actors.process.packages import is_installed
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image


def check_pillow() -> None:
    """Check that Pillow is installed.

    Raises:
        ConfigError: Pillow is not installed.
    """
    if not is_installed("PIL"):
        raise ConfigError("model.path: images need Pillow, which is not installed; install grpo-actors[vision]")


def decoded(data: bytes) -> "Image":
    """Return an image file as RGB pixels: turned as the file says, and without transparency, as transformers has it.

    Raises:
        ValueError: the bytes are no image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except MemoryError:
        raise  # not the file's fault
    except Exception as error:  # Pillow's readers raise many kinds for damaged files
        raise ValueError(f"{len(data)} bytes are no image that can be read: {type(error).__name__}: {error}") from error
