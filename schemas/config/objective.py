"""What a training step minimises: a policy loss and the switches that combine with any of them (docs/algorithms.md)."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.losses import LossConfig, SurogateLossConfig


class CorrectionConfig(Section):
    """Weights for the gap between engine and trainer: exp(old − inference), truncated or masked (TIS, MIS, IcePop)."""

    mode: Literal["truncate", "mask"]
    """`truncate`: weights are clamped into the bounds; `mask`: what lies outside is dropped, inside it keeps its
    weight."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per completion."""
    sequence_ratio: Literal["sum", "geometric_mean"] = "sum"
    """Of level sequence: exponent of the sum of the log ratios (TRL), or of their mean (ms-swift)."""
    low: float = Field(0.0, ge=0)
    """Lower bound."""
    high: float = Field(2.0, gt=0)
    """Upper bound. TRL's default is mode mask, level sequence, sum, 3.0; IcePop is mask, token, 0.5 and 5.0."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "CorrectionConfig":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class ReferenceConfig(Section):
    """KL to a frozen reference: the adapter switched off under LoRA, else a second copy of the first weights."""

    beta: float = Field(gt=0)
    """Factor of the KL (ms-swift's default is 0.04, AReaL's kl_ctl 0.1)."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = logp − ref: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss, escaping every mask and correction (TRL); or in the reward (kl_in_reward; AReaL with k1): minus
    beta × the KL of this and all later tokens is added to a token's advantage."""
    bias_correction: bool = False
    """The KL of a token is multiplied by its importance ratio, so that its gradient is unbiased (TRL's default)."""


class ObjectiveConfig(Section):
    """All that is minimised; the trainer's section has these keys too."""

    loss: LossConfig = SurogateLossConfig()
    """The policy loss."""
    correction: CorrectionConfig | None = None
    """Inference correction."""
    reference: ReferenceConfig | None = None
    """Reference KL."""
    off_policy_mask_threshold: float | None = Field(None, gt=0)
    """Completions with a negative advantage are dropped when their mean of (inference − logp) is above."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Only this share of the tokens, those of the highest entropy, carries the policy loss (0.2 in the paper)."""
    entropy_coef: float = Field(0.0, ge=0)
    """Factor of the mean entropy, which is added to the objective."""
