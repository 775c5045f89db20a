"""Divergence PPO: a token leaves the trust region only on the side that its advantage pushes it to."""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.teacher import with_teacher
from actors.algorithms.losses.trust_region import beyond, inside_region
from schemas.config.losses import DppoLossConfig


def dppo(inputs: LossInputs, config: DppoLossConfig) -> TokenLoss:
    """−A·r inside the region, + kl_tau·(log r)² everywhere; r = exp(logp − inference).

    Source: prime-rl's default loss (DPPO's binary total variation, Kimi K2.5's squared log ratio without ½).
    """
    causes = beyond(inputs, config.dppo_mask_low, config.dppo_mask_high)
    advantages_T = with_teacher(inputs, config.adv_tau * inputs.advantages_T, config.teacher_tau)
    return inside_region(inputs, advantages_T, causes, kl_tau=config.kl_tau)
