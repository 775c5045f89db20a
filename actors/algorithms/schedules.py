"""Learning rate over steps."""

import math

from schemas.config.actors import TrainerConfig


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
