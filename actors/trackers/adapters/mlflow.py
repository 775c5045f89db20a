"""MLflow: a server, or a local database.

A run is found by a tag with this project's id of it. MLflow keeps every value that is logged, so after a start the run
is asked for the newest step of each name: names that have a step already are left out.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from actors.trackers.flat import flat
from actors.trackers.protocol import Entry, TrackedRun
from schemas.config.trackers import MlflowConfig

TAG = "grpo_actors.run"
FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that names of metrics and parameters may not have."""
METRICS_PER_REQUEST, PARAMS_PER_REQUEST, MAX_PARAM_CHARACTERS = 1000, 100, 6000
"""Limits of MLflow."""


class MlflowTracker:
    """Tracker that logs to MLflow.

    Args:
        keys: keys of the tracker.
    """

    goes_back = False

    def __init__(self, keys: MlflowConfig) -> None:
        self._keys = keys
        self._client: MlflowClient | None = None
        self._run = ""
        self._held: Mapping[str, int] = {}
        """Newest step that the run had when it was opened, by name of the metric."""

    def open(self, run: TrackedRun) -> int | None:
        """Find or create the run, and log the configuration as parameters."""
        uri = self._keys.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder}/mlflow.db"
        is_server = uri.startswith(("http://", "https://", "databricks"))
        # without its other extras the package has no registry of models for databases; it is not used
        client = self._client = MlflowClient(uri, registry_uri=uri if is_server else "http://127.0.0.1:9")
        experiment = self._experiment(client, None if is_server else artifacts_of(uri, run.folder).as_uri())
        found = client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        tags = {TAG: run.id, "group": run.group}
        self._run = (found[0] if found else client.create_run(experiment, run_name=run.name, tags=tags)).info.run_id
        known = client.get_run(self._run)
        self._held = {metric.key: metric.step for metric in known.data.to_proto().metrics}
        client.update_run(self._run, status="RUNNING")
        missing = {_name(key): str(value) for key, value in flat(run.config).items()}
        missing = {key: value[:MAX_PARAM_CHARACTERS] for key, value in missing.items() if key not in known.data.params}
        params = [Param(key, value) for key, value in missing.items()]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            client.log_batch(self._run, params=params[start : start + PARAMS_PER_REQUEST])
        # a run that is new here, as after a change of server or experiment, has nothing
        return None if found else -1

    def log(self, entry: Entry) -> None:
        """Log the values; the samples are an artifact that `mlflow.load_table` reads."""
        assert self._client is not None
        values = {_name(name): value for name, value in entry.values.items()}
        at = int(entry.time * 1000)
        metrics = [
            Metric(name, value, at, entry.step)
            for name, value in values.items()
            if self._held.get(name, -1) < entry.step
        ]
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            self._client.log_batch(self._run, metrics[start : start + METRICS_PER_REQUEST])
        if entry.samples is not None:
            table = {"columns": entry.samples.columns, "data": entry.samples.rows}
            self._client.log_dict(self._run, table, f"completions/step_{entry.step:08}.json")

    def flush(self) -> None:
        """Nothing waits: each request has been answered."""

    def go_back(self, step: int) -> None:
        """MLflow keeps each value."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the summary as an artifact and tag, and end the run."""
        assert self._client is not None
        self._client.log_dict(self._run, dict(summary), "summary.json")
        for name, value in flat(summary).items():
            self._client.set_tag(self._run, f"summary.{_name(name)}", value)
        self._client.set_terminated(self._run, "FINISHED")

    def close(self) -> None:
        """Nothing is open between two requests."""

    def _experiment(self, client: MlflowClient, artifacts: str | None) -> str:
        name = self._keys.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "grpo-actors"
        found = client.get_experiment_by_name(name)
        return str(found.experiment_id if found else client.create_experiment(name, artifacts))


def artifacts_of(uri: str, folder: Path) -> Path:
    """Return the folder for the artifacts of a local database: next to its file, since several runs may share it.

    Args:
        uri: `sqlite:///FILE`, or another database, which has no folder.
        folder: folder of this run.
    """
    scheme, _, path = uri.partition(":///")
    return Path(path).absolute().parent / "artifacts" if scheme == "sqlite" and path else folder / "artifacts"


def _name(name: str) -> str:
    return FORBIDDEN.sub("_", name)


def make(keys: MlflowConfig) -> MlflowTracker:
    """Make the tracker."""
    return MlflowTracker(keys)
