"""Rejection sampling (AReaL): importance weights from the engine to the proximal policy, and the bounds they must keep.

Weights are exp(prox − inference), called behaviour weights. A token, or a completion, outside the bounds is dropped or
has its weight clamped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from actors.algorithms.losses.modifiers import kl_estimate
from actors.algorithms.losses.ratios import ratio_of
from schemas.config.losses import RejectionConfig


@dataclass(frozen=True)
class Behaviour:
    """Result of rejection sampling for one micro-batch."""

    keep_T: Tensor
    """bool, tokens that stay; a part of the loss mask."""
    weight_T: Tensor
    """Behaviour weights exp(prox − inference), without gradient; 1 without rejection sampling."""
    sums: dict[str, Tensor]
    """Sums of the metrics `proximal_kl`, `rejected_fraction`, `masked_fraction` and `behaviour_weight`."""


def judged(inputs: LossInputs, proximal_T: Tensor, config: RejectionConfig | None) -> Behaviour:
    """Return behaviour weights and the tokens that stay; `config` None: all tokens stay, all weights are 1."""
    mask_T = inputs.loss_mask_T
    log_weight_T = inputs.masked(proximal_T - inputs.inference_logprobs_T)
    sums = {"proximal_kl": (ratio_of(log_weight_T) - log_weight_T - 1).sum()}
    if config is None:
        return Behaviour(mask_T, torch.ones_like(log_weight_T), sums)
    outside_T = mask_T & _outside(inputs, log_weight_T, config)
    keep_T = mask_T & ~outside_T if config.action == "mask" else mask_T
    if config.level == "sequence" and config.metric == "ratio":
        # where ratios judge completions, the weight is the completion's geometric mean, whatever `agg` judges by
        weight_T = ratio_of(inputs.per_token(inputs.mean_per_completion(log_weight_T)))
    else:
        weight_T = ratio_of(log_weight_T)
    if config.action == "clamp":
        # outside alone: where completions are judged, the weight of a token inside may exceed the bounds
        weight_T = torch.where(outside_T, weight_T.clamp(config.lower or 0.0, config.upper), weight_T)
    sums |= {
        "rejected_tokens": outside_T.sum(),
        "kept_tokens": keep_T.sum(),
        "masked_tokens": (mask_T & ~keep_T).sum(),
        "behaviour_weight": weight_T[keep_T].sum(),
    }
    return Behaviour(keep_T, weight_T.masked_fill(~keep_T, 0.0), sums)


def _outside(inputs: LossInputs, log_weight_T: Tensor, config: RejectionConfig) -> Tensor:
    is_ratio = config.metric == "ratio"
    # ratios are aggregated as logs: their mean is then the geometric one, their sum the completion's ratio
    found_T = log_weight_T if is_ratio else kl_estimate(log_weight_T, config.metric.removeprefix("kl_"))
    if config.level == "sequence":
        match config.agg:
            case "sum":
                found_B = inputs.sum_per_completion(inputs.masked(found_T))
            case "mean":
                found_B = inputs.mean_per_completion(found_T)
            case "max":
                # −inf: tokens outside the mask never win
                found_B = inputs.max_per_completion(inputs.masked(found_T, float("-inf")))
        found_T = inputs.per_token(found_B)
    found_T = found_T.exp() if is_ratio else found_T
    above_T = found_T > config.upper
    return above_T if config.lower is None else above_T | (found_T < config.lower)
