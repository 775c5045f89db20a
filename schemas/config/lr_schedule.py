"""Keys of `trainer.lr_schedule`: counting and shape of the learning rate's schedule."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.resume_classes import Free

LrScheduler = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
"""Names of schedules, as in transformers."""


class LrScheduleConfig(Section):
    """Counting and shape of the schedule `trainer.lr_scheduler`."""

    unit: Free[Literal["step", "update"]] = "step"
    """Count of the schedule. `step`: all updates of a step have the same rate. `update`: each of the num_iterations ×
    num_minibatches updates of a step has a separate rate (TRL), and `trainer.warmup_steps`, `decay_steps` and
    `timescale` count updates."""
    first: Free[Literal[0, 1]] = 1
    """Number of the first step (or update). 1: the first step of a warm-up has a rate above 0, and a decay ends in
    the last step. 0: as in transformers, where the first step of a warm-up has rate 0, and a decay would end a step
    after the last."""
    num_cycles: Free[int] = Field(1, ge=1)
    """Number of falls of `cosine_with_restarts`."""
    power: Free[float] = Field(1.0, gt=0)
    """Exponent of `polynomial`. 1: a linear fall."""
    timescale: Free[int | None] = Field(None, ge=1)
    """Steps of `inverse_sqrt`: the rate at n steps after the warm-up is the peak ÷ √(1 + n ÷ timescale). Empty: the
    steps of the warm-up, or 10 000 without a warm-up."""
    decay_steps: Free[int | None] = Field(None, ge=1)
    """Steps of the decay at the end of `warmup_stable_decay`. Empty: `decay_ratio` counts."""
    decay_ratio: Free[float | None] = Field(None, gt=0, le=1)
    """Steps of the decay at the end of `warmup_stable_decay` as a share of the run, rounded up. Empty: `decay_steps`
    counts."""
    decay_type: Free[Literal["cosine", "linear", "1-sqrt"]] = "cosine"
    """Shape of the decay of `warmup_stable_decay`: half a cosine, a straight line, or 1 − √(share of the decay
    done)."""

    @model_validator(mode="after")
    def _one_decay(self) -> "LrScheduleConfig":
        if self.decay_steps is not None and self.decay_ratio is not None:
            raise ValueError("decay_steps and decay_ratio are two lengths of one decay; remove one of the two")
        return self
