"""AReaL's decoupled PPO: the ratio is clipped around a proximal policy, and a weight covers engine to proximal policy.

engine (sampled) ── behaviour weight, rejection ──▶ proximal ── ratio, clip ──▶ trainer
"""

from dataclasses import replace

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import at_level, ratio_of
from actors.algorithms.losses.rejection import judged
from schemas.config.losses import ProximalLossConfig


def decoupled(inputs: LossInputs, config: ProximalLossConfig) -> TokenLoss:
    """Return max(−ρA, −clip(ρ)·A) × exp(prox − inference) per kept token, (T,), ρ = exp(logp − prox).

    Without `rejection_sampling` the weight exp(prox − inference) is 1 and all tokens are kept. Means over a completion
    are over the tokens that rejection keeps. The average is over all loss-mask tokens of the step, rejected tokens
    included. Source: AReaL, ppo_actor_loss_fn.
    """
    proximal_T = proximal(inputs, config.prox_logp_method)
    behaviour = judged(inputs, proximal_T, config.rejection_sampling)
    # a smaller mask for ratios and clip metrics only: `loss_tokens`, the denominator, stays
    kept = replace(inputs, loss_mask_T=behaviour.keep_T)
    log_ratio_T = kept.masked(inputs.logprobs_T - proximal_T)
    ratio_T = ratio_of(at_level(kept, log_ratio_T, config.importance_sampling_level))
    advantages_T = kept.masked(inputs.advantages_T)
    if config.importance_sampling_level == "sequence":
        advantages_T = kept.per_token(kept.mean_per_completion(advantages_T))
    low, high = 1 - config.epsilon, 1 + config.upper
    values_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(low, high))
    if config.dual_clip is not None:  # no effect at A > 0: the loss is negative there, the bound positive
        values_T = torch.minimum(values_T, config.dual_clip * advantages_T.abs())
    low_T = kept.loss_mask_T & (ratio_T < low) & (advantages_T < 0)
    high_T = kept.loss_mask_T & (ratio_T > high) & (advantages_T > 0)
    sums = {**behaviour.sums, "clipped_low": low_T.sum(), "clipped_high": high_T.sum()}
    rules = {"rejected": inputs.loss_mask_T & ~behaviour.keep_T, "clip_low": low_T, "clip_high": high_T}
    return TokenLoss(kept.masked(values_T * behaviour.weight_T), "step_tokens", ratio_T, sums, rules=rules)


def proximal(inputs: LossInputs, method: str) -> Tensor:
    """Return the logprobs of the proximal policy, (T,), without gradient.

    `recompute` returns `inputs.old_T`. `loglinear` returns inference + (age − 1)/age · (logp − inference) for a token
    that is `age` versions old; ages 0 and 1 both have the engine's logprob.

    Raises:
        ValueError: `loglinear` without inputs.versions_T.
    """
    if method == "recompute":
        return inputs.old_T
    if inputs.versions_T is None:
        raise ValueError("versions: trainer.loss.prox_logp_method loglinear needs the version that sampled each token")
    # age 0 would divide by 0; with 1 the factor below is 0, which is right for both
    age_T = (inputs.version - inputs.versions_T).to(inputs.logprobs_T.dtype).clamp(min=1)
    way_T = inputs.logprobs_T.detach() - inputs.inference_logprobs_T
    return inputs.inference_logprobs_T + (age_T - 1) / age_T * way_T
