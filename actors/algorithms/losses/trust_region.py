"""Trust region around the engine's policy: values and metrics shared by losses that drop tokens outside of a region."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import MAX_LOG_RATIO, ratio_of
from actors.algorithms.losses.teacher import teacher_sums


def probability_change(inputs: LossInputs) -> Tensor:
    """Return each token's change of probability, exp(logp) − exp(inference), (T,), no gradient; 0 outside the mask."""
    return inputs.masked(inputs.logprobs_T.detach().exp() - inputs.inference_logprobs_T.exp())


def beyond(inputs: LossInputs, low: float, high: float) -> dict[str, Tensor]:
    """Return tokens with a probability that moved too far in their advantage's direction, (T,) bool per side.

    An advantage of 0 counts as downwards.
    """
    # of the rewards' advantages, without a teacher's term: the direction is that of the reward
    change_T, up_T = probability_change(inputs), inputs.advantages_T > 0
    return {"low": ~up_T & (change_T < -low), "high": up_T & (change_T > high)}


def inside_region(
    inputs: LossInputs,
    advantages_T: Tensor,
    causes: Mapping[str, Tensor],
    *,
    kl_tau: float,
    ratio_clip: float | None = None,
) -> TokenLoss:
    """Return −A·min(r, ratio_clip) on kept tokens + kl_tau·(log r)² on all tokens, r = exp(logp − inference).

    Dropped tokens stay in the denominator, the loss-mask tokens of the step.

    Args:
        inputs: arrays of the micro-batch.
        advantages_T: A in the formula.
        causes: name → bool tensor (T,) of the tokens that the cause drops.
        kl_tau: factor of the squared log ratio.
        ratio_clip: cap of the ratio; the gradient above the cap is that of the cap as a weight. None: no cap.
    """
    keep_T = inputs.loss_mask_T & ~torch.stack(list(causes.values())).any(0)
    log_ratio_T = inputs.masked(inputs.logprobs_T - inputs.inference_logprobs_T)
    # filled before exp: an overflowing ratio of a dropped token would give 0 · inf
    ratio_T = capped_ratio(log_ratio_T.masked_fill(~keep_T, 0.0), ratio_clip, stop_gradient=False)
    values_T = kl_tau * log_ratio_T.square() - advantages_T.masked_fill(~keep_T, 0.0) * ratio_T
    sums = kept_and_dropped(inputs, keep_T, causes) | teacher_sums(inputs)
    return TokenLoss(values_T, "step_tokens", ratio_of(log_ratio_T), sums, rules=causes)


def capped_ratio(log_ratio_T: Tensor, cap: float | None, *, stop_gradient: bool) -> Tensor:
    """Return min(exp(log ratio), cap), (T,); cap None: no cap.

    Above the cap the gradient is 0 (stop_gradient), or that of the cap as a constant weight of the logprob.
    """
    log_cap = MAX_LOG_RATIO if cap is None else min(math.log(cap), MAX_LOG_RATIO)
    if stop_gradient:
        return log_ratio_T.clamp(max=log_cap).exp()  # clamped before exp: an overflow would have the gradient 0 · inf
    # exp(x − sg[x]) is 1 in value and has the gradient of x, so the capped ratio weighs the gradient of the logprob
    return log_ratio_T.detach().clamp(max=log_cap).exp() * (log_ratio_T - log_ratio_T.detach()).exp()


def kept_and_dropped(inputs: LossInputs, keep_T: Tensor, causes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return metric sums: kept and dropped tokens, the KL from the engine (k3) on both, and dropped tokens by cause."""
    log_ratio_T = inputs.masked(inputs.logprobs_T.detach() - inputs.inference_logprobs_T)
    kl_T = ratio_of(log_ratio_T) - log_ratio_T - 1
    dropped_T = inputs.loss_mask_T & ~keep_T
    sums = {
        "kept_tokens": keep_T.sum(),
        "masked_tokens": dropped_T.sum(),
        "kl_kept": kl_T.where(keep_T, 0).sum(),
        "kl_masked": kl_T.where(dropped_T, 0).sum(),
    }
    return sums | {f"masked_{cause}": (inputs.loss_mask_T & flags_T).sum() for cause, flags_T in causes.items()}
