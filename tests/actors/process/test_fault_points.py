"""The places where tests harm a process."""

from pathlib import Path

import pytest

from actors.process import fault_points
from actors.process.fault_points import point


def test_a_file_that_is_still_being_written_harms_nobody_and_stays_armed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is empty before it is whole; a process that comes by then goes on, and the next one is harmed, once."""
    monkeypatch.setattr(fault_points, "_folder", tmp_path)
    monkeypatch.setattr(fault_points, "_actor", "packer-0")
    armed = tmp_path / "packer-0@packer.told"
    armed.touch()
    point("packer.told")
    assert armed.exists()
    armed.write_text("RuntimeError")
    with pytest.raises(RuntimeError, match="asked for by a test"):
        point("packer.told")
    assert [path.name for path in tmp_path.iterdir()] == ["packer-0@packer.told.hit"]
    point("packer.told")
