"""SAPO: a sigmoid of the importance ratio in place of the clip."""

import torch

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import advantages_at_level, ratio_at_level
from schemas.config.losses import SapoLossConfig


def sapo(inputs: LossInputs, config: SapoLossConfig) -> TokenLoss:
    """Per token −A·(4/τ)·sigmoid(τ(ρ − 1)), whose gradient at ρ = 1 is that of −ρA; τ by the sign of A.

    Source: SAPO (Qwen team), as in TRL, ms-swift and AReaL.
    """
    ratio_T, advantages_T = ratio_at_level(inputs, config), advantages_at_level(inputs, config)
    temperature_T = torch.full_like(ratio_T, config.temperature_neg).masked_fill(
        advantages_T > 0, config.temperature_pos
    )
    gate_T = torch.sigmoid(temperature_T * (ratio_T - 1)) * (4 / temperature_T)
    return TokenLoss(inputs.masked(-gate_T * advantages_T), config.average, ratio_T)
