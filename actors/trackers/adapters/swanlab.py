"""SwanLab: online, or as files for `swanlab sync`.

SwanLab keeps one value per name and step. Online it refuses a value that the server has, so after a start all steps are
sent again and only missing ones arrive. Offline the files are read, since the package writes them in blocks: the newest
step may be there in part.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
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
        self._newest = entry.step

    def flush(self) -> None:
        """SwanLab has no flush; what is lost with this process is found missing at the next start."""

    def go_back(self, step: int) -> None:
        """SwanLab keeps each value."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary as a text at the last step, and mark the run as finished."""
        if self._newest not in self._held.get("summary", ()):
            self._run.log({"summary": swanlab.Text(json.dumps(summary, indent=1))}, step=self._newest)
        self._run.finish()

    def close(self) -> None:
        """Write what waits. The run counts as finished until it is opened again."""
        self._run.finish()


def offline_steps(folder: Path, run: str) -> dict[str, set[int]]:
    """Return the steps in the offline files of a run, by name of the value."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in sorted(folder.glob(f"run-*-{run}/run-{run}.swanlab")):
        for data in records_of(path, HEADER):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind in ("scalar", "media"):
                value = getattr(record, kind)
                found[value.key].add(int(value.step))
    return found


def newest_whole_step(held: Mapping[str, set[int]]) -> int:
    """Return the newest step that is there for certain; -1 for none.

    Texts are written after the numbers of several steps, and the newest step may lack names.
    """
    scalars = [max(steps) for name, steps in held.items() if name not in (SAMPLES, "summary")]
    newest = max(scalars, default=0) - 1
    return min(newest, max(held[SAMPLES])) if held.get(SAMPLES) else newest


def make(keys: SwanlabConfig) -> SwanlabTracker:
    """Make the tracker."""
    return SwanlabTracker(keys)
