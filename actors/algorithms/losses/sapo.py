"""SAPO: a sigmoid of the importance ratio instead of the clip."""

import torch

from actors.algorithms.losses.inputs import LossInputs, TokenLoss
from actors.algorithms.losses.ratios import advantages_at_level, ratio_at_level
from schemas.config.losses import SapoLossConfig


def sapo(inputs: LossInputs, config: SapoLossConfig) -> TokenLoss:
    """Return −A·(4/τ)·sigmoid(τ(ρ − 1)) per token, (T,), ρ = exp(logp − old); averaged as `config.average` says.

    τ is temperature_pos for A > 0, else temperature_neg. At ρ = 1 the gradient equals that of −ρA.
    Source: SAPO (Qwen team), as in TRL, ms-swift and AReaL.
    """
    ratio_T, advantages_T = ratio_at_level(inputs, config), advantages_at_level(inputs, config)
    temperature_T = torch.full_like(ratio_T, config.temperature_neg).masked_fill(
        advantages_T > 0, config.temperature_pos
    )
    # the slope of a sigmoid at 0 is ¼, and τ of its argument: 4/τ makes the gradient at ρ = 1 that of ρ
    gate_T = torch.sigmoid(temperature_T * (ratio_T - 1)) * (4 / temperature_T)
    return TokenLoss(inputs.masked(-gate_T * advantages_T), config.average, ratio_T)
