"""Adaptive entropy control: the coefficient of the entropy bonus, from step to step.

Source: Skywork-OR1, as in TRL.
"""

import math
from dataclasses import dataclass

from schemas.config.objective import AdaptiveEntropyConfig


@dataclass(frozen=True)
class EntropyControl:
    """What the controller carries from step to step; it begins at `entropy_coef` and no entropy seen yet."""

    coef: float
    entropy: float = math.inf
    """Mean per token, in nats, of the step before."""


def acting_coef(control: EntropyControl, config: AdaptiveEntropyConfig) -> float:
    """The coefficient for all micro-batches of the next step: none while the entropy is above the target."""
    return control.coef if control.entropy <= config.target else 0.0


def controlled(control: EntropyControl, config: AdaptiveEntropyConfig, entropy: float) -> EntropyControl:
    """After a step whose tokens had this mean entropy: up by delta at the target or below, else down."""
    moved = control.coef + (config.delta if entropy <= config.target else -config.delta)
    return EntropyControl(min(max(moved, config.min_coef), config.max_coef), entropy)
