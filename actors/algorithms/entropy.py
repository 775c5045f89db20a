"""Adaptive entropy control: the coefficient of the entropy bonus moves with the entropy measured in each step.

Source: Skywork-OR1, as in TRL.
"""

import math
from dataclasses import dataclass

from schemas.config.objective import AdaptiveEntropyConfig


@dataclass(frozen=True)
class EntropyControl:
    """State of the controller between two steps; starts with `entropy_coef` and no measured entropy."""

    coef: float
    """Coefficient of the entropy bonus, whether it acts or not."""
    entropy: float = math.inf
    """Mean entropy per token of the last step, in nats; infinite before the first step."""


def acting_coef(control: EntropyControl, config: AdaptiveEntropyConfig) -> float:
    """Return the coefficient for all micro-batches of the next step: 0 while the entropy is above the target."""
    return control.coef if control.entropy <= config.target else 0.0


def controlled(control: EntropyControl, config: AdaptiveEntropyConfig, entropy: float) -> EntropyControl:
    """Return the state after a step with this mean entropy: coef + delta if entropy ≤ target, else coef − delta.

    The coefficient is clamped to [min_coef, max_coef].
    """
    # the coefficient moves also in steps in which it did not act
    moved = control.coef + (config.delta if entropy <= config.target else -config.delta)
    return EntropyControl(min(max(moved, config.min_coef), config.max_coef), entropy)
