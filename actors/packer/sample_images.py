"""Images of the groups in samples.jsonl: a file per image, named by its digest, up to a number of bytes in all."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from actors.datasets.image_header import size_of
from actors.datasets.prepared import digest_of
from actors.telemetry.reporter import Size
from actors.telemetry.writer import WriteError, Writer
from schemas.messages import ScoredGroup

FOLDER = "sample_images"
"""Folder in output_dir."""


def sizes_of(images: Mapping[str, bytes]) -> dict[str, Size]:
    """Return the sizes of images by their digests; without files that are no JPEG, PNG or WebP."""
    found = {}
    for digest, data in images.items():
        try:
            found[digest] = size_of(data)
        except ValueError:
            continue  # the data set's reader refuses these, so an image of another origin: it has no picture
    return found


def images_of(group: ScoredGroup) -> dict[str, bytes]:
    """Return the image files of a group by their digests."""
    return {digest_of(data): data for data in group.images}


class SampleImages:
    """Writer of the folder of images.

    Args:
        output: folder of the run.
        writer: writer of the run's files.
        max_bytes: bytes of all images in the folder.
    """

    def __init__(self, output: Path, writer: Writer, max_bytes: int) -> None:
        self._folder, self._writer, self._max_bytes = output / FOLDER, writer, max_bytes
        self._num_bytes: int | None = None
        """Bytes of the images in the folder; None: not counted yet."""

    def keep(self, images: Mapping[str, bytes]) -> int:
        """Write images that are not there yet, as far as there is room; return the number of those left out.

        Raises:
            WriteError: an image can't be written now; the call may be repeated.
        """
        if self._num_bytes is None:
            files = self._folder.iterdir() if self._folder.is_dir() else ()
            self._num_bytes = sum(file.stat().st_size for file in files)
        left_out = 0
        for digest, data in images.items():
            path = self._folder / digest
            if path.exists():
                continue
            if self._num_bytes + len(data) > self._max_bytes:
                left_out += 1
                continue
            try:
                self._writer.write(path, digest, partial(_write, path, data))
            except WriteError:
                # the write may still succeed in the background, so bytes are counted again
                self._num_bytes = None
                raise
            self._num_bytes += len(data)
        return left_out


def _write(path: Path, data: bytes) -> None:
    """Write a file, atomically: a reader finds all of it or nothing."""
    path.parent.mkdir(exist_ok=True)
    staging = path.with_name(f".{path.name}")
    staging.write_bytes(data)
    staging.replace(path)
