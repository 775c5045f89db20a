"""Interface of a tracker, and the values that cross it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MAX_TEXT_CHARACTERS = 20_000
"""Length of a text in a table above which its end is left out."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker knows it."""

    id: str
    """Id there: that of the run, with `-1`, `-2`, … after each return to an older step. Letters, digits and `-`."""
    name: str
    """Name for people."""
    group: str
    """Name of the group of all runs of this run."""
    folder: Path
    """Folder for files of the tracker, below output_dir."""
    config: Mapping[str, Any]
    """The whole configuration, as nested plain values."""
    next_step: int
    """First step that the tracker may not have, as far as is recorded here."""


@dataclass(frozen=True)
class Table:
    """Completions of a step, one per row. Cells are texts, numbers or None."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Entry:
    """All that a tracker gets of a step: sent at once, once."""

    step: int
    """Step; 0: the evaluation before training."""
    time: float
    """Seconds since 1970 at which the step was recorded."""
    values: Mapping[str, float]
    """Finite numbers by name, those of the evaluation of this version included."""
    samples: Table | None = None


class Tracker(Protocol):
    """A tracker with one run. Each method may block or raise: only the process of this tracker waits.

    After an exception the object is closed and a new one made, which opens the same run again.
    """

    goes_back: bool
    """True: `go_back` can take steps out. False: the history is sent to a new run in that case."""

    def open(self, run: TrackedRun) -> int | None:
        """Create the run, or open it again; return the newest step that it has.

        -1: it has none. None: it can't tell; then `next_step` and later steps are sent, and steps that arrived before
        count once.
        """
        ...

    def log(self, entry: Entry) -> None:
        """Send a step. Steps come in ascending order, without a gap."""
        ...

    def flush(self) -> None:
        """Return once all steps sent so far survive the death of this process, as far as the tracker can tell."""
        ...

    def go_back(self, step: int) -> None:
        """Take this step and later ones out, since they are trained again."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary and mark the run as finished."""
        ...

    def close(self) -> None:
        """Let the run go without an end; it will be opened again."""
        ...
