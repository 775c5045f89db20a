"""Runs whose groups are in files next to the ledger: they train the same, whatever happens to the packer."""

import errno
import itertools
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors.ledger.payload_files import PayloadFiles, Place, folder_of
from actors.ops.recorded_steps import RecordedSteps
from schemas import limits
from tests.ring.harness import check_promise, ring
from tests.ring.test_resume import level_0, weights_of


def numbers(ledger: Path) -> set[int]:
    """Return the numbers of the payload files of a ledger."""
    folder = folder_of(ledger)
    return {int(path.name) for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize(
    ("memory_bytes", "in_parts"),
    [(1, False), (1 << 30, False), (1, True)],
    ids=["each group is read from its file", "all in memory", "batches are built in a thread and travel in parts"],
)
def test_a_packer_that_crashes_goes_on_with_the_groups_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, in_parts: bool
) -> None:
    """The weights are those of a run with all groups in SQLite, and files go when their groups are durable."""
    slow = {"engine": {"type": "fake", "token_seconds": 0.003}}
    config = level_0(tmp_path / "sqlite", inference=slow)
    with ring(config) as run:
        run.start().wait()
    expected = weights_of(config)
    assert numbers(config.ledger_path) == set()

    monkeypatch.setattr("actors.ledger.payload_files.MIN_BYTES", 1)
    monkeypatch.setattr("actors.ledger.payload_files.FILE_BYTES", 1000)
    if in_parts:
        monkeypatch.setattr("actors.packer.batch_sender.INLINE_BYTES", 0)
        monkeypatch.setattr("bus.parts.WHOLE_BYTES", 0)
        monkeypatch.setattr(limits, "PART_BYTES", 500)
    config = level_0(tmp_path / "files", inference=slow)
    config = config.model_copy(update={"packer": config.packer.model_copy(update={"memory_bytes": memory_bytes})})
    seen: set[int] = set()
    with ring(config) as run:
        run.start()
        for step in (2, 4, 6):
            run.crash("packer-0", step)
            seen |= numbers(config.ledger_path)
            run.start("packer-0")
        run.wait()
    check_promise(config)
    assert weights_of(config) == expected
    # a checkpoint that came late leaves the files to the next commit of a payload: there is one in two more steps
    config = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"max_steps": config.trainer.max_steps + 2})}
    )
    with ring(config) as run:
        run.start().wait()
    left = numbers(config.ledger_path)
    assert len(seen) >= 3
    assert seen - left, "no file was ever removed"
    # `actors replay` reads the files too
    last = config.trainer.max_steps
    steps = RecordedSteps(config)
    assert [batches[0].step for batches in steps.batches(steps.start_before(last), last)][-1] == last


def test_groups_that_no_file_takes_are_stored_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second write fails, as on a disk that is full at times: nothing is lost, and the log names the reason."""
    monkeypatch.setattr("actors.ledger.payload_files.MIN_BYTES", 1)
    append, calls = PayloadFiles.append, itertools.count()

    def failing(files: PayloadFiles, frames: list[bytes]) -> Place:
        if next(calls) % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(files, frames)

    monkeypatch.setattr(PayloadFiles, "append", failing)
    config = level_0(tmp_path, steps=4, trainer={"checkpoint": {"interval": 100}})
    with capture_logs() as lines, ring(config) as run:
        run.start().wait()
    check_promise(config)
    told = [line for line in lines if line["event"].startswith("payload not written to a file")]
    assert len(told) == next(calls) // 2
    assert "No space left" in told[0]["detail"]
