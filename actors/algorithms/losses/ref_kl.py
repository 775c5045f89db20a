"""On-policy distillation: the policy samples, and each token's advantage is how much likelier its teacher finds it."""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.teacher import teacher_gap
from actors.algorithms.losses.trust_region import beyond, inside_region, probability_change
from schemas.config.losses import RefKlLossConfig

MAX_CHANGE = 0.2
"""Of a token's probability since it was sampled; prime-rl fixes it."""


def ref_kl(inputs: LossInputs, config: RefKlLossConfig) -> TokenLoss:
    """−(teacher − logp)·r inside the region, + kl_tau·(log r)² everywhere; r = exp(logp − inference).

    The gap carries no gradient, so the gradient is that of the reverse KL. Source: prime-rl (on-policy distillation).
    """
    if config.trust_region == "advantage":
        causes = beyond(inputs, MAX_CHANGE, MAX_CHANGE)
    else:
        causes = {"low": probability_change(inputs) < -MAX_CHANGE}
    return inside_region(inputs, teacher_gap(inputs), causes, kl_tau=config.kl_tau)
