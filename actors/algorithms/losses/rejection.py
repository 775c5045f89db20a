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
    weight_T = _weight(inputs, log_weight_T, config)
    if config.action == "clamp":
        # outside alone: where completions are judged, the weight of a token inside may exceed the bounds
        weight_T = torch.where(outside_T, weight_T.clamp(config.lower or 0.0, config.upper), weight_T)
    return Behaviour(keep_T, weight_T.masked_fill(~keep_T, 0.0), sums | _sums(mask_T, keep_T, outside_T, weight_T))


def _weight(inputs: LossInputs, log_weight_T: Tensor, config: RejectionConfig) -> Tensor:
    """Return the weights, (T,): each token's ratio, or the completion's geometric mean if ratios judge completions.

    The geometric mean is the weight whatever `agg` the completion is judged by.
    """
    if config.level == "sequence" and config.metric == "ratio":
        return ratio_of(inputs.per_token(inputs.mean_per_completion(log_weight_T)))
    return ratio_of(log_weight_T)


def _outside(inputs: LossInputs, log_weight_T: Tensor, config: RejectionConfig) -> Tensor:
    is_ratio = config.metric == "ratio"
    found_T = log_weight_T if is_ratio else kl_estimate(log_weight_T, config.metric.removeprefix("kl_"))
    if config.level == "sequence":
        found_T = inputs.per_token(_of_completions(inputs, found_T, config.agg))
    found_T = found_T.exp() if is_ratio else found_T  # ratios were aggregated as logs
    above_T = found_T > config.upper
    return above_T if config.lower is None else above_T | (found_T < config.lower)


def _of_completions(inputs: LossInputs, values_T: Tensor, agg: str) -> Tensor:
    match agg:
        case "sum":
            return inputs.sum_per_completion(inputs.masked(values_T))
        case "mean":
            return inputs.mean_per_completion(values_T)
    return inputs.max_per_completion(inputs.masked(values_T, float("-inf")))  # tokens outside the mask never win


def _sums(mask_T: Tensor, keep_T: Tensor, outside_T: Tensor, weight_T: Tensor) -> dict[str, Tensor]:
    return {
        "rejected_tokens": outside_T.sum(),
        "kept_tokens": keep_T.sum(),
        "masked_tokens": (mask_T & ~keep_T).sum(),
        "behaviour_weight": weight_T[keep_T].sum(),
    }
