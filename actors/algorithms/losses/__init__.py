"""What a training step minimises: one policy loss, one module each, and the switches that combine with any of them.

    loss → inference correction → off-policy mask → entropy quantile → + β·KL → + entropy → average

To add a loss: a config class in `schemas/config/losses.py`, a module here with a function
`(LossInputs, its config) -> TokenLoss`, and a line in `LOSSES`.
"""

from collections.abc import Callable
from typing import Any

from actors.algorithms.losses.average import share_of_step
from actors.algorithms.losses.grpo import clipped
from actors.algorithms.losses.inputs import LossInputs, LossOutput, TokenLoss
from actors.algorithms.losses.metrics import mismatch_sums
from actors.algorithms.losses.surogate import surogate
from actors.algorithms.losses.switches import corrected, entropy_bonus, high_entropy, on_policy_enough, reference_kl
from schemas.config import losses as configs
from schemas.config.objective import ObjectiveConfig

LOSSES: dict[type, Callable[[LossInputs, Any], TokenLoss]] = {
    configs.SurogateLossConfig: surogate,
    configs.GrpoLossConfig: clipped("completion_means"),
    configs.BnpoLossConfig: clipped("micro_batch_tokens"),
    configs.DrGrpoLossConfig: clipped("max_length"),
    configs.DapoLossConfig: clipped("step_tokens"),
}


def compute_loss(inputs: LossInputs, objective: ObjectiveConfig) -> LossOutput:
    """The share of one micro-batch in the loss of its step, and the sums of its metrics."""
    policy = LOSSES[type(objective.loss)](inputs, objective.loss)
    sums = mismatch_sums(inputs) | dict(policy.sums)
    values_T = policy.values_T
    for switch in (corrected, on_policy_enough, high_entropy):
        values_T = switch(inputs, objective, values_T, sums)
    values_T = values_T + reference_kl(inputs, objective, policy.ratio_T, sums)
    values_T = values_T - entropy_bonus(inputs, objective)
    return LossOutput(share_of_step(inputs, values_T, policy.average), sums)


__all__ = ["LossInputs", "LossOutput", "TokenLoss", "compute_loss"]
