"""TensorBoard: event files, written without torch or TensorFlow.

Each start writes a file of its own, which begins with the order to forget later steps of earlier files. So a step that
was written before a crash, or before the run went back, counts once.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from actors.trackers.protocol import Entry, Table, TrackedRun
from schemas.config.trackers import TensorboardConfig

MARKER = ".grpo-actors-run"
"""File with the id of the run that a folder below `logging_dir` belongs to."""
MAX_ROWS = 32
"""Largest number of rows of a table, which TensorBoard shows as text."""
LONGEST_WAIT_SECONDS = 3.0
"""Longest wait for a file name that sorts behind all others."""


class TensorboardTracker:
    """Tracker that writes event files.

    Args:
        keys: keys of the tracker.
    """

    goes_back = True

    def __init__(self, keys: TensorboardConfig) -> None:
        self._keys = keys
        self._folder = Path()
        self._writer: EventFileWriter | None = None
        self._newest = 0

    def open(self, run: TrackedRun) -> int | None:
        """Start a file that replaces `next_step` and later steps; all steps in a folder that has none yet."""
        self._folder = folder_of(Path(self._keys.logging_dir).absolute(), run) if self._keys.logging_dir else run.folder
        is_new = not any(self._folder.glob("events.out.tfevents.*"))
        self._start_file(0 if is_new else run.next_step)
        if is_new or run.next_step <= 0:
            self._text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```", 0)
        return -1 if is_new else None

    def log(self, entry: Entry) -> None:
        """Write the values as scalars, and the samples as a table in Markdown."""
        self._newest = entry.step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in entry.values.items()]
        self._write(Event(wall_time=entry.time, step=entry.step, summary=Summary(value=values)))
        if entry.samples is not None:
            self._text("completions", markdown_of(entry.samples), entry.step)

    def flush(self) -> None:
        """Write what waits to the file."""
        if self._writer is not None:
            self._writer.flush()

    def go_back(self, step: int) -> None:
        """Start a file that replaces this step and later ones."""
        self.close()
        self._start_file(step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary as text at the last step."""
        self._text("summary", f"```json\n{json.dumps(summary, indent=2)}\n```", self._newest)
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _start_file(self, purge_step: int) -> None:
        for path in self._folder.glob("events.out.tfevents.*"):
            if not path.stat().st_size:  # of a try on a full disk, of which there may be one a minute
                path.unlink()
        # readers take files in the order of their names, which start with the second of their creation
        existing = [path.name.split(".")[3] for path in self._folder.glob("events.out.tfevents.*")]
        newest = max((int(second) for second in existing if second.isdecimal()), default=0)
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while int(time.time()) <= newest and time.monotonic() < deadline:
            time.sleep(0.05)
        self._writer = EventFileWriter(str(self._folder))
        self._write(
            Event(wall_time=time.time(), step=max(0, purge_step), session_log=SessionLog(status=SessionLog.START))
        )
        self._newest = max(0, purge_step - 1)

    def _text(self, tag: str, text: str, step: int) -> None:
        metadata = create_summary_metadata(display_name=tag, description="")
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

    def _write(self, event: Event) -> None:
        assert self._writer is not None
        self._writer.add_event(event)


def folder_of(logging_dir: Path, run: TrackedRun) -> Path:
    """Return the run's own folder below `logging_dir`: NAME, or NAME-ID if another run has taken that name.

    Raises:
        OSError: the folder can't be made.
    """
    named = logging_dir / run.name
    return named if _takes(named, run) else logging_dir / f"{run.name}-{run.id[:8]}"


def _takes(folder: Path, run: TrackedRun) -> bool:
    """Mark a folder as the run's, unless it is another run's; return whether the run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / MARKER
    # files without a marker are of an earlier release: of this run, if it has sent steps already
    if run.next_step <= 0 and not marker.exists() and any(folder.glob("events.out.tfevents.*")):
        return False
    try:
        with marker.open("x", encoding="utf-8") as file:
            file.write(run.id)
    except FileExistsError:
        return marker.read_text(encoding="utf-8") == run.id
    return True


def markdown_of(table: Table) -> str:
    """Return a table in Markdown, of at most MAX_ROWS rows."""
    lines = [f"| {' | '.join(table.columns)} |", f"|{'---|' * len(table.columns)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in table.rows[:MAX_ROWS]]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")


def make(keys: TensorboardConfig) -> TensorboardTracker:
    """Make the tracker."""
    return TensorboardTracker(keys)
