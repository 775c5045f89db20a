"""Progress of a run as TRL's and transformers' trainers tell it: state, log history, events for callbacks."""

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
    """Optimizer updates so far, as in TRL. A step here is one generation, which may have several."""
    max_steps: int = 0
    """Optimizer updates of the whole run."""
    epoch: float = 0.0
    """Passes over the training data so far."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """A dictionary per step and per evaluation, in TRL's names."""
    best_metric: float | None = None
    """Best value of `metric_for_best_model` so far; None: no evaluation has it."""
    best_global_step: int | None = None
    """Optimizer updates before the best evaluation."""
    best_model_checkpoint: str | None = None
    """Folder of the checkpoint that was best; None if there was none of this step."""
    num_train_epochs: int = 0
    """Passes over the training data of the whole run, rounded up."""
    logging_steps: int = 1
    eval_steps: int = 0
    """Optimizer updates between two evaluations; 0: only at start and end."""
    save_steps: int = 0
    """Optimizer updates between two checkpoints."""
    total_flos: float = 0.0
    """Not counted."""
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


def step_log(line: Mapping[str, Any], epochs_per_step: float, updates: int) -> dict[str, Any]:
    """Return a line of metrics.jsonl in TRL's names.

    Args:
        line: metrics of a step.
        epochs_per_step: share of the data that a step trains on.
        updates: optimizer updates of a step.
    """
    found: dict[str, Any] = {}
    for name, value in line.items():
        if name.startswith("reward/"):
            found[f"rewards/{name.removeprefix('reward/')}/mean"] = value
        elif name not in ("time", "weights", "step"):
            found[TRL_NAMES.get(name, name)] = value
    return found | {"epoch": line["step"] * epochs_per_step, "step": line["step"] * updates}


def evaluation_log(line: Mapping[str, Any], label: str, prefix: str = "eval") -> dict[str, Any]:
    """Return the result of an environment in a line of evals.jsonl in TRL's names; empty if it has none.

    Args:
        line: an evaluation.
        label: name of the environment.
        prefix: start of the names.
    """
    values: Mapping[str, Any] = line["environments"].get(label, {})
    return {f"{prefix}_{_eval_name(name)}": value for name, value in values.items()}


def _eval_name(name: str) -> str:
    if name.startswith("reward/"):
        return f"rewards/{name.removeprefix('reward/')}/mean"
    return {"mean_reward": "reward", "std_reward": "reward_std"}.get(name, name)


class Tail:
    """Reader of records that are appended to a .jsonl file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""
        """Last line that was read, by which a file that was cut and has grown again is known."""

    def was_cut(self) -> bool:
        """Return whether lines that were read are gone, or have been replaced."""
        if not self._offset:
            return False
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                return file.read(len(self._last)) != self._last
        except FileNotFoundError:
            return True

    def restart(self) -> None:
        """Read from the first line on at the next call of `new`."""
        self._offset, self._last = 0, b""

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were completed since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset, self._last = self._offset + len(line), line
                record = record_of(line)
                if record is not None:
                    yield record
