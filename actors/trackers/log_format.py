"""Reader of LevelDB's log format, in which wandb and swanlab write their files.

A file has a header of 7 bytes and blocks of 32 KiB. A record in a block is checksum (4 bytes), length (2) and type (1),
then data; a record that does not fit continues in the next block.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES, HEADER_BYTES = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class LogReader:
    """Reader of a file that may still grow, or have been cut short by a crash.

    Args:
        path: the file.
        identity: first bytes of such a file; another file has no records.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._path, self._identity = path, identity
        self._at = HEADER_BYTES
        """Offset behind the last whole record."""

    def new(self) -> Iterator[bytes]:
        """Yield the whole records that are new since the last call, which are all of the file that is read."""
        with self._path.open("rb") as file:
            if not file.read(HEADER_BYTES).startswith(self._identity):
                return
            file.seek(self._at)
            first, data = self._at, file.read()
        at, pieces = 0, b""
        while at + HEADER_BYTES <= len(data):
            left = BLOCK_BYTES - (first + at) % BLOCK_BYTES
            if left < HEADER_BYTES:  # padding
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            piece = data[at + HEADER_BYTES : at + HEADER_BYTES + length]
            if len(piece) < length or kind not in (FULL, FIRST, MIDDLE, LAST):
                return
            at += HEADER_BYTES + length
            pieces = piece if kind in (FULL, FIRST) else pieces + piece
            if kind in (FULL, LAST):
                self._at = first + at
                yield pieces


def records_of(path: Path, identity: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file; arguments as of `LogReader`."""
    return LogReader(path, identity).new()
