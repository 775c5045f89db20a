"""Schedules of learning rate and sampling temperature over steps."""

import math

from schemas.config.actors import TemperatureScheduleConfig
from schemas.config.trainer import TrainerConfig


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Return the learning rate of step 1, 2, … `max_steps`.

    Linear warm-up that reaches `learning_rate` in step `warmup_steps`. Then constant, or a linear or cosine decay that
    reaches `min_lr_ratio` × `learning_rate` in step `max_steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if config.lr_scheduler == "constant":
        return peak
    # 1 in step max_steps; at most 1, should a run be continued with fewer steps
    progress = min(1.0, (step - warmup) / max(1, config.max_steps - warmup))
    fall = progress if config.lr_scheduler == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return peak * (1 - (1 - config.min_lr_ratio) * fall)


def sampling_temperature(step: int, start: float, schedule: TemperatureScheduleConfig | None, max_steps: int) -> float:
    """Return the sampling temperature of the groups of step 1, 2, …: from `start` in step 1 to `schedule.end`.

    `schedule.end` is reached in step `schedule.steps` (max_steps if empty) and kept. Without a schedule the temperature
    is `start`. 1 → 0.5 over 5 steps, linear: 1, .875, .75, .625, .5; cosine: 1, .927, .75, .573, .5.
    """
    if schedule is None:
        return start
    last = (schedule.steps or max_steps) - 1
    progress = min(step - 1, last) / last if last else 1.0  # the first step of a schedule of one is its last
    change = progress if schedule.type == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return start + (schedule.end - start) * change
