"""Difference of logprobs between trainer and engine on the sampled tokens, and its likely cause.

Trainer and engine compute the same function. On tokens sampled by the weights that the step starts from ("current"),
their logprobs differ by numerics alone: about 1e-5 nats a token in float32, 0.01 in bfloat16. A misplaced weight, an
adapter not applied or another chat template costs about 1 nat. On tokens of older weights the updates since then add to
the difference. So current and older tokens are averaged separately.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from actors.algorithms.losses.ratios import ratio_of
from schemas.config.mismatch import MismatchConfig

FAR_NATS = 1.0
"""Nats; tokens with a greater difference of logprobs are counted as far (metric `mismatch_far`)."""
NUMERICS_NATS = 0.3
"""Nats, mean per token: the greatest difference that low precision is taken to explain."""


@dataclass(frozen=True)
class Mismatch:
    """Finding that the difference exceeds a limit of `trainer.mismatch`."""

    stops: bool
    """True above `trainer.mismatch.stop`: the step is not applied and the run fails."""
    cause: str
    """Likely cause: `model`, `numerics`, `staleness`, or `unknown` if there are no current tokens."""
    words: str
    """Message with figures, limit and advice."""


def mismatch_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Return sums of |logp − inference| and of the k3 estimate of KL(trainer ‖ engine), on current and on older tokens.

    `mismatch_max` is a maximum: over micro-batches and ranks take the largest value, not the sum.
    """
    log_ratio_T = inputs.masked(inputs.logprobs_T.detach() - inputs.inference_logprobs_T)
    # k3, ≥ 0 for each token, so that tokens of opposite sign do not cancel
    gap_T, kl_T = log_ratio_T.abs(), ratio_of(log_ratio_T) - log_ratio_T - 1
    sums = {
        "abs_log_ratio": gap_T.sum(),
        "far_tokens": (gap_T > FAR_NATS).sum(),
        "mismatch_max": gap_T.max(),
    }
    if inputs.versions_T is None:
        return sums
    # ≥: a version above would be a fault elsewhere, and its tokens must not hide among the older ones
    is_current_T = inputs.versions_T >= inputs.version
    for age, of_age_T in (("current", is_current_T), ("older", ~is_current_T)):
        chosen_T = inputs.loss_mask_T & of_age_T
        sums[f"tokens_{age}"] = chosen_T.sum()
        sums[f"abs_log_ratio_{age}"] = gap_T.where(chosen_T, 0).sum()
        sums[f"kl_{age}"] = kl_T.where(chosen_T, 0).sum()
    return sums


def judged(sums: Mapping[str, float], config: MismatchConfig) -> Mismatch | None:
    """Judge the sums of a whole step; None if the mean difference is at most `trainer.mismatch.warn`.

    Args:
        sums: `mismatch_sums` added up over micro-batches and ranks.
        config: limits in nats.
    """
    # an age of which the step has no tokens has no mean
    means = {
        age: sums[f"abs_log_ratio_{age}"] / sums[f"tokens_{age}"]
        for age in ("current", "older")
        if sums.get(f"tokens_{age}", 0.0)
    }
    worst = max([*means.values(), 0.0])
    if worst <= config.warn:
        return None
    stops = config.stop is not None and worst > config.stop
    current = means.get("current")
    if current is None:
        cause = "unknown"
    elif current <= config.warn:
        # current tokens agree, so only the age of the others explains the difference
        cause = "staleness"
    else:
        cause = "numerics" if current <= NUMERICS_NATS else "model"
    measured = ", ".join(f"{value:.3g} nats a token on {age} weights" for age, value in means.items())
    limit = f"trainer.mismatch.stop {config.stop:g}" if stops else f"trainer.mismatch.warn {config.warn:g}"
    return Mismatch(stops, cause, f"trainer and engine differ by {measured} ({limit}): {ADVICE[cause]}")


ADVICE = {
    "model": "they do not compute the same model; compare what the engine serves with model.path (dtype, tied "
    "embeddings, adapter, chat template, quantization), and look for another process that changes its weights",
    "numerics": "the engine computes less precisely; compare its dtype, quantization and KV cache with model.dtype, or "
    "set trainer.correction; inference.noise looks the same",
    "staleness": "the policy moves far between sampling and training; lower packer.max_async_level, "
    "packer.max_off_policy_steps or trainer.learning_rate, or take a loss made for it, such as decoupled",
    "unknown": "all tokens were sampled by older weights: either they are too old or the model differs; "
    "packer.max_async_level: 0 tells",
}
"""Advice to the user, by cause."""
