"""RLOO's loss over whole completions; the leave-one-out baseline itself is `reward.advantage` of type `rloo`."""

from actors.algorithms.losses.grpo import clipped_tokens, clipped_values
from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.metrics import clip_sums
from actors.algorithms.losses.ratios import log_ratio, ratio_of
from schemas.config.losses import RlooLossConfig


def rloo(inputs: LossInputs, config: RlooLossConfig) -> TokenLoss:
    """Return −min(ρA, clip(ρ)·A), (T,), ρ = exp(Σ over the completion of logp − old); mean over completions.

    Source: RLOO (Ahmadian et al.), as in TRL.
    """
    # the product of the tokens' ratios: the action of RLOO is the whole completion
    ratio_T = inputs.per_token(ratio_of(inputs.sum_per_completion(log_ratio(inputs, config))))
    values_T = inputs.masked(clipped_values(ratio_T, inputs.advantages_T, config))
    rules = clipped_tokens(ratio_T, inputs.advantages_T, config)
    sums = clip_sums(inputs, rules["clip_low"], rules["clip_high"], per_completion=True)
    return TokenLoss(values_T, "completion_means", ratio_T, sums, rules=rules)
