"""VESPO: logprobs weighted by a smooth function of the completion's importance ratio that vanishes far from 1."""

import math

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import log_ratio, ratio_of
from schemas.config.losses import VespoLossConfig

LEAST, MOST = math.log(1e-8), 20.0
"""Bounds of log w and of the log of a token's correction weight. A token's log ratio is bounded by ± MOST."""
LEAST_LAMBDA = 1e-4
"""Lower bound of λ; at λ = 0 the weight would grow with w without limit."""


def vespo(inputs: LossInputs, config: VespoLossConfig) -> TokenLoss:
    """Return −sg[φ(w)]·A·logp per token, (T,), φ = exp(λ + k·log w − λ·w); mean over the step's tokens.

    w = exp(Σ over the completion of logp − old), log w in [ln 1e-8, 20]; with an inference correction the sum includes
    the log of its weights. k and λ depend on the sign of A; A = 0 counts as positive. Source: VESPO, as in TRL.
    """
    log_ratio_T, advantages_T = log_ratio(inputs, config), inputs.advantages_T
    # each token's log ratio is bounded, so that a single token does not decide the sum
    total_B = inputs.sum_per_completion(log_ratio_T.detach().clamp(-MOST, MOST))
    if inputs.correction_T is not None:
        total_B = total_B + inputs.sum_per_completion(inputs.masked(inputs.correction_T.log().clamp(LEAST, MOST)))
    log_w_B = total_B.clamp(LEAST, MOST)
    pos_T = inputs.per_token(_phi(log_w_B, config.k_pos, config.lambda_pos))
    neg_T = inputs.per_token(_phi(log_w_B, config.k_neg, config.lambda_neg))
    phi_T = torch.where(advantages_T >= 0, pos_T, neg_T)
    values_T = -inputs.masked(phi_T * advantages_T) * inputs.masked(inputs.logprobs_T)
    sums = {"vespo_weight": inputs.total(inputs.mean_per_completion(phi_T)), "completions": inputs.scored_completions}
    return TokenLoss(values_T, "step_tokens", ratio_of(log_ratio_T), sums)


def _phi(log_w_B: Tensor, k: float, decay: float) -> Tensor:
    # computed as a log and exponentiated once, so that a large w gives 0, not inf · 0
    decay = max(decay, LEAST_LAMBDA)
    return (decay + k * log_w_B - decay * log_w_B.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)
