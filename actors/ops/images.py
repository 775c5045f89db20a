"""Pictures of a run's images, for pages: small PNG files that are encoded here, whatever the image's file holds.

The files are not trusted: they come from data sets. A browser gets pixels alone, never a byte of the file.
"""

import io
import re
from pathlib import Path

from actors.datasets.image_header import size_of
from actors.datasets.prepared import digest_of
from actors.models.vision.files import decoded
from actors.packer.sample_images import FOLDER
from actors.process.packages import is_installed
from schemas.limits import IMAGES_BYTES

DIGEST = re.compile("[0-9a-f]{32}")
MAX_PIXELS = 1 << 25
"""Pixels of the largest image that is decoded for a picture: 100 MB while it is."""


def can_show() -> bool:
    """Return whether pictures can be made: whether Pillow is installed."""
    return is_installed("PIL")


def is_kept(output: Path, digest: str) -> bool:
    """Return whether a run has kept an image with its samples."""
    return bool(DIGEST.fullmatch(digest)) and (output / FOLDER / digest).is_file()


def kept_image(output: Path, digest: str) -> bytes | None:
    """Return an image file that a run has kept with its samples; None if it is gone, or is not that of the digest."""
    if not is_kept(output, digest):
        return None
    try:
        with (output / FOLDER / digest).open("rb") as file:
            data = file.read(IMAGES_BYTES)
    except OSError:
        return None  # removed meanwhile
    return data if digest_of(data) == digest else None


def picture(data: bytes, side: int) -> bytes:
    """Return an image file as a PNG, made smaller if a side is longer.

    Args:
        data: bytes of the file.
        side: most pixels of a side of the picture.

    Raises:
        ValueError: the file is no JPEG, PNG or WebP, is damaged, or has more than MAX_PIXELS.
    """
    height, width = size_of(data)
    if height * width > MAX_PIXELS:
        raise ValueError(f"has {width} × {height} pixels; pictures are made of up to {MAX_PIXELS} pixels")
    made = decoded(data)
    made.thumbnail((side, side))
    # texts and profiles of the file stay behind
    made.info.clear()
    out = io.BytesIO()
    made.save(out, "PNG")
    return out.getvalue()
