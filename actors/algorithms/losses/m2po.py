"""M2PO: decoupled PPO without the few stale tokens that cause most of the variance of the importance weights."""

from dataclasses import replace

import torch
from torch import Tensor

from actors.algorithms.losses.decoupled import decoupled, proximal
from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.running_sums import running_sums
from schemas.config.losses import M2poLossConfig


def m2po(inputs: LossInputs, config: M2poLossConfig) -> TokenLoss:
    """Return the decoupled loss on the tokens that `second_moment_below` keeps of (inference − prox)², (T,).

    Dropped tokens leave the denominator: a micro-batch has the mean over its kept tokens, weighted with its share of
    the step's loss-mask tokens. Source: M2PO; AReaL (m2_threshold), which also judges each micro-batch by itself.
    """
    mask_T = inputs.loss_mask_T
    squares_T = (inputs.inference_logprobs_T - proximal(inputs, config.prox_logp_method)).square()
    keep_T = second_moment_below(squares_T, mask_T, config.m2_threshold)
    loss = decoupled(replace(inputs, loss_mask_T=keep_T), config)
    dropped_T = mask_T & ~keep_T
    dropped = dropped_T.sum()
    sums = {**loss.sums, "masked_m2": dropped, "masked_tokens": dropped + loss.sums.get("masked_tokens", 0)}
    # the average divides by all loss-mask tokens of the step; the factor turns Σ/mask into Σ/kept for this micro-batch
    shrunk = mask_T.sum().to(squares_T.dtype) / keep_T.sum().clamp(min=1)
    rules = {**loss.rules, "m2": dropped_T}
    return replace(loss, values_T=loss.values_T * shrunk, kept_T=keep_T, sums=sums, rules=rules)


def second_moment_below(squares_T: Tensor, mask_T: Tensor, threshold: float) -> Tensor:
    """Return the loss mask, (T,) bool, without the largest squares, as few as bring the mean of the rest below a bound.

    The smallest square always stays: [9, 1, 4] leave [1, 4] with threshold 3, [1] with 2 and with 0.5.
    """
    places = torch.nonzero(mask_T).flatten()
    # largest first, as AReaL sorts, so that of equal squares the earlier one is dropped
    order = squares_T[places].sort(descending=True, stable=True).indices.flip(0)
    # ascending order: the mean of the n smallest never falls with n, so the kept tokens are a prefix
    sizes = torch.arange(1, places.numel() + 1, dtype=squares_T.dtype, device=squares_T.device)
    stays = running_sums(squares_T[places][order]) / sizes < threshold
    stays[:1] = True
    return torch.zeros_like(mask_T).index_put((places[order],), stays)
