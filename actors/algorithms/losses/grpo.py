"""PPO's clipped surrogate objective with group advantages, in all averages in use (GRPO, BNPO, DAPO, GSPO, …).

Per token: −min(ρA, clip(ρ, 1 − ε, 1 + ε_high)·A) with ρ = exp(logp − old), or exp of the completion's mean log ratio.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import Average, LossInputs, TokenLoss
from actors.algorithms.losses.metrics import clip_sums
from actors.algorithms.losses.ratios import advantages_at_level, ratio_at_level
from schemas.config.losses import ClippedLossConfig, ClipRangeConfig


def clipped(average: Average) -> Callable[[LossInputs, ClippedLossConfig], TokenLoss]:
    """Return the clipped loss function with the given average.

    Source: GRPO (DeepSeekMath, completion_means), GSPO (completion_means at level sequence), BNPO as in TRL
    (micro_batch_tokens), Dr. GRPO (max_length), DAPO (step_tokens), LUSPO (completion_sums at level sequence).
    """

    def loss(inputs: LossInputs, config: ClippedLossConfig) -> TokenLoss:
        ratio_T, advantages_T = ratio_at_level(inputs, config), advantages_at_level(inputs, config)
        values_T = clipped_values(ratio_T, advantages_T, config, config.delta)
        if config.dual_clip is not None:  # A < 0 only: the loss −ρA is unbounded above there, and nowhere else
            bound_T = -config.dual_clip * advantages_T
            values_T = torch.where(advantages_T < 0, torch.minimum(values_T, bound_T), values_T)
        per_completion = config.importance_sampling_level != "token"
        rules = clipped_tokens(ratio_T, advantages_T, config)
        sums = clip_sums(inputs, rules["clip_low"], rules["clip_high"], per_completion)
        return TokenLoss(inputs.masked(values_T), average, ratio_T, sums, rules=rules)

    return loss


def clipped_values(
    ratio_T: Tensor, advantages_T: Tensor, config: ClipRangeConfig, delta: float | None = None
) -> Tensor:
    """Return −min(min(ρ, delta)·A, clip(ρ)·A) per token, (T,), without masking; delta None: no cap.

    Source of delta: INTELLECT-2's two-sided clip.
    """
    # delta caps the unclipped side alone: for A < 0 the minimum takes ρA, which is unbounded there
    capped_T = ratio_T if delta is None else ratio_T.clamp(max=delta)
    clipped_T = ratio_T.clamp(1 - config.epsilon, 1 + config.upper)
    return -torch.minimum(capped_T * advantages_T, clipped_T * advantages_T)


def clipped_tokens(ratio_T: Tensor, advantages_T: Tensor, config: ClipRangeConfig) -> dict[str, Tensor]:
    """Return the tokens whose gradient the clip removes, (T,) bool by rule: on the low and on the high side."""
    low_T = (ratio_T < 1 - config.epsilon) & (advantages_T < 0)
    high_T = (ratio_T > 1 + config.upper) & (advantages_T > 0)
    return {"clip_low": low_T, "clip_high": high_T}
