"""CISPO (MiniMax-M1): the logprob weighted by a capped importance ratio, so no token loses its gradient."""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.metrics import clip_sums
from actors.algorithms.losses.ratios import advantages_at_level, ratio_at_level
from schemas.config.losses import CispoLossConfig


def cispo(inputs: LossInputs, config: CispoLossConfig) -> TokenLoss:
    """Return −sg[min(ρ, epsilon_high)]·A·logp per token, (T,), ρ = exp(logp − old); mean over the step's tokens.

    sg[x] is x without gradient. Source: MiniMax-M1; without a lower bound of ρ, as in TRL and ms-swift.
    """
    ratio_T, advantages_T = ratio_at_level(inputs, config), advantages_at_level(inputs, config)
    weight_T = inputs.masked(ratio_T.detach().clamp(max=config.epsilon_high) * advantages_T)
    # a metric alone: a capped token keeps the gradient of its logprob
    high_T = (ratio_T > config.epsilon_high) & (advantages_T > 0)
    per_completion = config.importance_sampling_level != "token"
    sums = clip_sums(inputs, None, high_T, per_completion)
    values_T = -weight_T * inputs.masked(inputs.logprobs_T)
    return TokenLoss(values_T, "step_tokens", ratio_T, sums, rules={"clip_high": high_T})
