"""From the sums of all micro-batches and ranks to metrics, each with its own denominator."""

DENOMINATORS = {
    "mismatch_kl": ("kl", "tokens"),
    "mismatch_kl_kept": ("kl_kept", "kept_tokens"),
    "mismatch_kl_masked": ("kl_masked", "masked_tokens"),
    "masked_fraction": ("masked_tokens", "tokens"),
    "masked_fraction_low": ("masked_low", "tokens"),
    "masked_fraction_high": ("masked_high", "tokens"),
    "masked_fraction_geo": ("masked_geo", "tokens"),
    "masked_fraction_sequence": ("masked_sequence", "tokens"),
    "mismatch_abs": ("abs_log_ratio", "tokens"),
    "entropy": ("entropy", "tokens"),
}


def metrics_of(sums: dict[str, float]) -> dict[str, float]:
    """Metric values; one whose denominator is 0 is 0 (nothing was masked, so nothing to average)."""
    found = {name: pair for name, pair in DENOMINATORS.items() if pair[0] in sums}
    return {name: sums[top] / sums[bottom] if sums[bottom] else 0.0 for name, (top, bottom) in found.items()}
