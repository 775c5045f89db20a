"""What losses with a trust region around the engine's policy share: what stays inside, and what is counted."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import MAX_LOG_RATIO, ratio_of
from actors.algorithms.losses.teacher import teacher_sums


def probability_change(inputs: LossInputs) -> Tensor:
    """(T,) exp(logp) − exp(inference), no gradient; 0 outside the loss mask."""
    return inputs.masked(inputs.logprobs_T.detach().exp() - inputs.inference_logprobs_T.exp())


def beyond(inputs: LossInputs, low: float, high: float) -> dict[str, Tensor]:
    """(T,) bool by side: tokens whose probability moved too far the way their advantage pushes; zero pushes down."""
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
    """−advantage × ratio on the tokens that no cause drops, and kl_tau × (log ratio)² on all of them.

    Dropped tokens count in the normaliser. `causes`: (T,) bool by name, what drops a token.
    """
    keep_T = inputs.loss_mask_T & ~torch.stack(list(causes.values())).any(0)
    log_ratio_T = inputs.masked(inputs.logprobs_T - inputs.inference_logprobs_T)
    # filled before exp: a dropped token whose ratio overflows would give 0 · inf
    ratio_T = capped_ratio(log_ratio_T.masked_fill(~keep_T, 0.0), ratio_clip, stop_gradient=False)
    values_T = kl_tau * log_ratio_T.square() - advantages_T.masked_fill(~keep_T, 0.0) * ratio_T
    sums = kept_and_dropped(inputs, keep_T, causes) | teacher_sums(inputs)
    return TokenLoss(values_T, "step_tokens", ratio_of(log_ratio_T), sums)


def capped_ratio(log_ratio_T: Tensor, cap: float | None, *, stop_gradient: bool) -> Tensor:
    """(T,) exp of the log ratio, at most `cap`; above it without gradient, or with that of a weight as large as it."""
    log_cap = MAX_LOG_RATIO if cap is None else min(math.log(cap), MAX_LOG_RATIO)
    if stop_gradient:
        return log_ratio_T.clamp(max=log_cap).exp()  # before exp: the gradient of one that overflows is 0 · inf
    return log_ratio_T.detach().clamp(max=log_cap).exp() * (log_ratio_T - log_ratio_T.detach()).exp()


def kept_and_dropped(inputs: LossInputs, keep_T: Tensor, causes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of the metrics: kept and dropped tokens, the KL from the engine (k3) on each, and drops by cause."""
    log_ratio_T = inputs.masked(inputs.logprobs_T.detach() - inputs.inference_logprobs_T)
    kl_T = ratio_of(log_ratio_T) - log_ratio_T - 1
    dropped_T = inputs.loss_mask_T & ~keep_T
    sums = {
        "kept_tokens": keep_T.sum(),
        "masked_tokens": dropped_T.sum(),
        "kl_kept": kl_T[keep_T].sum(),
        "kl_masked": kl_T[dropped_T].sum(),
    }
    return sums | {f"masked_{cause}": (inputs.loss_mask_T & flags_T).sum() for cause, flags_T in causes.items()}
