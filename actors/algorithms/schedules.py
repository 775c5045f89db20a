"""Learning rate and sampling temperature over steps."""

import math

from schemas.config.actors import TemperatureScheduleConfig, TrainerConfig


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Learning rate of step 1, 2, … `max_steps`.

    Linear warm-up to `learning_rate`, which step `warmup_steps` has, then constant, or linear or cosine down to
    `min_lr_ratio` of it, which step `max_steps` has.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if config.lr_scheduler == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, config.max_steps - warmup))
    fall = progress if config.lr_scheduler == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return peak * (1 - (1 - config.min_lr_ratio) * fall)


def sampling_temperature(step: int, start: float, schedule: TemperatureScheduleConfig | None, max_steps: int) -> float:
    """Temperature of the groups of step 1, 2, …: `start` in step 1, `schedule.end` in the schedule's last one and on.

    1 → 0.5 over 5 steps, linear: 1, .875, .75, .625, .5; cosine: 1, .927, .75, .573, .5.
    """
    if schedule is None:
        return start
    last = (schedule.steps or max_steps) - 1
    progress = min(step - 1, last) / last if last else 0.0
    change = progress if schedule.type == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return start + (schedule.end - start) * change
