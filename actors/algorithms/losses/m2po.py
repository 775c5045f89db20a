"""M2PO: few stale tokens make most of the variance; without them the rest may be as old as it likes."""

from dataclasses import replace

import torch
from torch import Tensor

from actors.algorithms.losses.decoupled import decoupled, proximal
from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from schemas.config.losses import M2poLossConfig


def m2po(inputs: LossInputs, config: M2poLossConfig) -> TokenLoss:
    """The decoupled loss on what `second_moment_below` keeps.

    A micro-batch counts in the step as its loss-mask tokens do, with the mean over those that it keeps: the normaliser
    shrinks. Source: AReaL (m2_threshold); M2PO.
    """
    mask_T = inputs.loss_mask_T
    squares_T = (inputs.inference_logprobs_T - proximal(inputs, config.prox_logp_method)).square()
    keep_T = second_moment_below(squares_T, mask_T, config.m2_threshold)
    loss = decoupled(replace(inputs, loss_mask_T=keep_T), config)
    dropped = (mask_T & ~keep_T).sum()
    sums = {**loss.sums, "masked_m2": dropped, "masked_tokens": dropped + loss.sums.get("masked_tokens", 0)}
    shrunk = mask_T.sum().to(squares_T.dtype) / keep_T.sum().clamp(min=1)
    return replace(loss, values_T=loss.values_T * shrunk, sums=sums)


def second_moment_below(squares_T: Tensor, mask_T: Tensor, threshold: float) -> Tensor:
    """(T,) bool: the loss mask without its largest squares, as few as bring the mean of the rest below the threshold.

    The smallest always stays: squares [9, 1, 4] leave [1, 4] below 3, [1] below 2 and below 0.5.
    """
    places = torch.nonzero(mask_T).flatten()
    # largest first, as AReaL sorts, so that of equal squares the earlier one is dropped
    order = squares_T[places].sort(descending=True, stable=True).indices.flip(0)
    sizes = torch.arange(1, places.numel() + 1, dtype=squares_T.dtype, device=squares_T.device)
    stays = squares_T[places][order].cumsum(0) / sizes < threshold
    stays[:1] = True
    return torch.zeros_like(mask_T).index_put((places[order],), stays)
