"""Keys of `trainer.distillation`: a teacher's term next to the rewards. See docs/reference/losses.md."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.base import Section


class JointDistillationConfig(Section):
    """Joint distillation (AReaL): policy loss plus reverse KL to the teacher."""

    type: Literal["joint"] = "joint"
    rl_loss_weight: float = Field(1.0, ge=0)
    """Factor of the policy loss. 0: the teacher alone, as a reward of each token, weighted with its importance
    ratio."""
    distill_loss_weight: float = Field(0.005, ge=0)
    """Factor of the distillation loss, the mean of logp − teacher over the loss tokens of the step."""


class RlsdConfig(Section):
    """RLSD (ms-swift): the teacher distributes a completion's advantage among the completion's tokens."""

    type: Literal["rlsd"] = "rlsd"
    rlsd_lambda: float = Field(0.5, ge=0, le=1)
    """Share λ of the teacher's weights in a token's advantage. 0: each token has its completion's advantage."""
    rlsd_reweight_clip_range: float = Field(0.2, ge=0)
    """Clip range of the teacher's weights: between 1 − value and 1 + value."""
    rlsd_lambda_warmup_steps: int = Field(0, ge=0)
    """Steps of the linear rise of λ from 0 to rlsd_lambda."""
    rlsd_lambda_decay_steps: int = Field(0, ge=0)
    """Steps of the linear fall of λ to 0, after the warm-up. 0: λ stays."""
    rlsd_negative_only: bool = False
    """Restriction to tokens with an advantage below 0; all others keep their advantage."""


class SdarConfig(Section):
    """SDAR (ms-swift): a loss towards the teacher, strongest on tokens the teacher finds likelier than the policy."""

    type: Literal["sdar"] = "sdar"
    sdar_loss_coef: float = Field(0.1, gt=0)
    """Factor of SDAR's loss, added to the policy loss."""
    sdar_gate_beta: float = Field(5.0, gt=0)
    """Steepness of the gate, sigmoid(sdar_gate_beta · (teacher − logp)), on each token's loss."""


DistillationConfig = Annotated[JointDistillationConfig | RlsdConfig | SdarConfig, Field(discriminator="type")]
