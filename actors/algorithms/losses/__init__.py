"""What a training step minimises: one policy loss, one module each, and the switches that combine with any of them.

    loss → entropy quantile → inference correction → off-policy mask → + β·KL → average → − entropy bonus

A KL in the reward (`reference.place`) is in the advantages before all of this.
A loss may take a switch inside its formula, or know none of it: `ignores` and `takes_inside` of its config class. A
custom loss is the function of a user, without any switch.

To add a loss: a config class in `schemas/config/losses.py`, a module here with a function
`(LossInputs, its config) -> TokenLoss`, and a line in `LOSSES`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from actors.algorithms.losses.aipo import aipo
from actors.algorithms.losses.average import share_of_step
from actors.algorithms.losses.cispo import cispo
from actors.algorithms.losses.custom import custom
from actors.algorithms.losses.decoupled import decoupled
from actors.algorithms.losses.dppo import dppo
from actors.algorithms.losses.gmpo import gmpo
from actors.algorithms.losses.grpo import clipped
from actors.algorithms.losses.inputs import LossInputs, LossOutput, TokenLoss
from actors.algorithms.losses.ipo import ipo
from actors.algorithms.losses.m2po import m2po
from actors.algorithms.losses.metrics import common_sums
from actors.algorithms.losses.ref_kl import ref_kl
from actors.algorithms.losses.rloo import rloo
from actors.algorithms.losses.sapo import sapo
from actors.algorithms.losses.surogate import surogate
from actors.algorithms.losses.switches import entropy_bonus, kl_in_reward, off_policy, reference_kl, with_weights
from actors.algorithms.losses.vespo import vespo
from schemas.config import losses as configs
from schemas.config.objective import ObjectiveConfig

LOSSES: dict[type, Callable[[LossInputs, Any], TokenLoss]] = {
    configs.SurogateLossConfig: surogate,
    configs.GrpoLossConfig: clipped("completion_means"),
    configs.BnpoLossConfig: clipped("micro_batch_tokens"),
    configs.DrGrpoLossConfig: clipped("max_length"),
    configs.DapoLossConfig: clipped("step_tokens"),
    configs.GspoLossConfig: clipped("completion_means"),
    configs.GspoTokenLossConfig: clipped("completion_means"),
    configs.LuspoLossConfig: clipped("completion_sums"),
    configs.CispoLossConfig: cispo,
    configs.SapoLossConfig: sapo,
    configs.GmpoLossConfig: gmpo,
    configs.RlooLossConfig: rloo,
    configs.VespoLossConfig: vespo,
    configs.IpoLossConfig: ipo,
    configs.DppoLossConfig: dppo,
    configs.AipoLossConfig: aipo,
    configs.RefKlLossConfig: ref_kl,
    configs.DecoupledLossConfig: decoupled,
    configs.M2poLossConfig: m2po,
}


def compute_loss(inputs: LossInputs, objective: ObjectiveConfig) -> LossOutput:
    """The share of one micro-batch in the loss of its step, and the sums of its metrics."""
    inputs = replace(inputs, advantages_T=kl_in_reward(inputs, objective))
    sums = common_sums(inputs)
    if isinstance(objective.loss, configs.CustomLossConfig):
        output = custom(inputs, objective.loss)
        return LossOutput(output.loss, sums | output.sums)
    inputs = with_weights(inputs, objective, sums)
    policy = LOSSES[type(objective.loss)](inputs, objective.loss)
    sums |= policy.sums
    values_T, counted = switched(inputs, objective, policy, sums)
    loss = share_of_step(counted, values_T, policy.average)
    bonus = entropy_bonus(inputs, objective, sums)
    return LossOutput(loss if bonus is None else loss - bonus, sums)


def switched(
    inputs: LossInputs, objective: ObjectiveConfig, policy: TokenLoss, sums: dict[str, Tensor]
) -> tuple[Tensor, LossInputs]:
    """(T,) values after all switches that act on this loss from outside, and the inputs whose tokens count."""
    elsewhere = objective.loss.ignores | objective.loss.takes_inside
    values_T, counted = policy.values_T, inputs
    kl_T = reference_kl(inputs, objective, policy.ratio_T, sums)
    kl_escapes = objective.reference is None or objective.reference.switches == "escape"
    if inputs.high_entropy_T is not None and "top_entropy_quantile" not in elsewhere:
        values_T = values_T.masked_fill(~inputs.high_entropy_T, 0.0)
    if kl_T is not None and not kl_escapes:
        values_T = values_T + kl_T
    if inputs.correction_T is not None and "correction" not in elsewhere:
        values_T = values_T * inputs.correction_T
    threshold = objective.off_policy_mask_threshold
    if threshold is not None and "off_policy_mask_threshold" not in elsewhere:
        dropped_T = off_policy(inputs, threshold, sums)
        values_T = values_T.masked_fill(dropped_T, 0.0)
        if objective.off_policy_tokens == "leave":
            counted = replace(inputs, loss_mask_T=inputs.loss_mask_T & ~dropped_T)
    if kl_T is not None and kl_escapes:
        values_T = values_T + kl_T
    return values_T, counted


__all__ = ["LossInputs", "LossOutput", "TokenLoss", "compute_loss"]
