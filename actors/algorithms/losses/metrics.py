"""From the sums of all micro-batches and ranks to metrics, each with its own denominator."""

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


def common_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Of every loss: its tokens and their advantages, and how far the trainer is from the engine.

    That is the k3 estimate of KL(trainer ‖ engine), which is ≥ 0 token by token, and the weights exp(logp − inference)
    that the effective sample size is of.
    """
    log_ratio_T = inputs.masked(inputs.logprobs_T.detach() - inputs.inference_logprobs_T)
    ratio_T = ratio_of(log_ratio_T)
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
    """Of the clip fractions, from (T,) bool: what is clipped on either side, where the loss clips there at all.

    Counted in tokens, or, for a ratio of the whole completion, in completions (a share of one, where its tokens'
    advantages have both signs).
    """
    sides = {name: flags_T for name, flags_T in (("low", low_T), ("high", high_T)) if flags_T is not None}
    if not per_completion:
        return {f"clipped_{side}": (inputs.loss_mask_T & flags_T).sum() for side, flags_T in sides.items()}
    shares = {
        f"clipped_completions_{side}": ((inputs.loss_mask_T & flags_T) / inputs.num_tokens_T).sum()
        for side, flags_T in sides.items()
    }
    return shares | {"completions": inputs.scored_completions}


def metrics_of(sums: dict[str, float]) -> dict[str, float]:
    """Metric values; one whose denominator is 0 is 0 (nothing was masked, so nothing to average)."""
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
    """Of the population."""
    return math.sqrt(max(_quotient(squares, count) - _quotient(total, count) ** 2, 0.0))


def _effective_share(total: float, squares: float, count: float) -> float:
    """Kish's effective sample size ÷ the sample size: 1 for equal weights, 1/n where one outweighs all."""
    return _quotient(total**2, squares * count)


NON_LINEAR = {
    "advantage_std": (_std, ("advantage_squared", "advantage", "tokens")),
    "ess": (_effective_share, ("weight", "weight_squared", "tokens")),
}
"""Metrics that are no quotient of two sums: their formula, and the sums that it takes."""
