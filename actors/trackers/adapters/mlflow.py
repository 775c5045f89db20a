"""MLflow: a server, or a local database.

A run is found by a tag with this project's id of it. MLflow keeps every value that is logged, so each step is asked for
once after a start: names that have the step already are left out.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param, Run
from mlflow.tracking import MlflowClient

from actors.trackers.flat import flat
from actors.trackers.protocol import Entry, TrackedRun
from schemas.config.trackers import MlflowConfig

TAG = "grpo_actors.run"
FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that names of metrics and parameters may not have."""
PARAMS_PER_REQUEST, MAX_PARAM_CHARACTERS = 100, 6000
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
        self._may_be_held = True
        """True until a step is found that the run has no value of."""

    def open(self, run: TrackedRun) -> int | None:
        """Find or create the run, and log the configuration as parameters."""
        uri = self._keys.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder}/mlflow.db"
        is_server = uri.startswith(("http://", "https://", "databricks"))
        # without its other extras the package has no registry of models for databases; it is not used
        client = self._client = MlflowClient(uri, registry_uri=uri if is_server else "http://127.0.0.1:9")
        experiment = self._experiment(client, None if is_server else (run.folder / "artifacts").as_uri())
        found = client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        tags = {TAG: run.id, "group": run.group}
        known: Run = found[0] if found else client.create_run(experiment, run_name=run.name, tags=tags)
        self._run = known.info.run_id
        client.update_run(self._run, status="RUNNING")
        missing = {_name(key): str(value) for key, value in flat(run.config).items()}
        missing = {key: value[:MAX_PARAM_CHARACTERS] for key, value in missing.items() if key not in known.data.params}
        params = [Param(key, value) for key, value in missing.items()]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            client.log_batch(self._run, params=params[start : start + PARAMS_PER_REQUEST])
        return None

    def log(self, entry: Entry) -> None:
        """Log the values; the samples are an artifact that `mlflow.load_table` reads."""
        assert self._client is not None
        values = {_name(name): value for name, value in entry.values.items()}
        if self._may_be_held:
            held = self._held(entry.step, values)
            values = {name: value for name, value in values.items() if name not in held}
            self._may_be_held = bool(held)
        at = int(entry.time * 1000)
        self._client.log_batch(self._run, [Metric(name, value, at, entry.step) for name, value in values.items()])
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

    def _held(self, step: int, names: Mapping[str, float]) -> set[str]:
        """Return the names that have a value of this step."""
        assert self._client is not None
        return {
            name
            for name in names
            if any(metric.step == step for metric in self._client.get_metric_history(self._run, name))
        }


def _name(name: str) -> str:
    return FORBIDDEN.sub("_", name)


def make(keys: MlflowConfig) -> MlflowTracker:
    """Make the tracker."""
    return MlflowTracker(keys)
