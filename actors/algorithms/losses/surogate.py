"""The Surogate GRPO loss: an importance-weighted policy gradient inside a trust region.

The coefficient is detached, so the gradient with respect to a kept token's logprob is −coeff / loss_tokens; with one
ratio per completion it is −coeff / (loss-mask tokens of the completion) / loss_tokens. Tokens that the trust region
drops count in the normaliser all the same; on them the KL and teacher terms vanish too.
"""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import ratio_of
from actors.algorithms.losses.teacher import teacher_sums, with_teacher
from actors.algorithms.losses.trust_region import kept_and_dropped
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
    ratio_T = ratio_of(log_ratio_T)
    log_ratio_sum_B = inputs.sum_per_completion(log_ratio_T)

    low_T, high_T = ratio_T < config.token_mask_low, ratio_T > config.token_mask_high
    geo_B = (log_ratio_sum_B / inputs.num_tokens_B).exp()
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
    advantages_T = with_teacher(inputs, config.adv_tau * inputs.advantages_T, config.teacher_tau)
    coeff_T = weight_T * (advantages_T - config.kl_tau * log_ratio_T)

    # both filled before they meet: a dropped token whose ratio overflowed would give 0 · inf, forward or backward
    values_T = -coeff_T.masked_fill(~keep_T, 0.0) * inputs.logprobs_T.masked_fill(~keep_T, 0.0)
    if config.ratio_type == "sequence":
        values_T = values_T / inputs.per_token(inputs.num_tokens_B)
    if config.sequence_normalizer == "micro_batches":  # undoes the average over the tokens of the step
        values_T = values_T * (max(inputs.loss_tokens, 1) / max(inputs.num_micro_batches, 1))
    causes = {"low": low_T, "high": high_T, "geo": geo_T, "sequence": sequence_T}
    sums = kept_and_dropped(inputs, keep_T, causes) | teacher_sums(inputs)
    with_gradient_T = ratio_of(inputs.masked(inputs.logprobs_T - inputs.inference_logprobs_T))
    return TokenLoss(values_T, "step_tokens", with_gradient_T, sums)
