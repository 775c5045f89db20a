"""The switches that combine with any loss: each takes the values per token and gives them back changed.

Correction and masks multiply what the loss alone makes; the reference KL and the entropy come after them and so escape
every one of them (TRL's convention), unless `reference.switches` says otherwise.
"""

from dataclasses import replace

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from actors.algorithms.losses.ratios import ratio_of
from schemas.config.objective import CorrectionConfig, ObjectiveConfig, ReferenceConfig

Sums = dict[str, Tensor]


def with_weights(inputs: LossInputs, objective: ObjectiveConfig, sums: Sums) -> LossInputs:
    """The inputs with the weights and the mask that some losses take inside, of the switches that this one minds."""
    if objective.correction is not None and "correction" not in objective.loss.ignores:
        inputs = replace(inputs, correction_T=correction_weights(inputs, objective.correction, sums))
    if objective.top_entropy_quantile < 1:
        inputs = replace(inputs, high_entropy_T=high_entropy(inputs, objective.top_entropy_quantile, sums))
    return inputs


def correction_weights(inputs: LossInputs, config: CorrectionConfig, sums: Sums) -> Tensor:
    """(T,) weights exp(old − inference), clamped into the bounds, or 0 outside of them."""
    log_ratio_T = inputs.masked(inputs.old_T - inputs.inference_logprobs_T)
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
    """(T,) bool, tokens whose entropy reaches the quantile of this micro-batch ("beyond the 80/20 rule").

    Source: TRL, whose quantile is of all ranks' micro-batches, and ms-swift.
    """
    if inputs.entropy_T is None:
        raise ValueError("entropy_T: top_entropy_quantile needs the entropy of each token")
    entropy_T, mask_T = inputs.entropy_T.detach(), inputs.loss_mask_T
    inside = entropy_T[mask_T].float()
    high_T = mask_T & (entropy_T >= torch.quantile(inside, 1 - share)) if inside.numel() else mask_T
    sums["low_entropy_tokens"] = (mask_T & ~high_T).sum()
    return high_T


def off_policy(inputs: LossInputs, threshold: float, sums: Sums) -> Tensor:
    """(T,) bool, what the off-policy sequence mask drops: A < 0 and a mean of (inference − logp) above the threshold.

    Source: DeepSeek-V3.2, as in TRL and ms-swift.
    """
    gap_T = inputs.inference_logprobs_T - inputs.logprobs_T.detach()
    far_T = inputs.per_token(inputs.mean_per_completion(gap_T) > threshold)
    dropped_T = inputs.loss_mask_T & far_T & (inputs.advantages_T < 0)
    sums["off_policy_tokens"] = dropped_T.sum()
    return dropped_T


def reference_kl(inputs: LossInputs, objective: ObjectiveConfig, ratio_T: Tensor | None, sums: Sums) -> Tensor | None:
    """(T,) β × the KL from the reference, where it stands in the loss; None where it does not."""
    config = objective.reference
    if config is None:
        return None
    with torch.set_grad_enabled(config.place == "loss" and torch.is_grad_enabled()):
        kl_T = kl_of(inputs, inputs.logprobs_T, config)
    sums["reference_kl"] = kl_T.detach().sum()
    if config.place == "reward":  # it is in the advantages already, by `kl_in_reward`
        return None
    if config.bias_correction:
        kl_T = kl_T * (ratio_of(inputs.masked(inputs.logprobs_T - inputs.old_T)) if ratio_T is None else ratio_T)
    return config.beta * inputs.masked(kl_T)


def kl_of(inputs: LossInputs, logprobs_T: Tensor, config: ReferenceConfig) -> Tensor:
    """(T,) the configured estimate of a policy's KL from the reference, 0 outside the loss mask."""
    if inputs.reference_logprobs_T is None:
        raise ValueError("reference_logprobs_T: objective.reference needs the reference model's logprobs")
    kl_T = kl_estimate(inputs.masked(logprobs_T - inputs.reference_logprobs_T), config.estimator)
    return kl_T if config.max_kl is None else kl_T.clamp(-config.max_kl, config.max_kl)


def kl_estimate(d: Tensor, estimator: str) -> Tensor:
    """KL(policy ‖ reference) from d = logp − ref of tokens that the policy drew: k1, k2 or k3 (Schulman)."""
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return ratio_of(-d) - 1 + d
    raise ValueError(f"{estimator}: expected k1, k2 or k3")


def kl_in_reward(inputs: LossInputs, objective: ObjectiveConfig) -> Tensor:
    """(T,) advantages with the reference KL as a reward of each token: minus β × the KL of this and all later ones.

    Source: AReaL (kl_ctl, discount and lambda 1).
    """
    config = objective.reference
    if config is None or config.place != "reward":
        return inputs.advantages_T
    policy_T = inputs.old_T if config.old_logprobs == "step_start" else inputs.inference_logprobs_T
    kl_T = kl_of(inputs, policy_T, config).double()  # differences of sums over all completions lose digits in float32
    ends_B = inputs.sum_per_completion(kl_T).cumsum(0)
    later_T = inputs.per_token(ends_B) - (kl_T.cumsum(0) - kl_T)
    return inputs.advantages_T - config.beta * later_T.to(inputs.advantages_T.dtype)


def entropy_bonus(inputs: LossInputs, objective: ObjectiveConfig, sums: Sums) -> Tensor | None:
    """Scalar, this micro-batch's share of entropy_coef × the mean entropy of the step, with gradient.

    Source: TRL; where top_entropy_quantile is set, the mean is over the tokens it keeps.
    """
    if not objective.entropy_coef and objective.adaptive_entropy is None:
        return None
    if inputs.entropy_T is None:
        raise ValueError("entropy_T: entropy_coef needs the entropy of each token")
    kept_T = inputs.loss_mask_T if inputs.high_entropy_T is None else inputs.high_entropy_T
    total, count = inputs.entropy_T.masked_fill(~kept_T, 0.0).sum(), kept_T.sum()
    sums |= {"entropy_regularised": total.detach(), "regularised_tokens": count}
    mean = total / count.clamp(min=1)
    if objective.entropy_average == "micro_batch_tokens":
        return objective.entropy_coef * mean / max(inputs.num_micro_batches, 1)
    return objective.entropy_coef * mean * inputs.loss_mask_T.sum() / max(inputs.loss_tokens, 1)
