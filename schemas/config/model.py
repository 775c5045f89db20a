"""Keys of the policy model: path, precision, adapters, quantisation, attention."""

import math
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from schemas.config.base import Section
from schemas.config.resume_classes import Free, Identity
from schemas.config.texts import Text

Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by `model.dtype`."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, by peft). The base model stays frozen."""

    rank: int = Field(16, ge=1)
    """Rank of the adapter matrices."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapter: its output is multiplied by alpha ÷ rank."""
    rslora: bool = False
    """Scale alpha ÷ √rank instead of alpha ÷ rank (rank-stabilised LoRA; peft: use_rslora)."""
    dora: bool = False
    """Trained length of each row of an adapted matrix, apart from its direction (DoRA; peft: use_dora). Engine
    `embedded` alone takes these adapters."""
    init: Literal["kaiming", "gaussian", "orthogonal"] = "kaiming"
    """Initial values of the adapter matrices (peft: init_lora_weights; `kaiming` is peft's true). The adapter's output
    starts at 0 with each of them. `orthogonal` needs an even rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability on the adapter's input. Above 0 the trainer's logprobs differ from the engine's."""
    target_modules: str | list[str] = "all-linear"
    """Names of the modules with an adapter, or a regular expression that whole names match. `all-linear`: every linear
    layer except the output head. Vision tower and projector are left out in either case, unless they are trained
    (`model.train_vision_tower`, `model.train_projector`)."""
    modules_to_save: list[str] = []
    """Names of modules that are trained as a whole next to the adapters, e.g. `lm_head` of a model with an output layer
    of its own. Engine `embedded` alone takes them."""

    @property
    def scale(self) -> float:
        """Factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def beyond_plain(self) -> list[str]:
        """Keys that make more of the adapter than two matrices for each adapted matrix."""
        return [key for key in ("dora", "modules_to_save") if getattr(self, key)]

    @field_validator("target_modules")
    @classmethod
    def _is_an_expression(cls, given: str | list[str]) -> str | list[str]:
        if isinstance(given, str):
            try:
                re.compile(given)
            except re.error as error:
                raise ValueError(f"is no regular expression: {error}") from None
        return given

    @model_validator(mode="after")
    def _rank_can_be_halved(self) -> "LoraConfig":
        if self.init == "orthogonal" and self.rank % 2:
            raise ValueError(f"init: orthogonal needs an even rank, and rank is {self.rank}")
        return self


class QuantizationConfig(Section):
    """Four-bit quantisation of the frozen base model, under adapters (QLoRA). Needs `grpo-actors[bnb]`."""

    type: Literal["nf4"]
    """Number format. `nf4`: four-bit NormalFloat in blocks of 64 weights (bitsandbytes)."""
    double_quant: bool = True
    """Quantisation of the block scales too: 4.1 bits per weight instead of 4.5."""

    @field_validator("type", mode="before")
    @classmethod
    def _trainable(cls, given: Any) -> Any:
        # values that users expect to work; "must be nf4" alone would not tell how they do
        if given in ("fp8", "nvfp4"):
            raise ValueError(
                f"{given} weights are in the model's files, so that engines read the same: write them by `actors "
                f"quantize MODEL --type {given} --output DIR`, name DIR in model.path, and leave out quantization"
            )
        return given


class ModelConfig(Section):
    """The policy model, a Hugging Face causal language model."""

    path: Identity[str] = Field(min_length=1)
    """Name on the Hugging Face hub, or directory. Of a vision-language model (Qwen3-VL, Qwen2.5-VL) the language layers
    are trained, and vision tower and projector stay frozen unless `train_vision_tower` and `train_projector` say
    otherwise. A relative directory is looked up next to the configuration file first, then in the current directory."""
    dtype: Identity[Dtype] = "bfloat16"
    """Precision of the computation in trainer and engine, and of the weights that engines receive. The trained weights,
    their gradients and the optimizer state are float32 in either case. With `bfloat16` full training keeps a rounded
    copy of the weights for the computation; the frozen base model under `lora` is kept in this precision alone."""
    head_dtype: Free[Literal["model", "float32"]] = "model"
    """Precision of the output layer's product, in trainer and engine. `model`: `dtype`, so that logits of a bfloat16
    model are rounded to 8 bits. `float32`: unrounded logits (MiniMax-M1; TRL: cast_lm_head_to_fp32), for a smaller
    mismatch of trainer and engine, with a float32 copy of the layer's weights during a step. Needs a plain linear
    output layer, without adapter."""
    chat_template: Identity[Text | None] = None
    """Chat template (Jinja) in place of the model's own, as a text or as `{file: PATH}`. Requests to inference actors
    and the trainer's supervised examples are rendered by it too, and checkpoints have it. Empty: the model's own."""
    trust_remote_code: Free[bool] = False
    """Permission to run Python code shipped with the model (transformers and vLLM)."""
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device of the trainer and of engine `embedded`. `auto`: the GPU if the machine has one, else the CPU."""
    lora: Identity[LoraConfig | None] = None
    """Adapters (LoRA) to train instead of all weights. Empty: all weights are trained."""
    train_vision_tower: Identity[bool] = False
    """Training of the vision tower with the language layers, as a whole or by adapters (ms-swift: freeze_vit false).
    Features of images are then computed for each micro-batch, forward and backward. Engine `embedded` alone takes it,
    and not with `trainer.sharding: fsdp`."""
    train_projector: Identity[bool] = False
    """Training of the projector between vision tower and language layers, likewise (ms-swift: freeze_aligner false).
    With a frozen tower there is no backward pass through the tower."""
    lora_forward: Free[Literal["auto", "fused", "peft"]] = "auto"
    """Computation of the adapters, in trainer and engine `embedded`. `peft`: peft's own forward pass. `fused`: the same
    parameters with fewer passes over wide tensors, and one kept input for all layers that read it; adapters with `dora`
    or `dropout` stay with peft. `auto`: fused on a GPU; on a CPU fused if the results have the bits of peft's, thus if
    alpha ÷ rank is a power of two."""
    attention: Free[Literal["auto", "padded", "varlen", "flash", "flex"]] = "auto"
    """Attention implementation of the trainer. A packed row holds several samples, and no sample attends to another.
    `padded` (any device): samples of similar length are gathered into padded blocks. `varlen` (GPU, bfloat16, torch
    2.11): FlashAttention's kernel for sequences of different lengths, as torch brings it along; a group's prompt is
    computed once. `flash` (GPU, bfloat16, package flash-attn): the same of flash-attn 2, with soft caps, and with a
    copy of the prompt for each completion. `flex` (GPU): torch's FlexAttention over the whole row. `auto`: padded on a
    CPU; on a GPU varlen, or flex in float32 and with an older torch."""
    output_layer: Free[Literal["auto", "torch", "triton"]] = "auto"
    """Computation of logprobs and entropies from the logits of a chunk of tokens, and of the gradient, in the trainer.
    `torch`: operations of torch, in float32. `triton`: a kernel that reads the logits and a kernel that overwrites them
    by their gradient; needs Triton, a GPU and a C compiler. `auto`: triton on a GPU that has both, if a trial at the
    start gives the values of torch; otherwise torch."""
    row_multiple: Free[int | None] = Field(None, ge=1)
    """Tokens to multiples of which the trainer pads its rows, at most up to `packer.sequence_len`, so that a GPU sees
    few different lengths. The padding is in no sample. 1: no padding. Empty: 1 on a CPU; on a GPU an eighth of
    `packer.sequence_len`, as a multiple of 128."""
    gradient_checkpointing: Free[bool | Literal["selective"]] = False
    """Recomputation of each policy layer in the backward pass instead of keeping its activations: up to a third more
    computation, and much less memory for long rows (transformers' non-reentrant variant). `selective`: products of
    matrices and attention are kept and the rest is computed again, for a few percent more computation; of a row of
    Qwen3-0.6B two fifths are kept."""
    compile: Free[bool] = False
    """Compilation of the policy's layers in the trainer with torch.compile: minutes at the start, faster steps on GPUs.
    A step trained again, in a replay or after a crash, may then differ in its last bits."""
    dropout: Free[bool] = False
    """Dropout as in the model's own config.json (GPT-2: 0.1), in the trainer. With dropout the trainer's logprobs
    differ from the engine's on the same weights. The adapter's dropout is `lora.dropout`."""
    quantization: Identity[QuantizationConfig | None] = None
    """Quantisation of the base model while trainer and engine `embedded` load it. Needs `lora`. For vLLM also set
    `inference.engine.quantization`. Empty: none; a folder of `actors quantize` is quantised already."""

    @property
    def has_exact_head(self) -> bool:
        """True if the output layer is computed in more precision than the other layers."""
        return self.head_dtype == "float32" and self.dtype != "float32"

    @property
    def trained_vision(self) -> list[str]:
        """Keys of trained parts in front of the language layers; empty: features of images are constant."""
        return [key for key in ("train_vision_tower", "train_projector") if getattr(self, key)]

    @field_validator("dtype", mode="before")
    @classmethod
    def _is_no_float16(cls, dtype: object) -> object:
        if dtype in ("float16", "fp16", "half"):
            # gradients of small values vanish in it without a scale, and an engine's logits overflow with it
            raise ValueError(
                f"{dtype} is not supported: its numbers end at 65504, so training would need a loss scaler that leaves "
                "out steps; write bfloat16, which needs the same memory, or float32 on a GPU without bfloat16"
            )
        return dtype

    @model_validator(mode="after")
    def _quantised_base_is_frozen(self) -> "ModelConfig":
        if self.quantization is not None and self.lora is None:
            raise ValueError("quantization: quantised weights can't be trained themselves; set lora too, e.g. lora: {}")
        return self

    @model_validator(mode="after")
    def _quantised_base_has_plain_adapters(self) -> "ModelConfig":
        if self.quantization is not None and self.lora is not None and self.lora.beyond_plain:
            raise ValueError(f"quantization: not with lora.{self.lora.beyond_plain[0]}; remove one of the two")
        return self

    @model_validator(mode="after")
    def _kernel_runs(self) -> "ModelConfig":
        # only contradictions inside the file are refused here; `auto` waits until the machine is known
        if self.attention in ("varlen", "flash", "flex") and self.device == "cpu":
            raise ValueError(f"attention: {self.attention} needs a GPU, and device is cpu; set attention auto")
        if self.attention in ("varlen", "flash") and self.dtype == "float32":
            raise ValueError(f"attention: {self.attention} computes in 16 bits; set dtype bfloat16, or attention flex")
        return self
