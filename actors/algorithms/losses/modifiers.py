"""Modifiers that combine with any loss: inference correction, entropy quantile, off-policy mask, KL, entropy bonus.

Correction and masks act on the loss alone. The reference KL and the entropy bonus are added afterwards, so no modifier
has an effect on them (TRL's convention), unless `reference.switches` is `apply`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from actors.algorithms.losses.ratios import ratio_of
from schemas.config.objective import CorrectionConfig, ObjectiveConfig, ReferenceConfig

Sums = dict[str, Tensor]
"""Sums of metrics, see `LossOutput.sums`; the functions below add theirs in place."""


def with_weights(inputs: LossInputs, objective: ObjectiveConfig, sums: Sums) -> LossInputs:
    """Return the inputs with correction weights and high-entropy mask, if these modifiers are set and not ignored."""
    if objective.correction is not None and "correction" not in objective.loss.ignores:
        inputs = replace(inputs, correction_T=correction_weights(inputs, objective.correction, sums))
    if objective.top_entropy_quantile < 1:
        inputs = replace(inputs, high_entropy_T=high_entropy(inputs, objective.top_entropy_quantile, sums))
    return inputs


def correction_weights(inputs: LossInputs, config: CorrectionConfig, sums: Sums) -> Tensor:
    """Return the weights exp(old − inference), (T,), clamped into the bounds (truncate) or 0 outside (mask).

    With level `sequence` the completion's ratio is judged: exp of the sum of its log ratios, or of their mean. Source:
    TIS, MIS and IcePop, as in TRL and ms-swift.
    """
    log_ratio_T = inputs.masked(inputs.old_T - inputs.inference_logprobs_T)
    if inputs.missing_T is not None:  # TRL: a missing logprob is a difference of 0, also in the completion's sum
        log_ratio_T = log_ratio_T.masked_fill(inputs.missing_T, 0.0)
    judged_T = weight_T = ratio_of(log_ratio_T)
    if config.level == "sequence":
        total_B = inputs.sum_per_completion(log_ratio_T)
        judged_B = ratio_of(total_B if config.sequence_ratio == "sum" else total_B / inputs.num_tokens_B)
        judged_T = inputs.per_token(judged_B)
        weight_T = judged_T if config.mode == "truncate" or config.sequence_weight == "completion" else weight_T
    outside_T = (judged_T < config.low) | (judged_T > config.high)
    sums["corrected_tokens"] = (inputs.loss_mask_T & outside_T).sum()
    if config.mode == "truncate":
        return weight_T.clamp(config.low, config.high)
    return weight_T.masked_fill(outside_T, 0.0)


def high_entropy(inputs: LossInputs, share: float, sums: Sums) -> Tensor:
    """Return the loss-mask tokens of highest entropy, (T,) bool: the share `share` of this micro-batch.

    Source: "Beyond the 80/20 rule"; TRL, whose quantile is over the micro-batches of all ranks; ms-swift.

    Raises:
        ValueError: inputs.entropy_T is missing.
    """
    if inputs.entropy_T is None:
        raise ValueError("entropy_T: top_entropy_quantile needs the entropy of each token")
    entropy_T, mask_T = inputs.entropy_T.detach(), inputs.loss_mask_T
    # of this micro-batch alone: a quantile over all would need all micro-batches in memory. quantile takes neither
    # bfloat16 nor an empty tensor
    inside = entropy_T[mask_T].float()
    high_T = mask_T & (entropy_T >= torch.quantile(inside, 1 - share)) if inside.numel() else mask_T
    sums["low_entropy_tokens"] = (mask_T & ~high_T).sum()
    return high_T


def off_policy(inputs: LossInputs, threshold: float, sums: Sums) -> Tensor:
    """Return the tokens that the off-policy sequence mask drops, (T,) bool.

    Dropped: A < 0, in a completion with a mean of (inference − logp) above the threshold.
    Source: DeepSeek-V3.2, as in TRL and ms-swift.
    """
    gap_T = inputs.inference_logprobs_T - inputs.logprobs_T.detach()
    far_T = inputs.per_token(inputs.mean_per_completion(gap_T) > threshold)
    dropped_T = inputs.loss_mask_T & far_T & (inputs.advantages_T < 0)
    sums["off_policy_tokens"] = dropped_T.sum()
    return dropped_T


def reference_kl(inputs: LossInputs, objective: ObjectiveConfig, ratio_T: Tensor | None, sums: Sums) -> Tensor | None:
    """Return β × the KL from the reference, (T,); None if no KL is added to the loss (`reference.place`)."""
    config = objective.reference
    if config is None:
        return None
    # a KL in the reward is still measured for its metric, without a graph
    with torch.set_grad_enabled(config.place == "loss" and torch.is_grad_enabled()):
        kl_T = kl_of(inputs, inputs.logprobs_T, config)
    sums["reference_kl"] = kl_T.detach().sum()
    if config.place != "loss":  # the advantages contain the KL already
        return None
    if config.bias_correction:
        # the loss's own ratio, at its level and to its denominator
        kl_T = kl_T * (ratio_of(inputs.masked(inputs.logprobs_T - inputs.old_T)) if ratio_T is None else ratio_T)
    return config.beta * inputs.masked(kl_T)


def kl_of(inputs: LossInputs, logprobs_T: Tensor, config: ReferenceConfig) -> Tensor:
    """Return the configured estimate of a policy's KL from the reference, (T,), 0 outside the loss mask.

    Raises:
        ValueError: inputs.reference_logprobs_T is missing.
    """
    if inputs.reference_logprobs_T is None:
        raise ValueError("reference_logprobs_T: objective.reference needs the reference model's logprobs")
    kl_T = kl_estimate(inputs.masked(logprobs_T - inputs.reference_logprobs_T), config.estimator)
    return kl_T if config.max_kl is None else kl_T.clamp(-config.max_kl, config.max_kl)


def kl_estimate(d: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy ‖ reference) from d = logp − ref of tokens drawn by the policy, any shape (Schulman).

    k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d; k2 and k3 are ≥ 0.
    """
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return ratio_of(-d) - 1 + d
    raise ValueError(f"{estimator}: expected k1, k2 or k3")


