"""Importance ratios exp(logp − old) of the trainer's policy, per token or per completion."""

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from schemas.config.losses import LevelLossConfig, RatioLossConfig

MAX_LOG_RATIO = 40.0
"""Upper bound of a log ratio before exp, so that neither a ratio nor a product of two overflows in float32."""


def log_ratio(inputs: LossInputs, config: RatioLossConfig) -> Tensor:
    """Return logp − old with gradient, (T,), 0 outside the loss mask; `config.old_logprobs` chooses `old`."""
    old_T = inputs.inference_logprobs_T if config.old_logprobs == "inference" else inputs.old_T
    return inputs.masked(inputs.logprobs_T - old_T)


def at_level(inputs: LossInputs, log_ratio_T: Tensor, level: str) -> Tensor:
    """Return log ratios at an importance sampling level, (T,).

    `token`: each token's own. `sequence`: the mean over the completion (GSPO). `sequence_token`: the value of the
    completion's mean with the gradient of the token (GSPO-token).
    """
    if level == "token":
        return log_ratio_T
    if level == "sequence":
        return inputs.per_token(inputs.mean_per_completion(log_ratio_T))
    # log ratio − its detached self is 0 in value and has the token's gradient
    mean_T = inputs.per_token(inputs.mean_per_completion(log_ratio_T.detach()))
    return mean_T + log_ratio_T - log_ratio_T.detach()


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log ratio) with the log ratio capped at 40, so always finite; any shape."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def ratio_at_level(inputs: LossInputs, config: LevelLossConfig) -> Tensor:
    """Return the importance ratio that the loss's configuration names, (T,), with gradient."""
    return ratio_of(at_level(inputs, log_ratio(inputs, config), config.importance_sampling_level))


def advantages_at_level(inputs: LossInputs, config: LevelLossConfig) -> Tensor:
    """Return each token's own advantage, or the mean over its completion (`compat.advantage_level`), (T,)."""
    if config.compat.advantage_level == "token":
        return inputs.advantages_T
    return inputs.per_token(inputs.mean_per_completion(inputs.advantages_T))
