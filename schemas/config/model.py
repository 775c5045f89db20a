"""The policy: which model, in which precision, with or without LoRA."""

from typing import Literal

from pydantic import Field

from schemas.config.base import Section

Dtype = Literal["float32", "bfloat16"]


class LoraConfig(Section):
    """Low-rank adapters (peft); the base model stays frozen."""

    rank: int = Field(16, ge=1)
    """Rank of the update."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapter; anything above 0 makes trainer and engine disagree on logprobs."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Module names that get an adapter, or every linear layer but the head."""


class ModelConfig(Section):
    """A Hugging Face causal LM."""

    path: str = Field(min_length=1)
    """A name on the hub, or a directory: beside the configuration file, else where the command is given."""
    dtype: Dtype = "bfloat16"
    """Precision of weights and computation, in the trainer and the embedded engine."""
    trust_remote_code: bool = False
    """Let transformers run code that comes with the model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU when there is one."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
