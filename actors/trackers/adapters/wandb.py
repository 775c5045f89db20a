"""Weights & Biases: online, or as files for `wandb sync`.

A step is one row. Rows wait in a process of the package; after a crash the newest row that has arrived is known from
the server, or from the offline files, and the next step follows it.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from actors.trackers.flat import flat
from actors.trackers.log_format import LogReader
from actors.trackers.protocol import Entry, TrackedRun
from schemas.config.trackers import WandbConfig

FLUSH_INTERVAL_SECONDS = 1.0
"""Interval at which the package writes its file."""
FLUSH_SECONDS = 30.0
"""Longest wait for a row to arrive in an offline file."""
HEADER = b":W&B"


class WandbTracker:
    """Tracker that logs to Weights & Biases.

    Args:
        keys: keys of the tracker.
    """

    goes_back = False

    def __init__(self, keys: WandbConfig) -> None:
        self._keys = keys
        self._run: Any = None
        self._newest = -1
        self._is_offline = False
        self._files = OfflineFiles(Path(), "")

    def open(self, run: TrackedRun) -> int | None:
        """Create or resume the run of this id."""
        mode = self._keys.mode or os.environ.get("WANDB_MODE") or "online"
        self._is_offline = mode == "offline"
        self._files = OfflineFiles(run.folder, run.id)
        held = self._files.newest() if self._is_offline else None
        self._run = wandb.init(
            project=self._keys.project or os.environ.get("WANDB_PROJECT") or "grpo-actors",
            entity=self._keys.entity or None,
            name=run.name,
            group=run.group,
            tags=self._keys.tags,
            id=run.id,
            resume="allow",
            mode=mode,
            dir=run.folder,
            config=dict(run.config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=FLUSH_INTERVAL_SECONDS,
            ),
        )
        # of a resumed run the server tells the step after its newest one; a new run has 0
        self._newest = int(self._run.starting_step) - 1 if held is None else held
        return self._newest

    def log(self, entry: Entry) -> None:
        """Send the step as one row."""
        row: dict[str, Any] = dict(entry.values)
        if entry.samples is not None:
            row["completions"] = wandb.Table(
                columns=list(entry.samples.columns), data=[list(cells) for cells in entry.samples.rows]
            )
        self._run.log(row, step=entry.step, commit=True)
        self._newest = entry.step

    def flush(self) -> None:
        """Wait until an offline file has the newest row. Online the package delivers in the background.

        Raises:
            TimeoutError: the row has not arrived within FLUSH_SECONDS.
        """
        if not self._is_offline:
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._files.newest() < self._newest:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._newest} is in no file of wandb after {FLUSH_SECONDS:g} s")
            time.sleep(0.25)

    def go_back(self, step: int) -> None:
        """Rows are kept: a public way to take them out does not exist."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary below `summary/`, and mark the run as finished."""
        self._run.summary.update({f"summary/{name}": value for name, value in flat(summary).items()})
        self._run.finish()

    def close(self) -> None:
        """Write what waits. The run counts as finished until it is opened again."""
        self._run.finish()


class OfflineFiles:
    """Reader of the rows in the offline files of a run, each row once: the files of a long run are large.

    Args:
        folder: folder of the tracker.
        run: id of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._readers: dict[Path, LogReader] = {}
        self._newest = -1

    def newest(self) -> int:
        """Return the newest step of all rows so far; -1 without any."""
        for row in self.new():
            self._newest = max(self._newest, int(row["_step"]))
        return self._newest

    def new(self) -> Iterator[dict[str, str]]:
        """Yield the rows that are new since the last call, as JSON texts by name."""
        for path in sorted(self._folder.glob(f"wandb/offline-run-*/run-{self._run}.wandb")):
            for data in self._readers.setdefault(path, LogReader(path, HEADER)).new():
                record = Record.FromString(data)
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    yield {item.key or "/".join(item.nested_key): item.value_json for item in items}


def make(keys: WandbConfig) -> WandbTracker:
    """Make the tracker."""
    return WandbTracker(keys)
