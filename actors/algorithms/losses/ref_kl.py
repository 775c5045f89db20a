"""On-policy distillation: tokens sampled by the policy have the advantage teacher − logp (reverse KL to a teacher)."""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.teacher import teacher_gap
from actors.algorithms.losses.trust_region import beyond, inside_region, probability_change
from schemas.config.losses import RefKlLossConfig

MAX_CHANGE = 0.2
"""Bound of the change of a token's probability from engine to trainer; a constant in prime-rl too."""


def ref_kl(inputs: LossInputs, config: RefKlLossConfig) -> TokenLoss:
    """Return −sg[teacher − logp]·r inside the trust region + kl_tau·(log r)² on all tokens, (T,).

    r = exp(logp − inference); sg[x] is x without gradient, so the gradient is that of the reverse KL. Dropped: a fall
    of the probability above 0.2, or with `compat.trust_region: advantage` the rule of loss dppo. Mean over the step's
    tokens. Source: prime-rl (on-policy distillation).
    """
    if config.compat.trust_region == "advantage":
        causes = beyond(inputs, MAX_CHANGE, MAX_CHANGE)
    else:
        causes = {"low": probability_change(inputs) < -MAX_CHANGE}
    return inside_region(inputs, teacher_gap(inputs), causes, kl_tau=config.kl_tau)
