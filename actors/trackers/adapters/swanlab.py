"""SwanLab: online, or as files for `swanlab sync`.

SwanLab keeps one value per name and step. Online it refuses a value that the server has, so after a start all steps are
sent again and only missing ones arrive. Offline the files are read, since the package writes them in blocks: the newest
step may be there in part. Of values that it can't write, as on a full disk, the package only tells its own log, so the
values of an offline file are counted at its end.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import swanlab
from swanlab.proto.swanlab.record.v1.record_pb2 import Record

from actors.trackers.flat import flat
from actors.trackers.log_format import records_of
from actors.trackers.protocol import Entry, TrackedRun
from schemas.config.trackers import SwanlabConfig

HEADER = b":SWL"
SAMPLES = "completions"


class SwanlabTracker:
    """Tracker that logs to SwanLab.

    Args:
        keys: keys of the tracker.
    """

    goes_back = False

    def __init__(self, keys: SwanlabConfig) -> None:
        self._keys = keys
        self._run: Any = None
        self._held: Mapping[str, set[int]] = {}
        self._newest = 0
        self._file: Path | None = None
        """File of the values; None: they are sent online."""
        self._sent = 0
        """Number of values given to the package since the run was opened."""

    def open(self, run: TrackedRun) -> int | None:
        """Create or resume the run of this id."""
        mode = self._keys.mode or os.environ.get("SWANLAB_MODE") or "online"
        self._held = offline_steps(run.folder, run.id) if mode == "offline" else {}
        self._run = swanlab.init(
            project=self._keys.project or os.environ.get("SWANLAB_PROJECT") or "grpo-actors",
            workspace=self._keys.workspace or None,
            name=run.name,
            group=run.group,
            id=run.id,
            resume="allow",
            mode=mode,
            log_dir=str(run.folder),
            config=flat(run.config),
            settings=swanlab.Settings(
                probe={"hardware": False, "monitor": False, "requirements": False, "conda": False, "git": False},
                console={"proxy_type": "none"},
            ),
        )
        self._sent, self._file = 0, self._run.dir / file_name(run.id) if mode == "offline" else None
        return newest_whole_step(self._held)

    def log(self, entry: Entry) -> None:
        """Send the values, and the samples as a text per completion."""
        row: dict[str, Any] = dict(entry.values)
        if entry.samples is not None:
            texts = [dict(zip(entry.samples.columns, cells, strict=True)) for cells in entry.samples.rows]
            row[SAMPLES] = [swanlab.Text(json.dumps(text, ensure_ascii=False, indent=1)) for text in texts]
        row = {name: value for name, value in row.items() if entry.step not in self._held.get(name, ())}
        if row:
            self._run.log(row, step=entry.step)
        self._sent += len(row)
        self._newest = entry.step

    def flush(self) -> None:
        """SwanLab has no flush; what is lost is found missing at the end, or at the next start."""

    def go_back(self, step: int) -> None:
        """SwanLab keeps each value."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary as a text at the last step, and mark the run as finished.

        Raises:
            OSError: values are missing in the offline file; they are sent again once the run is open again.
        """
        if self._newest not in self._held.get("summary", ()):
            self._run.log({"summary": swanlab.Text(json.dumps(summary, indent=1))}, step=self._newest)
            self._sent += 1
        self._run.finish()
        if self._file is not None:
            written = sum(1 for _ in values_of(self._file))
            if written < self._sent:
                raise OSError(f"{self._file} has {written} of {self._sent} values; is its disk full?")

    def close(self) -> None:
        """Write what waits. The run counts as finished until it is opened again."""
        self._run.finish()


def offline_steps(folder: Path, run: str) -> dict[str, set[int]]:
    """Return the steps in the offline files of a run, by name of the value."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in sorted(folder.glob(f"run-*/{file_name(run)}")):
        for value in values_of(path):
            found[value.key].add(int(value.step))
    return found


def file_name(run: str) -> str:
    """Return the name of the offline files of a run, in which the package writes `_` for `-`."""
    return f"run-{run.replace('-', '_')}.swanlab"


def values_of(path: Path) -> Iterator[Any]:
    """Yield the messages of the values in an offline file, each with its `key` and `step`."""
    for data in records_of(path, HEADER):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind in ("scalar", "media"):
            yield getattr(record, kind)


def newest_whole_step(held: Mapping[str, set[int]]) -> int:
    """Return the newest step that is there for certain, with all steps before; -1 for none.

    Texts are written after the numbers of several steps, and may be lost alone; the newest step may lack names.
    """
    steps = sorted(set().union(*(held[name] for name in held if name not in (SAMPLES, "summary"))))
    samples = held.get(SAMPLES, set())
    without = next((step for step in steps if samples and step and step not in samples), math.inf)
    return int(min(without, steps[-1] if steps else 0)) - 1


def make(keys: SwanlabConfig) -> SwanlabTracker:
    """Make the tracker."""
    return SwanlabTracker(keys)
