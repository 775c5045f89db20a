"""Runs whose groups are in files next to the ledger: they train the same, whatever happens to the packer."""

from pathlib import Path

import pytest

from actors.ledger.payload_files import folder_of
from actors.ops.recorded_steps import RecordedSteps
from tests.ring.harness import check_promise, ring
from tests.ring.test_resume import level_0, weights_of


def numbers(ledger: Path) -> set[int]:
    """Return the numbers of the payload files of a ledger."""
    folder = folder_of(ledger)
    return {int(path.name) for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("memory_bytes", [1, 1 << 30], ids=["each group is read from its file", "all in memory"])
def test_a_packer_that_crashes_goes_on_with_the_groups_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
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
    left = numbers(config.ledger_path)
    assert len(seen) >= 3
    assert seen - left, "no file was ever removed"
    # `actors replay` reads the files too
    last = config.trainer.max_steps
    steps = RecordedSteps(config)
    assert [batches[0].step for batches in steps.batches(steps.start_before(last), last)][-1] == last
