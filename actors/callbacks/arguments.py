"""Arguments of training for callbacks, with the names of transformers' TrainingArguments."""

import math
from dataclasses import dataclass, field
from typing import Any

from actors.algorithms.run_length import checkpoint_interval
from actors.callbacks.events import Best
from actors.callbacks.progress import TrainerState
from schemas.config import RunConfig


@dataclass(frozen=True)
class CallbackArguments:
    """Arguments of training, as far as run.yaml has them. Steps are optimizer updates, as in `TrainerState`."""

    output_dir: str
    run_name: str
    seed: int
    max_steps: int
    num_train_epochs: float
    learning_rate: float
    eval_strategy: str
    """`steps` if anything is evaluated, else `no`."""
    eval_steps: int
    save_steps: int
    metric_for_best_model: str
    greater_is_better: bool
    config: RunConfig = field(repr=False)
    """Whole configuration of the run."""
    save_strategy: str = "steps"
    logging_strategy: str = "steps"
    logging_steps: int = 1
    logging_first_step: bool = True
    load_best_model_at_end: bool = False
    """False: the last checkpoint is the result."""
    report_to: tuple[str, ...] = ()
    disable_tqdm: bool = True
    local_rank: int = 0
    process_index: int = 0

    @classmethod
    def of(cls, config: RunConfig, num_rows: int | None) -> "CallbackArguments":
        """Return the arguments of a run.

        Args:
            config: configuration of the run; the number of steps must be known.
            num_rows: examples of the training data; None: unknown, or without end.
        """
        updates = updates_of(config)
        return cls(
            output_dir=str(config.output),
            run_name=config.name,
            seed=config.seed,
            max_steps=config.trainer.max_steps * updates,
            num_train_epochs=config.trainer.max_steps * epochs_per_step(config, num_rows),
            learning_rate=config.trainer.learning_rate,
            eval_strategy="steps" if config.evaluations else "no",
            eval_steps=config.eval.every_steps * updates,
            save_steps=checkpoint_interval(config.trainer) * updates,
            metric_for_best_model=config.eval.metric_for_best_model,
            greater_is_better=config.eval.greater_is_better,
            config=config,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name, without the whole configuration."""
        return {name: value for name, value in vars(self).items() if name != "config"}

    def state(self) -> TrainerState:
        """Return the state before the first step."""
        return TrainerState(
            max_steps=self.max_steps,
            num_train_epochs=math.ceil(self.num_train_epochs),
            eval_steps=self.eval_steps,
            save_steps=self.save_steps,
        )

    @property
    def best(self) -> Best:
        """Rule for the best evaluation."""
        return Best(self.metric_for_best_model, self.greater_is_better)


def updates_of(config: RunConfig) -> int:
    """Return the optimizer updates of a step."""
    return config.trainer.num_minibatches * config.trainer.num_iterations


def epochs_per_step(config: RunConfig, num_rows: int | None) -> float:
    """Return the share of the data that a step trains on; 0 if the number of examples is not known."""
    trainer = config.trainer
    if trainer.max_epochs is not None and trainer.max_steps:
        return trainer.max_epochs / trainer.max_steps
    return config.packer.groups_per_step / num_rows if num_rows else 0.0


def evaluated(config: RunConfig) -> dict[str, str]:
    """Return the start of the names of each evaluation's metrics: `eval`, or with several `eval_NAME`."""
    labels = list(config.evaluations)
    return {labels[0]: "eval"} if len(labels) == 1 else {label: f"eval_{label}" for label in labels}
