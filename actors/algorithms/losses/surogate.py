"""Surogate's GRPO loss: an importance-weighted policy gradient inside a trust region.

The coefficient c is detached, so the gradient at a kept token's logprob is −c / loss_tokens. With a ratio per
completion the gradient is −c / (loss-mask tokens of the completion) / loss_tokens. Tokens dropped by the trust region
have no KL and no teacher term either, but stay in the denominator.
"""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import ratio_of
from actors.algorithms.losses.teacher import teacher_sums, with_teacher
from actors.algorithms.losses.trust_region import kept_and_dropped
from schemas.config.losses import SurogateLossConfig

MAX_LOG_RATIO = 10.0
"""Upper bound of a completion's summed log ratio before exp; sequence_clip_high is the bound of the ratio itself."""


def surogate(inputs: LossInputs, config: SurogateLossConfig) -> TokenLoss:
    """Return −sg[c]·logp on kept tokens, (T,), c = R·(adv_tau·A + teacher_tau·(teacher − logp) − kl_tau·log r).

    r = exp(logp − inference); R = r, or with ratio_type `sequence` min(exp(min(Σ log r, 10)), sequence_clip_high) of
    the completion. A token is kept if r, the geometric mean of the completion's r, and the completion's least and
    greatest r are within their bounds. With ratio_type `sequence` each value is also divided by the loss-mask tokens of
    its completion. Source: Surogate, RL training guide, "GRPO Loss Formula".
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

    # both factors are filled before the product: an overflowed ratio of a dropped token would give 0 · inf
    values_T = -coeff_T.masked_fill(~keep_T, 0.0) * inputs.logprobs_T.masked_fill(~keep_T, 0.0)
    if config.ratio_type == "sequence":
        values_T = inputs.over_completion(values_T)
    if config.compat.sequence_normalizer == "micro_batches":  # undoes the average over the tokens of the step
        values_T = values_T * (max(inputs.loss_tokens, 1) / max(inputs.num_micro_batches, 1))
    causes = {"low": low_T, "high": high_T, "geo": geo_T, "sequence": sequence_T}
    sums = kept_and_dropped(inputs, keep_T, causes) | teacher_sums(inputs)
    with_gradient_T = ratio_of(inputs.masked(inputs.logprobs_T - inputs.inference_logprobs_T))
    return TokenLoss(values_T, "step_tokens", with_gradient_T, sums, rules=causes)
