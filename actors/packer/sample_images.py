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
        self._sizes: dict[str, int] = {}
        """Bytes of the files in the folder, by name."""
        self._is_read = False
        """True once the folder has been read."""

    def keep(self, images: Mapping[str, bytes]) -> int:
        """Write images that are not there yet, as far as there is room; return the number of those left out.

        Raises:
            WriteError: the folder can't be read or written now; the call may be repeated.
        """
        if not self._is_read:
            # by the writer too: a file system that hangs must not stop the packer
            self._writer.write(self._folder, "sizes", partial(_read_sizes, self._folder, self._sizes))
            self._is_read = True
        num_bytes = sum(self._sizes.values())
        left_out = 0
        for digest, data in images.items():
            if digest in self._sizes:
                continue
            if num_bytes + len(data) > self._max_bytes:
                left_out += 1
                continue
            path = self._folder / digest
            try:
                self._writer.write(path, digest, partial(_write, path, data))
            except WriteError:
                # the write may still succeed in the background
                self._is_read = False
                raise
            self._sizes[digest] = len(data)
            num_bytes += len(data)
        return left_out


def _read_sizes(folder: Path, sizes: dict[str, int]) -> None:
    """Replace sizes of files by those of a folder, which need not exist."""
    sizes.clear()
    if folder.is_dir():
        sizes.update((file.name, file.stat().st_size) for file in folder.iterdir())


def _write(path: Path, data: bytes) -> None:
    """Write a file, atomically: a reader finds all of it or nothing."""
    path.parent.mkdir(exist_ok=True)
    staging = path.with_name(f".{path.name}")
    staging.write_bytes(data)
    staging.replace(path)
