"""Importance ratios of the trainer's policy, and what they are taken to."""

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from schemas.config.losses import LevelLossConfig, RatioLossConfig

MAX_LOG_RATIO = 40.0
"""Log ratios are capped here before exp, so that in float32 neither a ratio nor a product of two is infinite."""


def log_ratio(inputs: LossInputs, config: RatioLossConfig) -> Tensor:
    """(T,) logp − old with gradient, 0 outside the loss mask; `old` as the configuration names it."""
    old_T = inputs.inference_logprobs_T if config.old_logprobs == "inference" else inputs.old_T
    return inputs.masked(inputs.logprobs_T - old_T)


def at_level(inputs: LossInputs, log_ratio_T: Tensor, level: str) -> Tensor:
    """(T,) log ratios at an importance sampling level: of each token, or the mean of its completion.

    `sequence_token` has the value of the completion's mean and the gradient of the token (GSPO-token).
    """
    if level == "token":
        return log_ratio_T
    if level == "sequence":
        return inputs.per_token(inputs.mean_per_completion(log_ratio_T))
    mean_T = inputs.per_token(inputs.mean_per_completion(log_ratio_T.detach()))
    return mean_T + log_ratio_T - log_ratio_T.detach()


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log ratio), finite; of any shape."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def ratio_at_level(inputs: LossInputs, config: LevelLossConfig) -> Tensor:
    """(T,) the importance ratio that a configuration names, with gradient."""
    return ratio_of(at_level(inputs, log_ratio(inputs, config), config.importance_sampling_level))


def advantages_at_level(inputs: LossInputs, config: LevelLossConfig) -> Tensor:
    """(T,) each token's own advantage, or the mean of its completion's."""
    if config.advantage_level == "token":
        return inputs.advantages_T
    return inputs.per_token(inputs.mean_per_completion(inputs.advantages_T))
