"""Objective of a training step: one policy loss (a module each) and the modifiers that combine with any loss.

    KL in the reward → RLSD weights → loss → entropy quantile → inference correction → off-policy mask → + β·KL
    → average → + distillation → − entropy bonus

The first two act on the advantages. `ignores` and `takes_inside` of a loss's config class name the modifiers that do
not
act on the loss from outside: it leaves them out, or has them in its own formula. A custom loss has no modifiers.

A new loss needs a config class in `schemas/config/losses.py`, a module here with a function
`(LossInputs, config) -> TokenLoss`, and a line in `LOSSES`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from actors.algorithms.losses.aipo import aipo
from actors.algorithms.losses.average import share_of_step
from actors.algorithms.losses.cispo import cispo
from actors.algorithms.losses.custom import CustomLoss, custom
from actors.algorithms.losses.decoupled import decoupled
from actors.algorithms.losses.distillation import distilled, reweighted
from actors.algorithms.losses.dppo import dppo
from actors.algorithms.losses.gmpo import gmpo
from actors.algorithms.losses.grpo import clipped
from actors.algorithms.losses.inputs import LossInputs, LossOutput, TokenDetails, TokenLoss
from actors.algorithms.losses.ipo import ipo
from actors.algorithms.losses.m2po import m2po
from actors.algorithms.losses.metrics import common_sums
from actors.algorithms.losses.modifiers import entropy_bonus, kl_in_reward, off_policy, reference_kl, with_weights
from actors.algorithms.losses.ref_kl import ref_kl
from actors.algorithms.losses.rloo import rloo
from actors.algorithms.losses.sapo import sapo
from actors.algorithms.losses.surogate import surogate
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
"""Function of each policy loss, by config class. The argument of `clipped` is the average of the loss."""


def compute_loss(inputs: LossInputs, objective: ObjectiveConfig, custom_loss: CustomLoss | None = None) -> LossOutput:
    """Compute one micro-batch's share of the step's loss, and the sums of its metrics.

    Shares add up over micro-batches and ranks to the loss of the step.

    Args:
        inputs: arrays of the micro-batch.
        objective: loss and modifiers.
        custom_loss: the function at `trainer.loss.path`, for a loss of type `custom`.

    Raises:
        ValueError: an array that the objective reads is missing (reference, teacher, entropy, versions), or the
            function of a custom loss.
    """
    inputs = inputs.prepared()
    # advantages first: every loss and every modifier below reads them
    inputs = replace(inputs, advantages_T=kl_in_reward(inputs, objective))
    inputs = replace(inputs, advantages_T=reweighted(inputs, objective.distillation))
    sums = common_sums(inputs)
    if isinstance(objective.loss, configs.CustomLossConfig):
        output = custom(inputs, objective.loss, custom_loss)
        return LossOutput(output.loss, sums | output.sums)
    # before the loss: losses with the modifiers inside their formula read weights and mask from the inputs
    inputs = with_weights(inputs, objective, sums)
    policy = LOSSES[type(objective.loss)](inputs, objective.loss)
    sums |= policy.sums
    values_T, counted, rules = modified(inputs, objective, policy, sums)
    if inputs.weights_T is not None:  # a component's weights scale the KL too, since it is part of the component's loss
        values_T = values_T * inputs.weights_T
    loss = share_of_step(counted, values_T, policy.average)
    loss = distilled(inputs, objective, loss, policy.kept_T, sums)
    # last, with an average of its own: a bonus is no part of the policy loss
    bonus = entropy_bonus(inputs, objective, sums)
    ratio_T = policy.ratio_T.detach() if policy.ratio_T is not None else None
    tokens = TokenDetails(values_T.detach(), counted.detached(), policy.average, ratio_T, rules)
    return LossOutput(loss if bonus is None else loss - bonus, sums, tokens)


def modified(
    inputs: LossInputs, objective: ObjectiveConfig, policy: TokenLoss, sums: dict[str, Tensor]
) -> tuple[Tensor, LossInputs, dict[str, Tensor]]:
    """Apply the modifiers that act on a loss from outside.

    Returns:
        Values per token, (T,), the inputs with the loss mask that the average counts, and the tokens that rules of the
        loss and of the modifiers mask or clip.
    """
    rules = dict(policy.rules)
    # modifiers that this loss leaves out, or has inside its formula
    elsewhere = objective.loss.ignores | objective.loss.takes_inside
    values_T, counted = policy.values_T, inputs
    kl_T = reference_kl(inputs, objective, policy.ratio_T, sums)
    kl_escapes = objective.reference is None or objective.reference.switches == "escape"
    if inputs.high_entropy_T is not None and "top_entropy_quantile" not in elsewhere:
        rules["top_entropy_quantile"] = ~inputs.high_entropy_T
        values_T = values_T.masked_fill(~inputs.high_entropy_T, 0.0)
    # ms-swift's order: correction and off-policy mask below act on loss + KL
    if kl_T is not None and not kl_escapes:
        values_T = values_T + kl_T
    if inputs.correction_T is not None and "correction" not in elsewhere:
        values_T = values_T * inputs.correction_T
    threshold = objective.off_policy_mask_threshold
    if threshold is not None and "off_policy_mask_threshold" not in elsewhere:
        dropped_T = off_policy(inputs, threshold, sums)
        rules["off_policy"] = dropped_T
        values_T = values_T.masked_fill(dropped_T, 0.0)
        if objective.loss.compat.off_policy_tokens == "leave":  # leave the denominator too, not only the numerator
            counted = replace(inputs, loss_mask_T=inputs.loss_mask_T & ~dropped_T)
    if kl_T is not None and kl_escapes:  # TRL's order: no modifier above has an effect on the KL
        values_T = values_T + kl_T
    return values_T, counted, rules


__all__ = ["CustomLoss", "LossInputs", "LossOutput", "TokenLoss", "compute_loss"]
