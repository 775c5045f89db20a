"""From the sums of all micro-batches and ranks to metrics, each with its own denominator."""

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs

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
    "correction_fraction": ("corrected_tokens", "tokens"),
    "off_policy_fraction": ("off_policy_tokens", "tokens"),
    "low_entropy_fraction": ("low_entropy_tokens", "tokens"),
    "reference_kl": ("reference_kl", "tokens"),
    "mismatch_abs": ("abs_log_ratio", "tokens"),
    "entropy": ("entropy", "tokens"),
}


def mismatch_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Of every loss: its tokens, and the k3 estimate of KL(trainer ‖ engine), which is ≥ 0 token by token."""
    log_ratio_T = inputs.masked(inputs.logprobs_T.detach() - inputs.inference_logprobs_T)
    return {"tokens": inputs.loss_mask_T.sum(), "kl": (log_ratio_T.exp() - log_ratio_T - 1).sum()}


def metrics_of(sums: dict[str, float]) -> dict[str, float]:
    """Metric values; one whose denominator is 0 is 0 (nothing was masked, so nothing to average)."""
    found = {name: pair for name, pair in DENOMINATORS.items() if pair[0] in sums}
    return {name: sums[top] / sums[bottom] if sums[bottom] else 0.0 for name, (top, bottom) in found.items()}
