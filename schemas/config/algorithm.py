"""Which algorithm: the loss and the advantage, each a union told apart by `type` (docs/algorithms.md)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.config.base import Section


class SurogateLossConfig(Section):
    """The documented Surogate GRPO loss: importance-weighted policy gradient, masked outside a trust region."""

    type: Literal["surogate"] = "surogate"
    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or one per completion."""
    token_mask_low: float = Field(0.125, ge=0)
    """Drop tokens whose ratio is below."""
    token_mask_high: float = Field(8.0, ge=0)
    """Drop tokens whose ratio is above."""
    geo_mask_low: float = Field(0.1, ge=0)
    """Drop completions whose geometric mean ratio is below."""
    geo_mask_high: float = Field(10.0, ge=0)
    """Drop completions whose geometric mean ratio is above."""
    sequence_mask_low: float = Field(0.0, ge=0)
    """Drop completions whose smallest token ratio is below."""
    sequence_mask_high: float = Field(100.0, ge=0)
    """Drop completions whose largest token ratio is above."""
    sequence_clip_high: float = Field(10.0, ge=0)
    """Cap of the ratio of a whole completion (ratio_type sequence)."""
    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantage."""
    kl_tau: float = Field(0.0, ge=0)
    """Factor of the penalty on the log ratio to the inference policy."""
    teacher_tau: float = Field(0.0, ge=0)
    """Factor of the pull towards a teacher's logprobs."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "SurogateLossConfig":
        for mask in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{mask}_low"), getattr(self, f"{mask}_high")
            if low >= high:
                raise ValueError(f"{mask}_low {low} must be below {mask}_high {high}")
        return self


LossConfig = SurogateLossConfig


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
