"""GMPO: the geometric mean of a completion's importance ratios, each clipped in the advantage's direction."""

import torch

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.metrics import clip_sums
from actors.algorithms.losses.ratios import log_ratio, ratio_of
from schemas.config.losses import GmpoLossConfig


def gmpo(inputs: LossInputs, config: GmpoLossConfig) -> TokenLoss:
    """Return −A·exp(mean over the completion of c), (T,); c = logp − old clipped from above if A > 0, else from below.

    Mean over completions. With top_entropy_quantile the mean of c is over the kept tokens. The reference KL has no
    bias correction (a ratio of 1). Source: GMPO, as in TRL, which uses neither delta, off-policy mask nor inference
    correction here.
    """
    log_ratio_T, advantages_T = log_ratio(inputs, config), inputs.advantages_T
    rising_T = advantages_T > 0
    clipped_T = torch.where(rising_T, log_ratio_T.clamp(max=config.upper), log_ratio_T.clamp(min=-config.epsilon))
    # clipped before the mean: GMPO bounds each token's ratio, not their product
    if inputs.high_entropy_T is None:
        mean_B = inputs.mean_per_completion(clipped_T)
    else:
        kept_T = inputs.high_entropy_T.to(clipped_T.dtype)
        mean_B = inputs.sum_per_completion(clipped_T * kept_T) / inputs.sum_per_completion(kept_T).clamp(min=1)
    values_T = inputs.masked(-inputs.per_token(ratio_of(mean_B)) * advantages_T)
    low_T = (log_ratio_T < -config.epsilon) & (advantages_T < 0)
    high_T = (log_ratio_T > config.upper) & rising_T
    sums = clip_sums(inputs, low_T, high_T)
    # a ratio of 1: no bias correction of the reference KL
    rules = {"clip_low": low_T, "clip_high": high_T}
    return TokenLoss(values_T, "completion_means", torch.ones_like(log_ratio_T), sums, rules=rules)
