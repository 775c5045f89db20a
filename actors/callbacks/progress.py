"""Progress of a run as TRL's and transformers' trainers tell it: state, log history, events for callbacks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.telemetry.names import renamed, trl_eval_name


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
    values = {name: value for name, value in line.items() if name not in ("time", "weights", "step")}
    return renamed(values, "trl") | {"epoch": line["step"] * epochs_per_step, "step": line["step"] * updates}


def evaluation_log(line: Mapping[str, Any], label: str, prefix: str = "eval") -> dict[str, Any]:
    """Return the result of an environment in a line of evals.jsonl in TRL's names; empty if it has none.

    Args:
        line: an evaluation.
        label: name of the environment.
        prefix: start of the names.
    """
    values: Mapping[str, Any] = line["environments"].get(label, {})
    return {f"{prefix}_{trl_eval_name(name)}": value for name, value in values.items()}
