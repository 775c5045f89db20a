"""How the gradients of a step become an update of the weights."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from schemas.config.base import Section


class AdamKeys(Section):
    """What every optimizer here has, if only for the weights that Muon leaves to AdamW."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Of matrices; biases and norms are not decayed."""
    decay_embeddings: bool = True
    """Whether embeddings (and an output layer tied to them) count as matrices there."""


class AdamWConfig(AdamKeys):
    """AdamW, decoupled weight decay; two numbers of state for each weight."""

    type: Literal["adamw"] = "adamw"


class AdamW8bitConfig(AdamKeys):
    """AdamW of bitsandbytes: a byte for each number of state, scaled by blocks of 256; small tensors keep float32."""

    type: Literal["adamw_8bit"] = "adamw_8bit"


class MuonConfig(AdamKeys):
    """Muon for the matrices of hidden layers (an adapter's are matrices too), AdamW for all else.

    All else: embeddings, output layer, norms, biases, and experts that are kept in one tensor of three axes.
    """

    type: Literal["muon"] = "muon"
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the gradients that are made orthogonal."""
    nesterov: bool = True
    """Look one gradient ahead of the momentum."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations that make a matrix orthogonal."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of a matrix' update: 0.2 × √(longer side), the size of AdamW's, so that a learning rate found for AdamW
    holds; or √(rows ÷ columns) where that is above 1."""
    adamw_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of AdamW's part, on the schedule of `trainer.learning_rate`, which is also its value where
    empty; with adjust_lr_fn original it is usually a hundredth."""


def _adamw_where_untold(given: Any) -> Any:
    return {"type": "adamw"} | given if isinstance(given, dict) else given


OptimizerConfig = Annotated[
    Annotated[AdamWConfig | AdamW8bitConfig | MuonConfig, Field(discriminator="type")],
    BeforeValidator(_adamw_where_untold),
]
