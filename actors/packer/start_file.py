"""starting.json: the work of a packer that starts and answers nobody yet, for the screens of `actors up` and `status`.

A packer reads all of the data before it opens its sockets. The file is there during this time alone.
"""

import contextlib
import json
import time
from pathlib import Path

from actors.process.tasks import LogTeller, Task, words_of
from actors.telemetry.reporter import replace

NAME = "starting.json"
WRITE_SECONDS = 1.0
"""Shortest time between two writes."""
FRESH_SECONDS = 10.0
"""Age of the file up to which it tells of a packer that starts now."""


class StartFile(LogTeller):
    """Teller of a packer until it answers: writes the task to the file, besides the log.

    Args:
        output: folder of the run.
    """

    def __init__(self, output: Path) -> None:
        self._path, self._next = output / NAME, 0.0

    def told(self, task: Task) -> None:
        """Write the task, if the last write is long enough ago."""
        super().told(task)
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + WRITE_SECONDS
        # without room, or before the folder is there, the start goes on without words
        with contextlib.suppress(OSError):
            replace(self._path, json.dumps({"time": time.time(), "task": task.values}) + "\n")

    def remove(self) -> None:
        """Remove the file: the packer answers from now on, or has ended."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def starting_words(output: Path) -> str:
    """Return the work of a packer that starts now, in words; empty if none does."""
    try:
        known = json.loads((output / NAME).read_text(encoding="utf-8"))
        return words_of(known["task"]) if time.time() - known["time"] < FRESH_SECONDS else ""
    except (OSError, ValueError, KeyError, TypeError):  # none, or half a file on a disk that was full
        return ""
