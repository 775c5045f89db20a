"""The clipped policy gradient of PPO with the advantages of a group, in the averages that the field uses.

Per token: −min(ρA, clip(ρ, 1 − ε, 1 + ε_high)A) with ρ = exp(logp − old), or of the completion's mean log ratio.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import Average, LossInputs, TokenLoss
from actors.algorithms.losses.metrics import clip_sums
from actors.algorithms.losses.ratios import advantages_at_level, ratio_at_level
from schemas.config.losses import ClippedLossConfig, ClipRangeConfig


def clipped(average: Average) -> Callable[[LossInputs, ClippedLossConfig], TokenLoss]:
    """The loss with one of its averages.

    Source: GRPO (DeepSeekMath, completion_means), GSPO (at level sequence), BNPO as in TRL (micro_batch_tokens),
    Dr. GRPO (max_length), DAPO (step_tokens), LUSPO (completion_sums, at level sequence).
    """

    def loss(inputs: LossInputs, config: ClippedLossConfig) -> TokenLoss:
        ratio_T, advantages_T = ratio_at_level(inputs, config), advantages_at_level(inputs, config)
        values_T = clipped_values(ratio_T, advantages_T, config, config.delta)
        if config.dual_clip is not None:  # only a negative advantage reaches it: c > 1 is above every other loss
            bound_T = -config.dual_clip * advantages_T
            values_T = torch.where(advantages_T < 0, torch.minimum(values_T, bound_T), values_T)
        per_completion = config.importance_sampling_level != "token"
        sums = clipped_sums(inputs, ratio_T, advantages_T, config, per_completion)
        return TokenLoss(inputs.masked(values_T), average, ratio_T, sums)

    return loss


def clipped_values(
    ratio_T: Tensor, advantages_T: Tensor, config: ClipRangeConfig, delta: float | None = None
) -> Tensor:
    """(T,) what to minimise, also outside the loss mask; `delta` caps the ratio in the unclipped branch."""
    capped_T = ratio_T if delta is None else ratio_T.clamp(max=delta)
    clipped_T = ratio_T.clamp(1 - config.epsilon, 1 + config.upper)
    return -torch.minimum(capped_T * advantages_T, clipped_T * advantages_T)


def clipped_sums(
    inputs: LossInputs, ratio_T: Tensor, advantages_T: Tensor, config: ClipRangeConfig, per_completion: bool
) -> dict[str, Tensor]:
    """Sums of the clip fractions: where the clip takes the gradient away."""
    low_T = (ratio_T < 1 - config.epsilon) & (advantages_T < 0)
    high_T = (ratio_T > 1 + config.upper) & (advantages_T > 0)
    return clip_sums(inputs, low_T, high_T, per_completion)
