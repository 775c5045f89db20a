"""Files of large payloads: what the ledger names is read back or said to be damaged, and the rest goes."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.ledger import Changes, Store
from actors.ledger.backup import back_up, put_in_place
from actors.ledger.payload_files import FILE_BYTES, PayloadFiles, folder_of, num_bytes, read
from actors.ledger.store import LedgerReader, backup_paths, digest_of
from schemas.errors import RunFailedError
from tests.actors.ledger.test_store import a_group, a_step

Frames = list[bytes]


def frames_of(ordinal: int, size: int = 5000) -> Frames:
    """A payload of four frames, one of them empty."""
    drawn = random.Random(ordinal)
    return [b"header", b"", drawn.randbytes(size), drawn.randbytes(size // 3)]


def commit(store: Store, *ordinals: int, **changes: object) -> None:
    """Append and commit a payload for each ordinal."""
    assert store.files is not None
    payloads = {ordinal: frames_of(ordinal) for ordinal in ordinals}
    store.commit(
        Changes(groups={ordinal: a_group(ordinal, **changes) for ordinal in ordinals}),
        {ordinal: (digest_of(frames), frames) for ordinal, frames in payloads.items()},
        {ordinal: store.files.append(frames) for ordinal, frames in payloads.items()},
    )


def compact(store: Store, *ordinals: int) -> None:
    """Compact groups, and sweep all of their payloads."""
    store.commit(Changes(gone_groups=list(ordinals)), {})
    while store.unswept:
        store.commit(Changes(), {})


def files(path: Path) -> list[int]:
    """Return the numbers of the files of a ledger."""
    folder = folder_of(path)
    return sorted(int(file.name) for file in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a ledger that does not exist yet."""
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each payload begins a new file."""
    monkeypatch.setattr("actors.ledger.payload_files.FILE_BYTES", 1)


@pytest.mark.parametrize("sizes", [[1], [3_000_000, 0, 70_000], [random.Random(0).randrange(9000) for _ in range(200)]])
def test_frames_are_read_as_they_were_written(tmp_path: Path, sizes: list[int]) -> None:
    """Of any lengths, as bytes or as views on a larger buffer."""
    writer = PayloadFiles(tmp_path / "files")
    payloads = [[os.urandom(size), memoryview(os.urandom(size + 7))[7:], b""] for size in sizes]
    places = [writer.append(frames) for frames in payloads]
    for frames, place in reversed(list(zip(payloads, places, strict=True))):
        assert read(tmp_path / "files", place) == [bytes(frame) for frame in frames]
    assert num_bytes(tmp_path / "files") == 2 * sum(sizes)


def test_a_failed_write_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full in the middle of a payload: the next one is written in its place."""
    writer, written = PayloadFiles(tmp_path / "files"), os.pwrite
    first = writer.append(frames_of(0))

    def full(descriptor: int, data: memoryview, at: int) -> int:
        if at > first.start + 6000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(descriptor, data[:1000], at)  # as much as there was room for

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        writer.append(frames_of(1))
    monkeypatch.undo()
    second = writer.append(frames_of(2))
    assert second.start == sum(first.lengths)
    assert read(tmp_path / "files", first) == frames_of(0)
    assert read(tmp_path / "files", second) == frames_of(2)


def test_a_new_file_begins_when_one_is_full_and_at_each_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash has left behind the last committed payload is never read, so no start writes after it."""
    monkeypatch.setattr("actors.ledger.payload_files.FILE_BYTES", 10_000)
    assert FILE_BYTES > 10_000
    store = Store(path)
    commit(store, *range(5))
    assert files(path) == [1, 2, 3]
    store.close()
    store = Store(path)
    commit(store, 5)
    assert files(path) == [1, 2, 3, 4]
    assert store.payloads(range(6)) == [frames_of(ordinal) for ordinal in range(6)]
    store.close()


@pytest.mark.usefixtures("small_files")
def test_files_go_with_the_last_of_their_payloads(path: Path) -> None:
    """Those of compacted groups, and at a start those that no commit names; never one whose payload is on its way."""
    store = Store(path)
    commit(store, 0, 1, 2)
    assert store.files is not None
    store.files.append(frames_of(3))  # taken in, and not committed yet
    compact(store, 0, 1)
    assert files(path) == [3, 4]
    compact(store, 2)
    assert files(path) == [3, 4], "the newest file with a committed payload stays, and all later ones"
    commit(store, 4)
    compact(store, 4)
    assert files(path) == [5]
    store.close()
    store = Store(path)
    assert files(path) == []
    commit(store, 6)
    assert len(files(path)) == 1
    assert LedgerReader.of(path).payloads([6]) == [frames_of(6)]
    store.close()


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _change(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [_cut, _change, Path.unlink])
def test_a_damaged_file_fails_the_run_by_name(path: Path, harm: Callable[[Path], None]) -> None:
    """As a damaged table does; the message leads to the backup."""
    store = Store(path)
    commit(store, 0)
    back_up(path)
    harm(folder_of(path) / "1")
    with pytest.raises(RunFailedError, match=r"is damaged: the payload of ordinal 0 .*actors restore"):
        store.payloads([0])
    store.close()


def test_a_backup_is_whole_without_the_files(path: Path) -> None:
    """It is restored next to files of a ledger that is put aside with them, and the next packer reads all payloads."""
    store = Store(path)
    small = [b"small"]
    store.commit(Changes(groups={9: a_group(9)}), {9: (digest_of(small), small)})
    commit(store, 0, 1)
    store.commit(Changes(steps=[a_step(1, 0, 1)]), {})
    _, num_bytes_copied = back_up(path)
    assert num_bytes_copied > num_bytes(folder_of(path))
    store.close()
    path.write_bytes(b"damaged")
    aside = put_in_place(backup_paths(path)[0], path, incarnation=1)
    assert [file.name for file in folder_of(aside).iterdir()] == ["1"]
    store = Store(path)
    assert store.payloads([0, 9, 1]) == [frames_of(0), small, frames_of(1)]
    commit(store, 2)
    assert store.payloads([2, 1]) == [frames_of(2), frames_of(1)]
    store.close()
