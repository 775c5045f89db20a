"""What a tracker has been sent: a file per tracker below output_dir/trackers, appended to.

A step is noted before it is sent, and again once the tracker has it. After a crash the steps in between are uncertain,
and the tracker is asked. With each step stands the digest of its line, by which a line that was trained again is known.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import read_lines, replace
from actors.trackers.digests import Digests


class Journal:
    """Record of one tracker.

    Args:
        path: the file.
        run: id of the run; a journal of another run is replaced.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self.run, self.generation = run, 0
        """Number of the run in the tracker: one more for each return to an older step."""
        self.digests = Digests()
        """Digest of the line of each step that was sent, also of steps that the tracker may have lost."""
        self.held = -1
        """Newest step that the tracker surely has; -1: none."""
        self.finished = False
        if not path.is_file() or not self._read():
            self._start(0)

    @property
    def newest(self) -> int:
        """Newest step that was sent; -1: none."""
        return self.digests.newest

    @property
    def id(self) -> str:
        """Id of the run in the tracker."""
        return self.run if not self.generation else f"{self.run}-{self.generation}"

    def note_sending(self, step: int, digest: str) -> None:
        """Note a step that is about to be sent.

        Raises:
            OSError: the file can't be written; so do the other methods.
        """
        self._append({"step": step, "digest": digest})

    def note_held(self, step: int) -> None:
        """Note that the tracker has all steps up to this one."""
        if step != self.held:
            self._append({"held": step})

    def note_back(self, step: int) -> None:
        """Note that this step and later ones have been taken out of the tracker."""
        self._append({"back": step})

    def note_finished(self) -> None:
        """Note that the summary is sent and nothing is left to do."""
        self._append({"finished": True})

    def start_again(self) -> None:
        """Start with a new run in the tracker, which has nothing yet."""
        self._start(self.generation + 1)

    def _start(self, generation: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace(self._path, json.dumps({"run": self.run, "generation": generation}) + "\n")
        self.generation, self.digests, self.held, self.finished = generation, Digests(), -1, False

    def _read(self) -> bool:
        """Read the file; return whether it is of this run. Damaged lines count for nothing."""
        first, *rest = [line for line in read_lines(self._path) if isinstance(line, dict)] or [{}]
        if first.get("run") != self.run or not isinstance(first.get("generation"), int):
            return False
        self.generation = first["generation"]
        for line in rest:
            with contextlib.suppress(ValueError):
                self._take(line)
        return True

    def _append(self, line: dict[str, Any]) -> None:
        # a line end first: a partial line of a crash or a full disk stays a line of its own, which no reader parses
        with self._path.open("ab") as file:
            file.write(b"\n" + json.dumps(line).encode() + b"\n")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        match line:
            case {"step": int(step), "digest": str(digest)}:
                self.digests.add(step, digest)
                self.finished = False
            case {"held": int(step)}:
                self.held, self.finished = step, False
            case {"back": int(step)}:
                self.held, self.finished = min(self.held, step - 1), False
                self.digests.forget_after(step - 1)
            case {"finished": True}:
                self.finished = True