def kl_in_reward(inputs: LossInputs, objective: ObjectiveConfig) -> Tensor:
    """Return advantages − β × the KL of this and all later tokens of the completion, (T,), with `place: reward`.

    A later KL is discounted by `inputs.reward_discount` for each loss token between. Other places leave the advantages
    as they are. Source: AReaL 1.0.4, PPOActor (kl_ctl).
    """
    config = objective.reference
    if config is None or config.place != "reward":
        return inputs.advantages_T
    policy_T = inputs.old_T if config.old_logprobs == "step_start" else inputs.inference_logprobs_T
    # float64, since each value is a sum over up to a whole completion
    mask_T, kl_T = inputs.loss_mask_T, kl_of(inputs, policy_T, config).double()
    later_T = torch.zeros_like(kl_T)
    later_T[mask_T] = discounted_sums(kl_T[mask_T], inputs.completion_of_T[mask_T], inputs.reward_discount)
    return inputs.advantages_T - config.beta * later_T.to(inputs.advantages_T.dtype)


def discounted_sums(values_T: Tensor, completion_of_T: Tensor, discount: float) -> Tensor:
    """Return discounted sums over this and all later tokens of a completion, S_t = v_t + discount·S_{t+1}, (T,).

    Values 1, 2, 4 of one completion with discount ½: 3, 4, 4.
    """
    total_T, reach = values_T, 1
    while reach < values_T.numel():  # log₂ T rounds on the device, each doubles the span of the sums
        same_T = completion_of_T[reach:] == completion_of_T[:-reach]
        later_T = total_T[reach:].where(same_T, 0) * discount**reach
        total_T = torch.cat([total_T[:-reach] + later_T, total_T[-reach:]])
        reach *= 2
    return total_T


def entropy_bonus(inputs: LossInputs, objective: ObjectiveConfig, sums: Sums) -> Tensor | None:
    """Return this micro-batch's share of entropy_coef × mean entropy, a scalar with gradient; None without a bonus.

    With top_entropy_quantile the mean is over the kept tokens. `loss.compat.entropy_average` chooses the average over
    the step: of micro-batch means, weighted equally or by loss-mask tokens. Source: TRL.

    Raises:
        ValueError: inputs.entropy_T is missing.
    """
    if not objective.entropy_coef and objective.adaptive_entropy is None:
        return None
    if inputs.entropy_T is None:
        raise ValueError("entropy_T: entropy_coef needs the entropy of each token")
    kept_T = inputs.loss_mask_T if inputs.high_entropy_T is None else inputs.high_entropy_T
    total, count = inputs.entropy_T.masked_fill(~kept_T, 0.0).sum(), kept_T.sum()
    sums |= {"entropy_regularised": total.detach(), "regularised_tokens": count}
    mean = total / count.clamp(min=1)
    # both averages weigh micro-batch means, so that top_entropy_quantile does not shrink the bonus
    if objective.loss.compat.entropy_average == "micro_batch_tokens":
        return objective.entropy_coef * mean / max(inputs.num_micro_batches, 1)
    return objective.entropy_coef * mean * inputs.loss_mask_T.sum() / max(inputs.loss_tokens, 1)
