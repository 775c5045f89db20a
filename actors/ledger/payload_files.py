"""Files of large payloads next to the ledger (decision 0044).

SQLite writes each byte of a payload twice, to its log and to the table, in the thread of the rounds. A payload of
MIN_BYTES or more is appended to a file in `LEDGER.payloads/` instead, once, and flushed to the disk, by a thread of its
own. The ledger's transaction then stores its place. Bytes without a place, left by a crash or by a refused group, are
never read, and go with their file.

Files are numbered from 1. A start begins a new file, and so does a file of FILE_BYTES. A file is removed when the
ledger names none of its payloads.
"""

import os
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger("ledger")

MIN_BYTES = 1 << 20
"""Bytes of the smallest payload in a file. A flush for each smaller one would cost more than SQLite's second copy."""
FILE_BYTES = 128 << 20
"""Bytes above which the next payload goes into a new file."""
CLOSE_SECONDS = 5.0
"""Longest wait of `PayloadFiles.close` for a write under way; a slower one keeps its file open until it has ended."""


@dataclass(frozen=True)
class Place:
    """Place of a payload."""

    file: int
    """Number of the file."""
    start: int
    """Bytes of the file before the payload."""
    lengths: tuple[int, ...]
    """Bytes of each frame, in order."""


def folder_of(ledger: Path) -> Path:
    """Return the folder with the payload files of a ledger."""
    return ledger.with_name(f"{ledger.name}.payloads")


def read(folder: Path, place: Place) -> list[bytes]:
    """Return the frames at a place. A file that is too short gives short frames, whose digest differs.

    Raises:
        OSError: the file can't be read, or is gone.
    """
    with (folder / str(place.file)).open("rb", buffering=0) as file:
        file.seek(place.start)
        return [_read(file.fileno(), length) for length in place.lengths]


def _read(descriptor: int, length: int) -> bytes:
    pieces, left = [], length
    # a single read returns at most 2 GiB, and may return less than asked for
    while left and (piece := os.read(descriptor, left)):
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def num_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 if there is none."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except FileNotFoundError:  # a file may also go while they are counted
        return 0


class PayloadFiles:
    """Writer of the files of a ledger. `append` is for one thread, `remove_unused` for the thread that commits.

    Args:
        folder: of the files; made with the first payload.
        used: numbers of the files that the ledger names.
    """

    def __init__(self, folder: Path, used: Collection[int] = ()) -> None:
        self._folder = folder
        self._number = max([*self._numbers(), *used], default=0)
        self._descriptor = -1
        # a descriptor that is closed under a write may be another file's by then
        self._writing = threading.Lock()
        self._length = 0
        """Bytes of the complete payloads in the present file."""
        self._remove(number for number in self._numbers() if number not in used)

    def append(self, frames: Sequence[bytes | memoryview]) -> Place:
        """Append a payload and flush it to the disk; return its place.

        Raises:
            OSError: the payload can't be written. The next payload is written in its place.
        """
        # flushed for `ledger.sync: process` too: after a power loss, the ledger may name no bytes that are not there
        lengths = tuple(len(frame) for frame in frames)
        with self._writing:
            if self._descriptor < 0 or self._length >= FILE_BYTES:
                self._begin_file()
            at = self._length
            for frame in frames:
                at += _write(self._descriptor, frame, at)
            os.fdatasync(self._descriptor)
            place = Place(self._number, self._length, lengths)
            self._length = at
        return place

    def remove_unused(self, used: Collection[int], newest: int) -> None:
        """Remove the files that the ledger does not name any more.

        Args:
            used: numbers of the files that the ledger names.
            newest: number of the newest file of which a payload has been committed. Payloads are committed in the order
                of `append`, so each payload in an earlier file is committed or refused; those in later files may be
                on their way.
        """
        self._remove(number for number in self._numbers() if number < newest and number not in used)

    def close(self) -> None:
        """Close the present file. Thread-safe."""
        if self._writing.acquire(timeout=CLOSE_SECONDS):
            try:
                self._close_file()
            finally:
                self._writing.release()
        else:
            log.warning("payload file left open: a write takes long", path=str(self._folder / str(self._number)))

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin_file(self) -> None:
        if not self._folder.is_dir():
            self._folder.mkdir()
            sync(self._folder.parent)
        descriptor = os.open(self._folder / str(self._number + 1), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._close_file()
        self._descriptor, self._number, self._length = descriptor, self._number + 1, 0
        # a new name survives a power loss only if its folder is flushed
        sync(self._folder)

    def _numbers(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            try:
                (self._folder / str(number)).unlink(missing_ok=True)
            except OSError as error:  # tried again at the next removal
                log.warning("payload file not removed", path=str(self._folder / str(number)), detail=str(error))


def _write(descriptor: int, frame: bytes | memoryview, at: int) -> int:
    """Write all bytes of a frame at a position; return their number."""
    view, written = memoryview(frame), 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], at + written)
    return written
