"""Files of W&B and SwanLab, read while they grow."""

import struct
from pathlib import Path

import pytest

from actors.trackers.log_format import BLOCK_BYTES, FIRST, FULL, HEADER_BYTES, LAST, MIDDLE, LogReader, records_of

IDENTITY = b":W&B"


def file_of(*records: bytes) -> bytes:
    """A file with these records."""
    data = bytearray(IDENTITY.ljust(HEADER_BYTES, b"\0"))
    for record in records:
        rest, is_first = record, True
        while is_first or rest:
            left = BLOCK_BYTES - len(data) % BLOCK_BYTES
            if left < HEADER_BYTES:
                data += bytes(left)
                left = BLOCK_BYTES
            piece, rest = rest[: left - HEADER_BYTES], rest[left - HEADER_BYTES :]
            kind = (LAST if not rest else MIDDLE) if not is_first else (FULL if not rest else FIRST)
            data += struct.pack("<IHB", 0, len(piece), kind) + piece
            is_first = False
    return bytes(data)


@pytest.mark.parametrize("size", [10, 5_000, 100_000])
def test_a_growing_file_gives_each_record_once(tmp_path: Path, size: int) -> None:
    """Wherever a look falls: within a record, between two, in the padding of a block; and no byte is read twice."""
    path = tmp_path / "run.wandb"
    records = [bytes([number]) * (size + number) for number in range(20)]
    data = file_of(*records)
    reader, found = LogReader(path, IDENTITY), list[bytes]()
    for end in range(0, len(data) + size // 3 + 1, size // 3 + 1):
        path.write_bytes(data[:end])
        found += reader.new()
    path.write_bytes(data)
    found += reader.new()
    assert found == records == list(records_of(path, IDENTITY))
    assert list(reader.new()) == []


def test_another_file_has_no_records(tmp_path: Path) -> None:
    """Neither an empty one, as after a crash, nor one of another kind."""
    for data in (b"", b"x", b"OTHER" * 10):
        (tmp_path / "a").write_bytes(data)
        assert list(LogReader(tmp_path / "a", IDENTITY).new()) == []
