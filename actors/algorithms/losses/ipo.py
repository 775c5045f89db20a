"""IPO (INTELLECT policy optimisation): a trust region of probabilities, equal for both signs of the advantage."""

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.teacher import with_teacher
from actors.algorithms.losses.trust_region import inside_region, probability_change
from schemas.config.losses import IpoLossConfig


def ipo(inputs: LossInputs, config: IpoLossConfig) -> TokenLoss:
    """Return −A·min(r, ratio_clip) inside the trust region + kl_tau·(log r)² on all tokens, (T,).

    r = exp(logp − inference). Dropped: a fall of the probability above ipo_mask_low, a rise above ipo_mask_high. A
    stands for adv_tau·A + teacher_tau·(teacher − logp). Mean over the step's tokens.
    Source: Surogate; in prime-rl the bounds are 0.1 and the ratio is not clipped.
    """
    change_T = probability_change(inputs)
    causes = {"low": change_T < -config.ipo_mask_low, "high": change_T > config.ipo_mask_high}
    advantages_T = with_teacher(inputs, config.adv_tau * inputs.advantages_T, config.teacher_tau)
    return inside_region(inputs, advantages_T, causes, kl_tau=config.kl_tau, ratio_clip=config.ratio_clip)
