"""Trackio: rows in a local database, or in a Space of the hub.

A step is one row. Trackio writes rows in the background and drops what it can't write, so a step counts as held only
once it is found in the database.
"""

import time
from collections.abc import Mapping
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
        self._newest = -1
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
        # the next step that Trackio would count: of the database, or as the server tells
        self._newest = self._run._next_step - 1
        return int(self._newest)

    def log(self, entry: Entry) -> None:
        """Send the step as one row."""
        row: dict[str, Any] = dict(entry.values)
        if entry.samples is not None:
            row["completions"] = trackio.Table(
                columns=list(entry.samples.columns), data=[list(cells) for cells in entry.samples.rows]
            )
        self._run.log(row, step=entry.step)
        self._newest = entry.step

    def flush(self) -> None:
        """Wait until the newest row is in the local database; a Space is left to Trackio's own buffer.

        Raises:
            TimeoutError: the row has not arrived within FLUSH_SECONDS.
        """
        if not self._is_local:
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._held() < self._newest:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._newest} is not in Trackio's database after {FLUSH_SECONDS:g} s")
            time.sleep(0.1)

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

    def _held(self) -> int:
        newest = SQLiteStorage.get_max_step_for_run(self._project, self._run.name, run_id=self._run.id)
        return -1 if newest is None else int(newest)


def make(keys: TrackioConfig) -> TrackioTracker:
    """Make the tracker."""
    return TrackioTracker(keys)
