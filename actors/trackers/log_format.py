"""Reader of LevelDB's log format, in which wandb and swanlab write their files.

A file has a header of 7 bytes and blocks of 32 KiB. A record in a block is checksum (4 bytes), length (2) and type (1),
then data; a record that does not fit continues in the next block.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES, HEADER_BYTES = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records_of(path: Path, identity: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file, which may still grow or have been cut short by a crash.

    Args:
        path: the file.
        identity: first bytes of such a file; another file has no records.
    """
    data = path.read_bytes()
    if not data.startswith(identity):
        return
    at, pieces = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
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
            yield pieces
