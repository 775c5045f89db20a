"""The copy of the ledger's newest backup that a run over several nodes carries."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors.ledger.store import backup_paths
from actors.ops.up import carried_ledger
from actors.ops.up.carried_ledger import LedgerCarrier, carried_path
from tests.ring.harness import ring_config, wait_until


def test_a_backup_that_can_not_be_copied_is_copied_at_a_later_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk for a while: each failed look is told, and the next newer backup is copied too."""
    config = ring_config(tmp_path / "run", ledger={"path": str(tmp_path / "disk" / "ledger.sqlite")})
    backup, _ = backup_paths(config.ledger_path)
    backup.parent.mkdir(parents=True)
    monkeypatch.setattr(carried_ledger, "LOOK_SECONDS", 0.01)
    copy, failures = carried_ledger._copy, iter([OSError(28, "No space left on device")] * 3)

    def copied(source: Path, target: Path) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        copy(source, target)

    monkeypatch.setattr(carried_ledger, "_copy", copied)
    with capture_logs() as logs:
        carrier = LedgerCarrier(config)
        backup.write_bytes(b"first")
        wait_until(lambda: carried_path(config).exists(), "the first copy", 60.0)
        assert carried_path(config).read_bytes() == b"first"
        backup.write_bytes(b"the second")
        wait_until(lambda: carried_path(config).read_bytes() == b"the second", "the second copy", 60.0)
        carrier.close()
    told = [line for line in logs if line["event"] == "backup of the ledger not copied"]
    assert len(told) == 3
    assert "No space left on device" in told[0]["detail"]
