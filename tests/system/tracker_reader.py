"""Reads the runs of a tracker back with its own reader: `python tracker_reader.py KIND FOLDER`, for tests.

Prints JSON: by name of the run a list of [name of the metric, step, value], with each value that the reader shows.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Point = tuple[str, int, float]


def tensorboard(folder: Path) -> Iterator[tuple[str, Point]]:
    """What the program's accumulator of events has; the older one, which libraries read scalars by, has the same."""
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
    from tensorboard.util.tensor_util import make_ndarray

    shown = plugin_event_accumulator.EventAccumulator(str(folder), tensor_size_guidance={"scalars": 0, "text": 0})
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = set(shown.Reload().Tags()["tensors"])
    for tag in events.Tags()["scalars"]:
        scalars = [(tag, event.step, event.value) for event in events.Scalars(tag)]
        assert scalars == [(tag, event.step, make_ndarray(event.tensor_proto).item()) for event in shown.Tensors(tag)]
        yield from (("all", scalar) for scalar in scalars)
    assert {"config/text_summary", "summary/text_summary"} <= tags
    for event in shown.Tensors("completions/text_summary"):
        yield "all", ("completions", event.step, event.tensor_proto.string_val[0].decode().count("\n") - 1)


def trackio(folder: Path) -> Iterator[tuple[str, Point]]:
    """What Trackio's API and storage have."""
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    for run in Api().runs("grpo-actors"):
        for row in SQLiteStorage.get_logs("grpo-actors", run.name, run_id=run.id):
            yield from ((run.name, point) for point in _points(row.pop("step"), row))


def _points(step: int, row: dict[str, Any]) -> Iterator[Point]:
    for name, value in row.items():
        if isinstance(value, int | float):
            yield name, step, value
        elif name == "completions":
            yield name, step, len(value["_value"])


def mlflow(folder: Path) -> Iterator[tuple[str, Point]]:
    """What MLflow's client has."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db", registry_uri="http://127.0.0.1:9")
    for run in client.search_runs([one.experiment_id for one in client.search_experiments()]):
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                yield run.info.run_name, (name, metric.step, metric.value)
        for table in client.list_artifacts(run.info.run_id, "completions"):
            step = int(table.path.rpartition("_")[2].removesuffix(".json"))
            rows = json.loads((folder / "artifacts" / run.info.run_id / "artifacts" / table.path).read_text())["data"]
            yield run.info.run_name, ("completions", step, len(rows))


def wandb(folder: Path) -> Iterator[tuple[str, Point]]:
    """What W&B's files for `wandb sync` have, by their own messages."""
    from actors.trackers.adapters.wandb import OfflineFiles

    for run in {path.stem.removeprefix("run-") for path in folder.glob("wandb/offline-run-*/run-*.wandb")}:
        for row in OfflineFiles(folder, run).new():
            values = {name: json.loads(value) for name, value in row.items()}
            for name, value in values.items():
                if name == "completions/nrows":
                    yield run, ("completions", values["_step"], value)
                elif isinstance(value, int | float) and not name.startswith(("_", "completions/")):
                    yield run, (name, values["_step"], value)


def swanlab(folder: Path) -> Iterator[tuple[str, Point]]:
    """What SwanLab's own reader finds in its files."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for path in sorted(folder.glob("run-*/run-*.swanlab")):
        if not path.stat().st_size:
            continue  # nothing was written before the process was killed
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = Record.FromString(data)
            run = path.stem.removeprefix("run-")
            if record.HasField("scalar"):
                yield run, (record.scalar.key, record.scalar.step, record.scalar.value.number)
            elif record.HasField("media") and record.media.key == "completions":
                yield run, ("completions", record.media.step, len(record.media.value.items))


if __name__ == "__main__":
    found: dict[str, list[Point]] = {}
    for name, point in globals()[sys.argv[1]](Path(sys.argv[2])):
        found.setdefault(name, []).append(point)
    print(json.dumps(found))
