"""How far the trainer is from the engine on the tokens that the engine sampled, and what is likely the cause.

Both compute the same function of the same weights, so on tokens of the very weights that a step starts from they differ
by numerics alone: about 1e-5 nats a token in float32, 0.01 in bfloat16. A weight that lies in the wrong place, an
adapter that is not applied or another chat template cost about 1 nat. On tokens of older weights the updates in between
come on top. So the two kinds are measured apart, and far tokens are counted besides the mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from actors.algorithms.losses.ratios import ratio_of
from schemas.config.mismatch import MismatchConfig

FAR_NATS = 1.0
"""A token whose two logprobs differ by more counts as far."""
NUMERICS_NATS = 0.3
"""What low precision may account for, mean per token."""


@dataclass(frozen=True)
class Mismatch:
    """More of it than `trainer.mismatch` allows without a word."""

    stops: bool
    cause: str
    """`model`, `numerics`, `staleness`, or `unknown` where no token tells these apart."""
    words: str


def mismatch_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Of |logp − inference| and of the k3 estimate of KL(trainer ‖ engine), on current tokens and on older ones apart.

    `mismatch_max` is no sum: over micro-batches and ranks the largest counts.
    """
    log_ratio_T = inputs.masked(inputs.logprobs_T.detach() - inputs.inference_logprobs_T)
    gap_T, kl_T = log_ratio_T.abs(), ratio_of(log_ratio_T) - log_ratio_T - 1
    sums = {
        "abs_log_ratio": gap_T.sum(),
        "far_tokens": (gap_T > FAR_NATS).sum(),
        "mismatch_max": gap_T.max(),
    }
    if inputs.versions_T is None:
        return sums
    is_current_T = inputs.versions_T >= inputs.version
    for age, of_age_T in (("current", is_current_T), ("older", ~is_current_T)):
        chosen_T = inputs.loss_mask_T & of_age_T
        sums[f"tokens_{age}"] = chosen_T.sum()
        sums[f"abs_log_ratio_{age}"] = gap_T.where(chosen_T, 0).sum()
        sums[f"kl_{age}"] = kl_T.where(chosen_T, 0).sum()
    return sums


def judged(sums: Mapping[str, float], config: MismatchConfig) -> Mismatch | None:
    """What is wrong, from the sums over a whole step; None where all is well."""
    current, older = (_mean(sums, age) for age in ("current", "older"))
    worst = max(value for value in (current, older, 0.0) if value is not None)
    if worst <= config.warn:
        return None
    stops = config.stop is not None and worst > config.stop
    cause = _cause(current, config.warn)
    measured = ", ".join(
        f"{value:.3g} nats a token on {which} weights"
        for value, which in ((current, "current"), (older, "older"))
        if value is not None
    )
    limit = f"trainer.mismatch.stop {config.stop:g}" if stops else f"trainer.mismatch.warn {config.warn:g}"
    return Mismatch(stops, cause, f"trainer and engine differ by {measured} ({limit}): {ADVICE[cause]}")


ADVICE = {
    "model": "they do not compute the same model; compare what the engine serves with model.path (dtype, tied "
    "embeddings, adapter, chat template, quantization), and look for who else changes its weights",
    "numerics": "the engine computes less precisely; compare its dtype, quantization and KV cache with model.dtype, or "
    "set trainer.correction; inference.noise looks the same",
    "staleness": "the policy moves far between sampling and training; lower packer.max_async_level, "
    "packer.max_off_policy_steps or trainer.learning_rate, or take a loss made for it, such as decoupled",
    "unknown": "every token is of older weights, so this may be staleness or another model; "
    "packer.max_async_level: 0 tells",
}


def _mean(sums: Mapping[str, float], age: str) -> float | None:
    tokens = sums.get(f"tokens_{age}", 0.0)
    return sums[f"abs_log_ratio_{age}"] / tokens if tokens else None


def _cause(current: float | None, warn: float) -> str:
    if current is None:
        return "unknown"
    if current <= warn:
        return "staleness"
    return "numerics" if current <= NUMERICS_NATS else "model"
