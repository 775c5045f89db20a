"""Faults of trackers' packages, each in a process of its own: `python tracker_faults.py FAULT FOLDER`, for tests.

Prints what the tracker has afterwards, as JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from actors.trackers.protocol import Entry, TrackedRun
from schemas.config.trackers import MlflowConfig, SwanlabConfig, TensorboardConfig, TrackioConfig, WandbConfig


def tracked(folder: Path, next_step: int = 0, run: str = "abc") -> TrackedRun:
    """A run whose tracker surely has the steps before `next_step`."""
    folder.mkdir(parents=True, exist_ok=True)
    return TrackedRun(run, "mine", "group", folder, {"key": 1}, next_step)


def entry(step: int, number: int = 1) -> Entry:
    """A step with so many values."""
    return Entry(step, 1000.0 + step, {f"metric_{index}": step + index / 7 for index in range(number)})


def mlflow(folder: Path) -> Any:
    """A step without values among steps that are sent twice, more values than fit a request, another experiment."""
    from mlflow.tracking import MlflowClient

    from actors.trackers.adapters.mlflow import make

    uri = f"sqlite:///{folder}/shared.db"
    steps = [Entry(0, 1.0, {}), entry(1), entry(2, 1500), entry(3)]
    told = []
    for names in ("first", "first", "second"):
        tracker = make(MlflowConfig(tracking_uri=uri, experiment=names))
        told.append(tracker.open(tracked(folder / "run/trackers/mlflow")))
        for one in steps:
            tracker.log(one)
    client = MlflowClient(uri, registry_uri="http://127.0.0.1:9")
    experiments = [client.get_experiment_by_name(name) for name in ("first", "second")]
    runs = client.search_runs([one.experiment_id for one in experiments])
    histories = {
        name: [[point.step for point in client.get_metric_history(run.info.run_id, name)] for run in runs]
        for name in ("metric_0", "metric_1499")
    }
    return {"told": told, "artifacts": experiments[0].artifact_location} | histories


def tensorboard(folder: Path) -> Any:
    """A folder of another tracker of this run, whose journal says that steps 0 to 4 have been sent."""
    from actors.trackers.adapters.tensorboard import make

    tracker = make(TensorboardConfig(logging_dir=str(folder / "logs")))
    told = [tracker.open(tracked(folder / "trackers", 5))]
    tracker.log(entry(0))
    tracker.close()
    return [*told, tracker.open(tracked(folder / "trackers", 5))]


def tensorboard_shared(folder: Path) -> Any:
    """Two runs of one name with one `logging_dir`, the first of which is opened again."""
    from actors.trackers.adapters.tensorboard import make

    found = []
    for run, next_step in (("a" * 16, 0), ("b" * 16, 0), ("a" * 16, 2)):
        tracker = make(TensorboardConfig(logging_dir=str(folder / "logs")))
        tracker.open(tracked(folder / "trackers", next_step, run))
        tracker.log(entry(next_step))
        tracker.close()
        found.append(tracker._folder.name)
    return found


def trackio(folder: Path) -> Any:
    """A batch of rows that Trackio can't write and drops, and a later one that arrives."""
    from trackio.sqlite_storage import SQLiteStorage

    from actors.trackers.adapters import trackio as adapter

    adapter.FLUSH_SECONDS = 3.0
    write, lost = SQLiteStorage.bulk_log, []

    def losing(*given: Any, **keys: Any) -> Any:
        if 2 in keys["steps"] and not lost:
            lost.append(2)
            raise OSError("no space left on device")
        return write(*given, **keys)

    SQLiteStorage.bulk_log = staticmethod(losing)
    tracker = adapter.make(TrackioConfig())
    told, errors = [tracker.open(tracked(folder))], []
    tracker.log(entry(1))
    tracker.flush()
    tracker.log(entry(2))
    deadline = time.monotonic() + 60.0
    while not lost and time.monotonic() < deadline:  # batches are written in the background
        time.sleep(0.05)
    tracker.log(entry(3))
    tracker.log(entry(4))
    try:
        tracker.flush()
    except TimeoutError as error:
        errors.append(str(error))
    tracker.close()
    tracker = adapter.make(TrackioConfig())
    told.append(tracker.open(tracked(folder)))
    for step in range(told[-1] + 1, 6):
        tracker.log(entry(step))
    tracker.flush()
    rows = SQLiteStorage.get_logs("grpo-actors", tracker._run.name, run_id=tracker._run.id)
    tracker.close()
    return {"told": told, "errors": errors, "steps": sorted(row["step"] for row in rows)}


def wandb(folder: Path) -> Any:
    """Seconds of twenty looks for the newest row, of which the very first one reads all rows; then of twenty more."""
    from actors.trackers.adapters.wandb import OfflineFiles, make

    tracker = make(WandbConfig(mode="offline"))
    tracker.open(tracked(folder))
    for step in range(1, 301):
        tracker.log(entry(step, 60))
    tracker.flush()
    tracker.close()
    files, seconds = OfflineFiles(folder, "abc"), []
    for _ in range(2):
        began = time.process_time()
        newest = [files.newest() for _ in range(20)]
        seconds.append(time.process_time() - began)
    return {"newest": newest[-1], "seconds": seconds}


def swanlab(folder: Path) -> Any:
    """A run that follows a return to an older step, opened again before its end."""
    from actors.trackers.adapters.swanlab import make, offline_steps

    told = []
    for last in (3, 5):
        tracker = make(SwanlabConfig(mode="offline"))
        told.append(tracker.open(tracked(folder, run="abc-1")))
        for step in range(max(0, told[-1]) + 1, last + 1):
            tracker.log(entry(step, 2))
        tracker.close() if last == 3 else tracker.finish({})
    return {"told": told, "steps": [sorted(steps) for _, steps in sorted(offline_steps(folder, "abc-1").items())]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
