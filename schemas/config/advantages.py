"""How rewards become advantages: a union told apart by `type` (docs/algorithms.md)."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.base import Section


class MeanAdvantageConfig(Section):
    """Reward minus the mean of its group (Surogate's default; Dr. GRPO)."""

    type: Literal["mean"] = "mean"


class ZScoreAdvantageConfig(Section):
    """(reward − mean) / (std + eps) inside the group (GRPO)."""

    type: Literal["zscore"] = "zscore"
    std: Literal["unbiased", "population"] = "unbiased"
    """TRL, ms-swift and AReaL use unbiased; TRL's async trainer population."""
    eps: float = Field(1e-4, ge=0)
    """TRL and ms-swift 1e-4; AReaL 1e-5; TRL async 1e-8."""


AdvantageConfig = Annotated[MeanAdvantageConfig | ZScoreAdvantageConfig, Field(discriminator="type")]
