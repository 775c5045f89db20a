"""Trackio: rows in a local database, or in a Space of the hub.

A step is one row. Trackio writes rows in the background, some at a time, and drops those that it can't write, so a step
counts as held only once it and all earlier ones are found in the database.
"""

import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from actors.trackers.flat import flat
from actors.trackers.protocol import Entry, TrackedRun
from schemas.config.trackers import TrackioConfig

FLUSH_SECONDS = 30.0
"""Longest wait for rows to arrive in the local database."""


class TrackioTracker:
    """Tracker that writes to Trackio.

    Args:
        keys: keys of the tracker.
    """

    goes_back = False

    def __init__(self, keys: TrackioConfig) -> None:
        self._keys, self._project = keys, keys.project or "grpo-actors"
        self._run: Any = None
        self._held: set[int] = set()
        """Steps that the database had when the run was opened, which need not be sent."""
        self._sent: set[int] = set()
        """Steps sent since the last flush."""
        self._is_local = True

    def open(self, run: TrackedRun) -> int | None:
        """Create or resume the run. Trackio finds runs by name, so the name has the start of the run's id."""
        first, *generation = run.id.split("-")
        self._run = trackio.init(
            project=self._project,
            name="-".join([run.name, first[:8], *generation]),
            group=run.group,
            space_id=self._keys.space_id or None,
            config=flat(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._is_local = self._run._is_local
        if not self._is_local:
            return int(self._run._next_step) - 1  # the next step that Trackio would count, as the server tells
        self._held = self._found(0)
        return newest_without_gap(self._held)

    def log(self, entry: Entry) -> None:
        """Send the step as one row, unless it is held: behind a lost step others may have arrived."""
        if entry.step in self._held:
            return
        row: dict[str, Any] = dict(entry.values)
        if entry.samples is not None:
            row["completions"] = trackio.Table(
                columns=list(entry.samples.columns), data=[list(cells) for cells in entry.samples.rows]
            )
        self._run.log(row, step=entry.step)
        self._sent.add(entry.step)

    def flush(self) -> None:
        """Wait until all rows are in the local database; a Space is left to Trackio's own buffer.

        Raises:
            TimeoutError: a row has not arrived within FLUSH_SECONDS.
        """
        if not (self._is_local and self._sent):
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        while missing := self._sent - self._found(min(self._sent)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {min(missing)} is not in Trackio's database after {FLUSH_SECONDS:g} s")
            time.sleep(0.1)
        self._sent.clear()

    def go_back(self, step: int) -> None:
        """Trackio keeps each row."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the run. Trackio has no place for a summary."""
        self._run.finish()
        self.flush()

    def close(self) -> None:
        """Write what waits."""
        self._run.finish()

    def _found(self, first: int) -> set[int]:
        """Return the steps in the database from this one on."""
        return steps_of(SQLiteStorage.get_project_db_path(self._project), self._run.id, first)


def steps_of(database: Path, run: str, first: int) -> set[int]:
    """Return the steps of a run (by its id) from one on, without the rows, which Trackio's own readers return."""
    if not database.exists():
        return set()
    with closing(sqlite3.connect(database, timeout=FLUSH_SECONDS)) as connection:
        query = "SELECT step FROM metrics WHERE run_id = ? AND step >= ?"
        try:
            return {int(step) for (step,) in connection.execute(query, (run, first))}
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # no row has been written yet
                return set()
            raise


def newest_without_gap(steps: set[int]) -> int:
    """Return the newest step before the first one that is missing; -1 for none. Step 0 is there if it was evaluated."""
    newest = 0 if {0, 1} & steps else -1
    while newest + 1 in steps:
        newest += 1
    return newest


def make(keys: TrackioConfig) -> TrackioTracker:
    """Make the tracker."""
    return TrackioTracker(keys)
