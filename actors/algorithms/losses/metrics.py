"""Metrics of a loss, computed from sums over all micro-batches and ranks, each with its own denominator."""

import math

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from actors.algorithms.losses.ratios import ratio_of

DENOMINATORS = {
    "mismatch_kl": ("kl", "tokens"),
    "mismatch_kl_kept": ("kl_kept", "kept_tokens"),
    "mismatch_kl_masked": ("kl_masked", "masked_tokens"),
    "masked_fraction": ("masked_tokens", "tokens"),
    "masked_fraction_low": ("masked_low", "tokens"),
    "masked_fraction_high": ("masked_high", "tokens"),
    "masked_fraction_geo": ("masked_geo", "tokens"),
    "masked_fraction_sequence": ("masked_sequence", "tokens"),
    "clip_fraction_low": ("clipped_low", "tokens"),
    "clip_fraction_high": ("clipped_high", "tokens"),
    "clip_fraction_low_completions": ("clipped_completions_low", "completions"),
    "clip_fraction_high_completions": ("clipped_completions_high", "completions"),
    "vespo_weight": ("vespo_weight", "completions"),
    "correction_fraction": ("corrected_tokens", "tokens"),
    "off_policy_fraction": ("off_policy_tokens", "tokens"),
    "low_entropy_fraction": ("low_entropy_tokens", "tokens"),
    "reference_kl": ("reference_kl", "tokens"),
    "mismatch_abs": ("abs_log_ratio", "tokens"),
    "mismatch_far": ("far_tokens", "tokens"),
    "mismatch_abs_current": ("abs_log_ratio_current", "tokens_current"),
    "mismatch_abs_older": ("abs_log_ratio_older", "tokens_older"),
    "mismatch_kl_current": ("kl_current", "tokens_current"),
    "mismatch_kl_older": ("kl_older", "tokens_older"),
    "entropy": ("entropy", "tokens"),
    "sft_nll": ("sft_nll", "sft_tokens"),
    "entropy_regularised": ("entropy_regularised", "regularised_tokens"),
    "advantage_mean": ("advantage", "tokens"),
    "teacher_kl": ("teacher_kl", "tokens"),
    "capped_fraction": ("capped_tokens", "tokens"),
    "masked_fraction_m2": ("masked_m2", "tokens"),
    "rejected_fraction": ("rejected_tokens", "tokens"),
    "proximal_kl": ("proximal_kl", "tokens"),
    "behaviour_weight": ("behaviour_weight", "kept_tokens"),
}
"""Metrics that are a quotient of two sums: numerator and denominator."""


def common_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Return the sums that every loss reports: tokens, advantages, and the distance of the trainer from the engine.

    The distance is the k3 estimate of KL(trainer ‖ engine), which is ≥ 0 for each token, and the weights
    exp(logp − inference), from which `ess` (effective sample size) is computed.
    """
    log_ratio_T = inputs.masked(inputs.logprobs_T.detach() - inputs.inference_logprobs_T)
    ratio_T = ratio_of(log_ratio_T)
    # float64: variance and sample size subtract or divide large sums of squares
    weight_T, advantages_T = inputs.masked(ratio_T).double(), inputs.masked(inputs.advantages_T).double()
    return {
        "tokens": inputs.loss_mask_T.sum(),
        "kl": (ratio_T - log_ratio_T - 1).sum(),
        "weight": weight_T.sum(),
        "weight_squared": weight_T.square().sum(),
        "advantage": advantages_T.sum(),
        "advantage_squared": advantages_T.square().sum(),
    }


def clip_sums(
    inputs: LossInputs, low_T: Tensor | None, high_T: Tensor | None, per_completion: bool = False
) -> dict[str, Tensor]:
    """Return the sums of the clip fractions per side.

    Args:
        inputs: arrays of the micro-batch.
        low_T, high_T: bool, tokens clipped on each side; None if the loss does not clip there.
        per_completion: count completions, for a ratio of the whole completion. A completion counts with the share of
            its tokens that are clipped, since the tokens' advantages may differ in sign.
    """
    # no metric for a side on which the loss never clips, instead of a constant 0
    sides = {name: flags_T for name, flags_T in (("low", low_T), ("high", high_T)) if flags_T is not None}
    if not per_completion:
        return {f"clipped_{side}": (inputs.loss_mask_T & flags_T).sum() for side, flags_T in sides.items()}
    shares = {
        f"clipped_completions_{side}": inputs.over_completion(inputs.loss_mask_T & flags_T).sum()
        for side, flags_T in sides.items()
    }
    return shares | {"completions": inputs.scored_completions}


def metrics_of(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics for which all sums are given; 0 for a denominator of 0 (as for the KL of no masked tokens)."""
    found = {name: pair for name, pair in DENOMINATORS.items() if pair[0] in sums}
    values = {name: _quotient(sums[top], sums[bottom]) for name, (top, bottom) in found.items()}
    return values | {
        name: formula(*(sums[key] for key in keys))
        for name, (formula, keys) in NON_LINEAR.items()
        if all(key in sums for key in keys)
    }


def _quotient(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


def _std(squares: float, total: float, count: float) -> float:
    """Return the population standard deviation, √(E[x²] − E[x]²)."""
    return math.sqrt(max(_quotient(squares, count) - _quotient(total, count) ** 2, 0.0))  # rounding may go below 0


def _effective_share(total: float, squares: float, count: float) -> float:
    """Return Kish's effective sample size ÷ sample size, (Σw)² ÷ (n·Σw²): 1 for equal weights, 1/n for a single one."""
    return _quotient(total**2, squares * count)


NON_LINEAR = {
    "advantage_std": (_std, ("advantage_squared", "advantage", "tokens")),
    "ess": (_effective_share, ("weight", "weight_squared", "tokens")),
}
"""Metrics with another formula than a quotient of two sums: the formula, and the sums it takes."""
