"""starting.json: what a packer does before it answers."""

import json
import time
from pathlib import Path

from actors.ops.screens.render import View, describe, render
from actors.packer.start_file import NAME, StartFile, starting_words
from actors.process.tasks import Task


def test_the_work_of_a_packer_that_starts_is_on_the_screen(tmp_path: Path) -> None:
    """Until the packer answers."""
    file, task = StartFile(tmp_path), Task("read data.jsonl", 8e9, "bytes", None)
    assert starting_words(tmp_path) == ""
    task.done, task._started = 2e9, time.monotonic() - 60
    file.told(task)
    words = starting_words(tmp_path)
    assert words == "read data.jsonl: 2.0 of 8.0 GB, about 3 min left"
    assert f"waiting for the packer: {words}" in render(View("run", "/o", {}, starting=words))
    assert describe({}, 3.0, words) == f"00:03  waiting for the packer: {words}"
    file.remove()
    assert starting_words(tmp_path) == ""


def test_an_old_or_broken_file_tells_nothing(tmp_path: Path) -> None:
    """A packer that was killed leaves its file."""
    values = {"name": "read", "done": 1, "total": 2, "unit": "", "seconds": 1.0}
    (tmp_path / NAME).write_text(json.dumps({"time": time.time() - 60, "task": values}))
    assert starting_words(tmp_path) == ""
    (tmp_path / NAME).write_text('{"time": 1')
    assert starting_words(tmp_path) == ""


def test_a_folder_that_is_missing_stops_no_start(tmp_path: Path) -> None:
    """The words are lost, and nothing else."""
    StartFile(tmp_path / "missing").told(Task("read", 2, "rows", None))
    assert not (tmp_path / "missing").exists()
