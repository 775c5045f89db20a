"""The Surogate GRPO loss: an importance-weighted policy gradient inside a trust region.

The coefficient is detached, so the gradient with respect to a kept token's logprob is −coeff / loss_tokens. Tokens that
the trust region drops count in the normaliser all the same; on them the KL and teacher terms vanish too.
"""

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from schemas.config.losses import SurogateLossConfig

MAX_LOG_RATIO = 10.0
"""Cap of the summed log ratio before exp; sequence_clip_high caps the result."""


def surogate(inputs: LossInputs, config: SurogateLossConfig) -> TokenLoss:
    """Values per token and metric sums of one micro-batch.

    Source: Surogate, RL training guide, "GRPO Loss Formula".
    """
    mask_T = inputs.loss_mask_T
    logprobs_T = inputs.logprobs_T.detach()
    log_ratio_T = (logprobs_T - inputs.inference_logprobs_T).masked_fill(~mask_T, 0.0)
    ratio_T = log_ratio_T.exp()
    num_tokens_B = inputs.sum_per_completion(mask_T.to(ratio_T.dtype)).clamp(min=1)
    log_ratio_sum_B = inputs.sum_per_completion(log_ratio_T)

    low_T, high_T = ratio_T < config.token_mask_low, ratio_T > config.token_mask_high
    geo_B = (log_ratio_sum_B / num_tokens_B).exp()
    geo_masked_B = (geo_B < config.geo_mask_low) | (geo_B > config.geo_mask_high)
    smallest_B = inputs.min_per_completion(ratio_T.masked_fill(~mask_T, float("inf")))
    largest_B = inputs.max_per_completion(ratio_T.masked_fill(~mask_T, float("-inf")))
    sequence_masked_B = (smallest_B < config.sequence_mask_low) | (largest_B > config.sequence_mask_high)
    geo_T, sequence_T = geo_masked_B[inputs.completion_of_T], sequence_masked_B[inputs.completion_of_T]
    masked_T = low_T | high_T | geo_T | sequence_T
    keep_T = mask_T & ~masked_T

    weight_T = ratio_T
    if config.ratio_type == "sequence":
        sequence_ratio_B = log_ratio_sum_B.clamp(max=MAX_LOG_RATIO).exp().clamp(max=config.sequence_clip_high)
        weight_T = sequence_ratio_B[inputs.completion_of_T]
    advantages_T = config.adv_tau * inputs.advantages_T
    if config.teacher_tau and inputs.teacher_logprobs_T is not None:
        advantages_T = advantages_T + config.teacher_tau * (inputs.teacher_logprobs_T - logprobs_T)
    coeff_T = weight_T * (advantages_T - config.kl_tau * log_ratio_T)

    # both filled before they meet: a dropped token whose ratio overflowed would give 0 · inf, forward or backward
    values_T = -coeff_T.masked_fill(~keep_T, 0.0) * inputs.logprobs_T.masked_fill(~keep_T, 0.0)
    causes = {"low": low_T, "high": high_T, "geo": geo_T, "sequence": sequence_T}
    return TokenLoss(values_T, "step_tokens", ratio_T, _sums(mask_T, keep_T, ratio_T, log_ratio_T, causes))


def _sums(
    mask_T: Tensor, keep_T: Tensor, ratio_T: Tensor, log_ratio_T: Tensor, causes: dict[str, Tensor]
) -> dict[str, Tensor]:
    kl_T = ratio_T - log_ratio_T - 1  # k3 of the trainer from the engine, ≥ 0 token by token
    dropped_T = mask_T & ~keep_T
    sums = {
        "kept_tokens": keep_T.sum(),
        "masked_tokens": dropped_T.sum(),
        "kl_kept": kl_T[keep_T].sum(),
        "kl_masked": kl_T[dropped_T].sum(),
    }
    return sums | {f"masked_{cause}": (mask_T & flags_T).sum() for cause, flags_T in causes.items()}
