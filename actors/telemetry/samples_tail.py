"""Reader of samples.jsonl while it is written, across the two things that happen to the file.

It becomes the older file when it is large, and a new one starts: the old one stays open here until its last line is
read. A packer that starts again, or a rewind, cuts lines off, and the same lines or others are written in their place:
the newest lines are remembered by their place and digest, and reading continues behind the last one that is still
there. A line that is written again, bit by bit the same, is not told again.
"""

import contextlib
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from actors.telemetry.reporter import OLDER_SAMPLES, SAMPLES, lines_from_the_end, record_of

REMEMBERED = 4096
"""Lines remembered. After a larger cut, reading continues at the end of the file."""


class _Line(NamedTuple):
    """Place of a line that was read, and its digest."""

    end: int
    length: int
    digest: bytes


class SamplesTail:
    """Reader of the records that are appended to a run's samples.jsonl after this object is made.

    Args:
        output: folder of the run; it need not be there yet.
    """

    def __init__(self, output: Path) -> None:
        self._path, self._older = output / SAMPLES, output / OLDER_SAMPLES
        self._file: IO[bytes] | None = None
        self._inode: int | None = None
        self._end = 0
        """Place in the file up to which lines were read."""
        self._lines: deque[_Line] = deque(maxlen=REMEMBERED)
        """Newest lines that were read and are still there, in the order of the file."""
        self._told: dict[bytes, None] = {}
        """Digests of the newest lines that were read, also of other files and of lines that were cut off."""
        self._older_inode = _inode(self._older)
        with contextlib.suppress(FileNotFoundError):
            self._open(self._path)
            self._go_to_the_end()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were completed since the last call; all of them must be taken."""
        # before the file is read: once another file has its name, nothing is appended to this one any more
        inode, older = _inode(self._path), _inode(self._older)
        if self._file is not None:
            self._go_back()
            yield from self._rest(self._file)
        if inode is not None and inode != self._inode:
            # the older file is neither this one nor the one before: another one has come and gone between two calls
            if self._file is not None and older not in (None, self._inode, self._older_inode):
                yield from self._rest_of(self._older)
            yield from self._rest_of(self._path)
        self._older_inode = older

    def _rest_of(self, path: Path) -> Iterator[dict[str, Any]]:
        # renamed or removed in this moment: the next call finds what there is
        with contextlib.suppress(FileNotFoundError):
            self._open(path)
        if self._file is not None:
            yield from self._rest(self._file)

    def _open(self, path: Path) -> None:
        file = path.open("rb")
        self.close()
        # open until the next one: the lines stay readable, whatever name the file has
        self._file = file
        self._inode, self._end = os.fstat(self._file.fileno()).st_ino, 0
        self._lines.clear()

    def _go_to_the_end(self) -> None:
        """Take all lines that are there as read."""
        found = list(itertools.islice(lines_from_the_end(self._path), REMEMBERED))
        for start, raw in reversed(found):
            if raw.endswith(b"\n"):
                self._end = start
                self._take(raw)

    def _go_back(self) -> None:
        """Go back behind the last line read that is still there, if lines were cut off."""
        if not self._lines or self._is_there(self._lines[-1]):
            return
        is_all = len(self._lines) < REMEMBERED
        while self._lines and not self._is_there(self._lines[-1]):
            self._lines.pop()
        self._end = self._lines[-1].end if self._lines else 0
        if not self._lines and not is_all:
            self._go_to_the_end()

    def _is_there(self, line: _Line) -> bool:
        assert self._file is not None
        self._file.seek(line.end - line.length)
        return _digest(self._file.read(line.length)) == line.digest

    def _rest(self, file: IO[bytes]) -> Iterator[dict[str, Any]]:
        """Yield the records of the complete lines from the place reached on."""
        file.seek(self._end)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            record = record_of(raw)
            if self._take(raw) and record is not None:
                yield record

    def _take(self, raw: bytes) -> bool:
        """Remember the line at the place reached; return whether it is new."""
        self._end += len(raw)
        line = _Line(self._end, len(raw), _digest(raw))
        self._lines.append(line)
        is_new = line.digest not in self._told
        # the newest last, so that the first ones are those to forget
        self._told.pop(line.digest, None)
        self._told[line.digest] = None
        if len(self._told) > 2 * REMEMBERED:
            del self._told[next(iter(self._told))]
        return is_new


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _inode(path: Path) -> int | None:
    """Return the number of a file, which stays the same when it gets another name; None if there is no file."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
