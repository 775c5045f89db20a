"""Policy losses, one per module.

To add one: a config class in `schemas/config/algorithm.py`, a module here with a function
`(LossInputs, its config) -> LossOutput`, and a line in `LOSSES`.
"""

from collections.abc import Callable
from typing import Any

from actors.algorithms.losses.inputs import LossInputs, LossOutput
from actors.algorithms.losses.surogate import surogate
from schemas.config.algorithm import LossConfig, SurogateLossConfig

LOSSES: dict[type, Callable[[LossInputs, Any], LossOutput]] = {SurogateLossConfig: surogate}


def compute_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The loss of one micro-batch under the configured algorithm."""
    return LOSSES[type(config)](inputs, config)


__all__ = ["LossInputs", "LossOutput", "compute_loss"]
