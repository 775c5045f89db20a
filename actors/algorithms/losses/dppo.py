"""DPPO (divergence PPO): a token is dropped only if its probability moved too far in its advantage's direction."""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.teacher import with_teacher
from actors.algorithms.losses.trust_region import beyond, inside_region
from schemas.config.losses import DppoLossConfig


def dppo(inputs: LossInputs, config: DppoLossConfig) -> TokenLoss:
    """Return −A·r inside the trust region + kl_tau·(log r)² on all tokens, (T,), r = exp(logp − inference).

    Dropped: A > 0 with a rise of the probability above dppo_mask_high, A ≤ 0 with a fall above dppo_mask_low. A stands
    for adv_tau·A + teacher_tau·(teacher − logp) in the first term. Mean over the step's tokens.
    Source: prime-rl's default loss (DPPO's binary total variation, Kimi K2.5's squared log ratio without ½).
    """
    causes = beyond(inputs, config.dppo_mask_low, config.dppo_mask_high)
    advantages_T = with_teacher(inputs, config.adv_tau * inputs.advantages_T, config.teacher_tau)
    return inside_region(inputs, advantages_T, causes, kl_tau=config.kl_tau)
