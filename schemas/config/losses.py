"""Which policy loss: a union told apart by `type`, one class per loss (docs/algorithms.md)."""

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


class RatioLossConfig(Section):
    """What all losses have whose ratio is taken to `old`, the policy at the start of the step."""

    old_logprobs: Literal["step_start", "inference"] = "step_start"
    """`step_start`: of the trainer's weights before the step's first update (with one update per step the ratio is
    then 1 and only its gradient counts; a correction covers the way from the engine). `inference`: of the engine, so
    that clipping bounds lag and numerics too."""


class ClippedLossConfig(RatioLossConfig):
    """PPO's clipped surrogate objective, and the switches on it."""

    epsilon: float = Field(0.2, ge=0)
    """The ratio is clipped at 1 − epsilon from below."""
    epsilon_high: float | None = Field(None, ge=0)
    """The ratio is clipped at 1 + epsilon_high from above (DAPO's clip-higher: 0.28); empty: like epsilon."""
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    """One ratio per token, or one per completion, from the mean of its log ratios (GSPO); `sequence_token` has the
    value of the latter and the gradient of each token (GSPO-token)."""
    delta: float | None = Field(None, gt=1)
    """Two-sided clip (INTELLECT-2): caps the ratio where the objective is not clipped; above 1 + epsilon_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Dual-clip PPO: where the advantage is negative the loss is at most dual_clip × |advantage|."""

    @property
    def upper(self) -> float:
        """epsilon_high, or epsilon where it is empty."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @model_validator(mode="after")
    def _delta_beyond_clip(self) -> "ClippedLossConfig":
        if self.delta is not None and self.delta <= 1 + self.upper:
            raise ValueError(f"delta {self.delta} must be above 1 + epsilon_high = {1 + self.upper}")
        return self


class GrpoLossConfig(ClippedLossConfig):
    """GRPO (DeepSeekMath): clipped objective, mean over the tokens of a completion, then over completions."""

    type: Literal["grpo"] = "grpo"


class BnpoLossConfig(ClippedLossConfig):
    """TRL's bnpo: the same objective, mean over the tokens of the local micro-batch."""

    type: Literal["bnpo"] = "bnpo"


class DrGrpoLossConfig(ClippedLossConfig):
    """Dr. GRPO: the same objective, sum ÷ (completions × max_completion_length): no bias by length."""

    type: Literal["dr_grpo"] = "dr_grpo"


class DapoLossConfig(ClippedLossConfig):
    """DAPO: the same objective, mean over the tokens of the whole step on all ranks."""

    type: Literal["dapo"] = "dapo"


LossConfig = Annotated[
    SurogateLossConfig | GrpoLossConfig | BnpoLossConfig | DrGrpoLossConfig | DapoLossConfig,
    Field(discriminator="type"),
]
