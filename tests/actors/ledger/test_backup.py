"""When backups of the ledger are made: often enough to go with a checkpoint that is still kept."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors.ledger import Store
from actors.ledger.backup import Backups
from actors.ledger.store import backup_paths
from tests.ring.harness import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Return the file of a ledger that a packer holds."""
    store = Store(tmp_path / "ledger.sqlite")
    yield tmp_path / "ledger.sqlite"
    store.close()


def test_a_backup_that_took_long_is_followed_by_another_before_its_checkpoint_is_pruned(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest after it would have no end; of three checkpoints that are kept its own is the oldest now."""
    monkeypatch.setattr("actors.ledger.backup.REST_FACTOR", 1e9)
    newest, older = backup_paths(path)
    backups = Backups(path, keep_last=3)
    backups.follow(10)
    wait_until(newest.exists, "the first backup")
    backups.follow(20)
    backups.follow(30)
    wait_until(older.exists, "a second backup")
    backups.close()


def test_checkpoints_of_which_none_has_a_backup_are_told_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backup can be written for three checkpoints, of which three are kept: nothing could be restored now."""
    monkeypatch.setattr("actors.ledger.backup.MAX_BYTES", -1)
    newest, _ = backup_paths(path)
    backups = Backups(path, keep_last=3)
    with capture_logs() as lines:
        told = []
        for step in (10, 20, 30, 40):
            backups.follow(step)
            told.append(sum("older than the newest checkpoints" in line["event"] for line in lines))
        assert told == [0, 0, 1, 1]
        monkeypatch.undo()
        backups.follow(50)
        wait_until(newest.exists, "a backup")
        wait_until(lambda: any(line["event"] == "ledger backed up" for line in lines), "its line in the log")
        backups.follow(60)
        assert sum("older than the newest checkpoints" in line["event"] for line in lines) == 1
    backups.close()
