"""`actors trace RUN --step A..B [--out FILE]`: write the timeline of some steps, and say where their time went."""

import json
from pathlib import Path

from actors.ops.trace.picture import trace_events
from actors.ops.trace.window import index_of, steps_of
from actors.ops.trace.words import words
from actors.telemetry.spans import FOLDER
from schemas.errors import ConfigError


def trace(output: Path, first: int, last: int, out: Path | None) -> str:
    """Write the trace file of some steps, of a run that is running or not; return the words about them.

    Args:
        output: output_dir of the run.
        first, last: the steps.
        out: the file; None: `trace-FIRST-LAST.json` in the current folder.

    Raises:
        ConfigError: the run has no timeline of these steps, or the file can't be written.
    """
    folder = output / FOLDER
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: there is no such folder; is {output} a run's output_dir, and was it run with "
            "telemetry.events_bytes above 0?"
        )
    recorded, window = steps_of(index_of(output), first, last)
    path = out or Path(f"trace-{first}-{last}.json")
    try:
        path.write_text(json.dumps(trace_events(recorded, window), allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {path} can't be written: {error.strerror}") from error
    return f"{words(recorded, window)}\n\nwrote {path}: open it with https://ui.perfetto.dev or chrome://tracing"
