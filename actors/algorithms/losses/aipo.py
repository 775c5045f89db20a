"""AIPO (LlamaRL): policy gradient weighted by the importance ratio of trainer to engine, with an upper cap."""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import ratio_of
from actors.algorithms.losses.trust_region import capped_ratio
from schemas.config.losses import AipoLossConfig


def aipo(inputs: LossInputs, config: AipoLossConfig) -> TokenLoss:
    """Return −A·min(r, token_mask_high) per token, (T,), r = exp(logp − inference); mean over the step's tokens.

    Above the cap the gradient is that of the cap as a weight (LlamaRL, `compat.above_cap: weigh`) or 0 (prime-rl's
    first versions, `stop`). Source: LlamaRL; prime-rl; Surogate's guide.
    """
    log_ratio_T = inputs.masked(inputs.logprobs_T - inputs.inference_logprobs_T)
    ratio_T = capped_ratio(log_ratio_T, config.token_mask_high, stop_gradient=config.compat.above_cap == "stop")
    # a metric alone; of the ratio before the cap
    above_T = inputs.loss_mask_T & (log_ratio_T.detach().exp() > config.token_mask_high)
    values_T = -inputs.masked(inputs.advantages_T) * ratio_T
    sums = {"capped_tokens": above_T.sum()}
    return TokenLoss(values_T, "step_tokens", ratio_of(log_ratio_T), sums, rules={"cap": above_T})
