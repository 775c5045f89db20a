"""Image files of an environment travel as bytes; each other path is told."""

import os
from pathlib import Path
from typing import Any

import pytest

from actors.environments.worker.pictures import with_files
from actors.environments.worker.wire import MESSAGE_BYTES


def test_paths_become_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative ones are of the working directory; all else stays as it is."""
    (tmp_path / "a.png").write_bytes(b"abc")
    monkeypatch.chdir(tmp_path)
    kept: list[dict[str, Any]] = [
        {"role": "user", "content": "a.png"},
        {"role": "user", "content": [{"type": "text", "text": "a.png"}]},
    ]
    shown: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "path": path}]} for path in ("a.png", f"{tmp_path}/a.png")
    ]
    assert with_files([*kept, *shown]) == [
        *kept,
        *[{"role": "user", "content": [{"type": "image", "bytes": b"abc"}]}] * 2,
    ]


@pytest.mark.parametrize("kind", ["missing", "pipe", "large"])
def test_no_other_file_is_read(tmp_path: Path, kind: str) -> None:
    """A pipe would be waited for, and a large file can't travel."""
    file = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)
    if kind == "large":
        with file.open("wb") as opened:
            opened.truncate(MESSAGE_BYTES + 1)
    words = {"missing": "No such file", "pipe": "is no regular file", "large": "and a message holds"}[kind]
    with pytest.raises((OSError, ValueError), match=words):
        with_files([{"role": "user", "content": [{"type": "image", "path": str(file)}]}])
