"""Keys of `trainer.optimizer`. One class per `type`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from schemas.config.base import Section
from schemas.config.resume_classes import Free, Identity


class AdamKeys(Section):
    """Base of all optimizers: parameters of AdamW. With Muon, they apply to the weights that Muon leaves to AdamW."""

    beta1: Free[float] = Field(0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    beta2: Free[float] = Field(0.999, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    eps: Free[float] = Field(1e-8, gt=0)
    """Number added to the denominator, for numerical stability."""
    weight_decay: Free[float] = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only. Biases and norms are not decayed."""
    decay_embeddings: Free[bool] = True
    """Weight decay of embeddings too, and of an output layer tied to the embeddings."""


class AdamWConfig(AdamKeys):
    """AdamW (torch, fused): decoupled weight decay, two float32 numbers of state per weight."""

    type: Identity[Literal["adamw"]] = "adamw"


class AdamW8bitConfig(AdamKeys):
    """AdamW of bitsandbytes, with one byte per number of state, in blocks of 256. Needs `grpo-actors[bnb]`.

    Tensors below 4096 elements keep float32 state. With `trainer.sharding: fsdp` so do vectors, and weights whose rows
    are no multiple of 256.
    """

    type: Identity[Literal["adamw_8bit"]] = "adamw_8bit"


class MuonConfig(AdamKeys):
    """Muon for the matrices of hidden layers, adapter matrices included, and AdamW for all other weights.

    Other weights are embeddings, output layer, norms, biases, and experts stored as one tensor of three axes.
    """

    type: Identity[Literal["muon"]] = "muon"
    momentum: Free[float] = Field(0.95, ge=0, lt=1)
    """Decay of the running mean of gradients that is orthogonalised."""
    nesterov: Free[bool] = True
    """Nesterov momentum: the newest gradient counts once more before orthogonalisation."""
    ns_steps: Free[int] = Field(5, ge=1, lt=100)
    """Number of Newton-Schulz iterations of the orthogonalisation."""
    adjust_lr_fn: Free[Literal["match_rms_adamw", "original"]] = "match_rms_adamw"
    """Scale of the update of a matrix. `match_rms_adamw`: 0.2 × √(longer side), about the size of an AdamW update, so
    that learning rates for AdamW apply. `original`: √(rows ÷ columns), at least 1."""
    adamw_learning_rate: Free[float | None] = Field(None, gt=0)
    """Peak learning rate of the weights trained by AdamW, on the schedule of `trainer.learning_rate`. Empty: the same
    as `trainer.learning_rate`. With `adjust_lr_fn: original` a hundredth of it is usual."""


def _adamw_where_untold(given: Any) -> Any:
    # `optimizer: {beta2: 0.99}` stands for AdamW; all other unions of sections require `type`
    return {"type": "adamw"} | given if isinstance(given, dict) else given


OptimizerConfig = Annotated[
    Annotated[AdamWConfig | AdamW8bitConfig | MuonConfig, Field(discriminator="type")],
    BeforeValidator(_adamw_where_untold),
]
