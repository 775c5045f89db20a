"""The policy: which model, in which precision, with or without LoRA."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

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


class QuantizationConfig(Section):
    """The frozen base model in four bits a weight, under adapters (QLoRA); needs grpo-actors[bnb]."""

    type: Literal["nf4"]
    """NormalFloat of four bits, in blocks of 64 weights (bitsandbytes)."""
    double_quant: bool = True
    """Quantise the blocks' scales too: 4.1 instead of 4.5 bits a weight."""

    @field_validator("type", mode="before")
    @classmethod
    def _trainable(cls, given: Any) -> Any:
        if given == "fp8":
            raise ValueError("transformers' fp8 layers have no backward pass, so not even adapters train; use nf4")
        return given


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
    attention: Literal["auto", "padded", "flash", "flex"] = "auto"
    """How samples of a packed row are attended in the trainer: gathered into padded blocks of like lengths (`padded`,
    everywhere), by FlashAttention's kernel for sequences of different lengths (`flash`: GPU, bfloat16, package
    flash-attn), or by torch's FlexAttention over the whole row (`flex`: GPU). `auto`: flash where it runs, else flex on
    a GPU and padded on a CPU."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer of the policy for the backward pass, which computes the rest again: up to a
    third more computation, and much less memory for long rows (transformers' own, not re-entrant)."""
    compile: bool = False
    """Have torch compile the layers of the policy in the trainer (torch.compile): some minutes at the start for faster
    steps on GPUs. A step that is trained again may then differ in its last bits."""
    quantization: QuantizationConfig | None = None
    """Keep the base model quantised, in the trainer and the embedded engine; only with `lora`."""

    @model_validator(mode="after")
    def _quantised_base_is_frozen(self) -> "ModelConfig":
        if self.quantization is not None and self.lora is None:
            raise ValueError("quantization: quantised weights can't be trained themselves; set lora too, e.g. lora: {}")
        return self

    @model_validator(mode="after")
    def _kernel_runs(self) -> "ModelConfig":
        if self.attention in ("flash", "flex") and self.device == "cpu":
            raise ValueError(f"attention: {self.attention} needs a GPU, and device is cpu; set attention auto")
        if self.attention == "flash" and self.dtype == "float32":
            raise ValueError("attention: flash computes in 16 bits; set dtype bfloat16, or attention flex")
        return self
