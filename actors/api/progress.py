"""Progress of a run as TRL's and transformers' trainers tell it: state, log history, events for callbacks."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import record_of

TRL_NAMES = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "completion_tokens_mean": "completions/mean_length",
    "completion_tokens_max": "completions/max_length",
    "truncated_fraction": "completions/clipped_ratio",
    "groups_without_variance": "frac_reward_zero_std",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "kl": "kl",
    "turns_mean": "turns",
}
"""TRL's name of a metric by its name in metrics.jsonl. Other metrics keep their names."""


@dataclass
class TrainerState:
    """State of training, with the names of transformers' TrainerState."""

    global_step: int = 0
    """Training steps so far. A step is one generation, which TRL may divide into several updates."""
    max_steps: int = 0
    """Training steps of the whole run."""
    epoch: float = 0.0
    """Passes over the training data so far."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """A dictionary per step and per evaluation, in TRL's names."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


@dataclass
class TrainerControl:
    """Wishes of a callback, with the names of transformers' TrainerControl. Only a stop is followed."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


def step_log(line: Mapping[str, Any], rows_per_step: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl in TRL's names.

    Args:
        line: metrics of a step.
        rows_per_step: share of the data that a step trains on; 0 if the data has no end.
    """
    found: dict[str, Any] = {}
    for name, value in line.items():
        if name.startswith("reward/"):
            found[f"rewards/{name.removeprefix('reward/')}/mean"] = value
        elif name not in ("time", "weights"):
            found[TRL_NAMES.get(name, name)] = value
    return found | {"epoch": line["step"] * rows_per_step}


def evaluation_log(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of evals.jsonl in TRL's names: `eval_` in front, with several environments also their name."""
    environments: Mapping[str, Mapping[str, Any]] = line["environments"]
    found: dict[str, Any] = {"step": line["version"]}
    for label, values in environments.items():
        prefix = "eval_" if len(environments) == 1 else f"eval_{label}_"
        found |= {f"{prefix}{_eval_name(name)}": value for name, value in values.items()}
    return found


def _eval_name(name: str) -> str:
    if name.startswith("reward/"):
        return f"rewards/{name.removeprefix('reward/')}/mean"
    return {"mean_reward": "reward"}.get(name, name)


class Tail:
    """Reader of records that are appended to a .jsonl file, from a position on."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.is_file() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were completed since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            # a run that goes back to a checkpoint cuts the file
            self._offset = min(self._offset, self._path.stat().st_size)
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                record = record_of(line)
                if record is not None:
                    yield record


def summary_of(output: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; empty for a run that has not ended."""
    path = output / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
