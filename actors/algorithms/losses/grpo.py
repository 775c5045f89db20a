"""The clipped policy gradient of PPO with the advantages of a group, in the four averages that the field uses.

Per token: −min(ρA, clip(ρ, 1 − ε, 1 + ε_high)A) with ρ = exp(logp − old).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import Average, LossInputs, TokenLoss
from actors.algorithms.losses.ratios import at_level, log_ratio
from schemas.config.losses import ClippedLossConfig


def clipped(average: Average) -> Callable[[LossInputs, ClippedLossConfig], TokenLoss]:
    """The loss with one of its averages.

    Source: GRPO (DeepSeekMath, completion_means), BNPO as in TRL (micro_batch_tokens), Dr. GRPO (max_length), DAPO
    (step_tokens).
    """

    def loss(inputs: LossInputs, config: ClippedLossConfig) -> TokenLoss:
        ratio_T = at_level(inputs, log_ratio(inputs, config), config.importance_sampling_level).exp()
        values_T, sums = clipped_objective(inputs, ratio_T, config)
        return TokenLoss(values_T, average, ratio_T, sums)

    return loss


def clipped_objective(
    inputs: LossInputs, ratio_T: Tensor, config: ClippedLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """(T,) what to minimise per token, and the sums of the clip fractions."""
    advantages_T = inputs.advantages_T
    low, high = 1 - config.epsilon, 1 + config.upper
    capped_T = ratio_T if config.delta is None else ratio_T.clamp(max=config.delta)
    values_T = -torch.minimum(capped_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    if config.dual_clip is not None:  # only a negative advantage reaches it: c > 1 is above every positive objective
        bound_T = -config.dual_clip * advantages_T
        values_T = torch.where(advantages_T < 0, torch.minimum(values_T, bound_T), values_T)
    mask_T = inputs.loss_mask_T
    return inputs.masked(values_T), {
        "clipped_low": (mask_T & (ratio_T < low) & (advantages_T < 0)).sum(),
        "clipped_high": (mask_T & (ratio_T > high) & (advantages_T > 0)).sum(),
    }
