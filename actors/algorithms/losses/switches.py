"""The switches that combine with any loss: each takes the values per token and gives them back changed.

Correction and masks multiply what the loss alone makes; the reference KL and the entropy come after them and so escape
every one of them (TRL's convention).
"""

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from schemas.config.objective import ObjectiveConfig

Sums = dict[str, Tensor]


def corrected(inputs: LossInputs, objective: ObjectiveConfig, values_T: Tensor, sums: Sums) -> Tensor:
    """Inference correction: values × exp(old − inference), truncated or masked."""
    config = objective.correction
    if config is None:
        return values_T
    log_ratio_T = inputs.masked(inputs.old_T - inputs.inference_logprobs_T)
    if config.level == "sequence":
        total_B = inputs.sum_per_completion(log_ratio_T)
        log_ratio_T = inputs.per_token(total_B if config.sequence_ratio == "sum" else total_B / inputs.num_tokens_B)
    weight_T = log_ratio_T.exp()
    outside_T = inputs.loss_mask_T & ((weight_T < config.low) | (weight_T > config.high))
    sums["corrected_tokens"] = outside_T.sum()
    if config.mode == "truncate":
        return values_T * weight_T.clamp(config.low, config.high)
    return (values_T * weight_T.masked_fill(outside_T, 0.0)).masked_fill(outside_T, 0.0)


def on_policy_enough(inputs: LossInputs, objective: ObjectiveConfig, values_T: Tensor, sums: Sums) -> Tensor:
    """Off-policy sequence mask: drop completions with A < 0 and a mean of (inference − logp) above the threshold.

    Source: DeepSeek-V3.2, as in TRL.
    """
    threshold = objective.off_policy_mask_threshold
    if threshold is None:
        return values_T
    gap_T = inputs.inference_logprobs_T - inputs.logprobs_T.detach()
    far_T = inputs.per_token(inputs.mean_per_completion(gap_T) > threshold)
    dropped_T = inputs.loss_mask_T & far_T & (inputs.advantages_T < 0)
    sums["off_policy_tokens"] = dropped_T.sum()
    return values_T.masked_fill(dropped_T, 0.0)


def high_entropy(inputs: LossInputs, objective: ObjectiveConfig, values_T: Tensor, sums: Sums) -> Tensor:
    """Keep the tokens whose entropy reaches the quantile of this micro-batch ("beyond the 80/20 rule", as in TRL)."""
    if objective.top_entropy_quantile >= 1:
        return values_T
    if inputs.entropy_T is None:
        raise ValueError("entropy_T: top_entropy_quantile needs the entropy of each token")
    entropy_T = inputs.entropy_T.detach().float()
    inside = entropy_T[inputs.loss_mask_T]
    if not inside.numel():
        return values_T
    low_T = entropy_T < torch.quantile(inside, 1 - objective.top_entropy_quantile)
    sums["low_entropy_tokens"] = (inputs.loss_mask_T & low_T).sum()
    return values_T.masked_fill(low_T, 0.0)


def reference_kl(inputs: LossInputs, objective: ObjectiveConfig, ratio_T: Tensor | None, sums: Sums) -> Tensor:
    """(T,) β × the KL from the reference, where it stands in the loss; zeros where it does not."""
    config = objective.reference
    if config is None:
        return torch.zeros_like(inputs.logprobs_T)
    if inputs.reference_logprobs_T is None:
        raise ValueError("reference_logprobs_T: objective.reference needs the reference model's logprobs")
    kl_T = kl_estimate(inputs.masked(inputs.logprobs_T - inputs.reference_logprobs_T), config.estimator)
    sums["reference_kl"] = kl_T.detach().sum()
    if config.place == "reward":  # it is in the advantages already, see `kl_in_reward`
        return torch.zeros_like(inputs.logprobs_T)
    if config.bias_correction:
        kl_T = kl_T * ((inputs.logprobs_T - inputs.old_T).exp() if ratio_T is None else ratio_T)
    return config.beta * inputs.masked(kl_T)


def kl_estimate(d: Tensor, estimator: str) -> Tensor:
    """KL(policy ‖ reference) from d = logp − ref of tokens that the policy drew: k1, k2 or k3 (Schulman)."""
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(-d) + d
    raise ValueError(f"{estimator}: expected k1, k2 or k3")


def kl_in_reward(inputs: LossInputs, objective: ObjectiveConfig) -> Tensor:
    """(T,) advantages with the reference KL as a reward of each token: minus β × the KL of this and all later ones.

    Source: AReaL (kl_ctl, discount and lambda 1).
    """
    config = objective.reference
    if config is None or config.place != "reward" or inputs.reference_logprobs_T is None:
        return inputs.advantages_T
    kl_T = kl_estimate(inputs.masked(inputs.old_T - inputs.reference_logprobs_T), config.estimator)
    before_T = kl_T.cumsum(0) - kl_T
    total_T = inputs.per_token(inputs.sum_per_completion(kl_T))
    places_T = torch.arange(kl_T.numel(), device=kl_T.device, dtype=torch.float64)
    first_T = inputs.per_token(inputs.min_per_completion(places_T).long())
    return inputs.advantages_T - config.beta * (total_T - (before_T - before_T[first_T]))


def entropy_bonus(inputs: LossInputs, objective: ObjectiveConfig) -> Tensor:
    """(T,) entropy_coef × entropy, with gradient; zeros without a coefficient."""
    if not objective.entropy_coef:
        return torch.zeros_like(inputs.logprobs_T)
    if inputs.entropy_T is None:
        raise ValueError("entropy_T: entropy_coef needs the entropy of each token")
    return objective.entropy_coef * inputs.masked(inputs.entropy_T)
