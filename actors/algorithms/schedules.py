"""Schedules of learning rate and sampling temperature over steps."""

import math

from actors.algorithms.run_length import steps_of_share
from schemas.config.actors import TemperatureScheduleConfig
from schemas.config.trainer import TrainerConfig


def learning_rate(step: int, config: TrainerConfig, update: int = 1) -> float:
    """Return the learning rate of an update of step 1, 2, … `max_steps`.

    Linear warm-up that reaches `learning_rate` in step `warmup_steps`. Then constant, or a decay that reaches
    `min_lr_ratio` × `learning_rate` in step `max_steps`. With `lr_schedule.unit: update` all of it counts updates.

    Args:
        step: the step.
        config: the trainer's keys; `max_steps` must be known.
        update: number of the update within the step, from 1.
    """
    schedule, peak, lowest = config.lr_schedule, config.learning_rate, config.min_lr_ratio
    per_step = config.rates_per_step
    total = config.max_steps * per_step
    position = step if per_step == 1 else (step - 1) * per_step + update
    position -= 1 - schedule.first
    warmup = config.warmup_steps if config.warmup_ratio is None else steps_of_share(config.warmup_ratio, total)
    if warmup and position <= warmup:
        start = lowest if config.lr_scheduler == "warmup_stable_decay" else 0.0
        return peak * position / warmup if start == 0 else peak * (start + (1 - start) * position / warmup)
    match config.lr_scheduler:
        case "constant" | "constant_with_warmup":
            return peak
        case "inverse_sqrt":
            return peak / math.sqrt(1 + (position - warmup) / (schedule.timescale or warmup or 10_000))
        case "warmup_stable_decay":
            ratio, steps = schedule.decay_ratio, schedule.decay_steps
            decay = steps_of_share(ratio, total) if ratio is not None else steps or total
            return peak * (1 - (1 - lowest) * _fall(max(0.0, position - (total - decay)) / decay, config))
        case _:
            # 1 in step max_steps
            return peak * (1 - (1 - lowest) * _fall((position - warmup) / max(1, total - warmup), config))


def _fall(progress: float, config: TrainerConfig) -> float:
    """Return the share of a decay's depth reached after a share of its length.

    A run that is continued with fewer steps stays at the end.
    """
    progress = min(1.0, progress)
    schedule = config.lr_schedule
    match config.lr_scheduler if config.lr_scheduler != "warmup_stable_decay" else schedule.decay_type:
        case "linear":
            return progress
        case "polynomial":
            return 1 - math.pow(1 - progress, schedule.power)
        case "1-sqrt":
            return math.sqrt(progress)
        case "cosine_with_restarts":
            # a restart would come exactly at the end
            part = schedule.num_cycles * progress % 1.0 if progress < 1 else 1.0
            return (1 - math.cos(math.pi * part)) / 2
        case _:
            return (1 - math.cos(math.pi * progress)) / 2


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
