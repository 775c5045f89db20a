"""Choices between ways of computing the same: what a run takes, and why. Without torch, so that a check takes no time.

Each value `auto` is decided here, by the configuration and the kind of device. `actors check` prints the choices.
"""

import math
import os
from dataclasses import dataclass

from actors.process.packages import c_compiler, is_installed
from schemas.config.model import ModelConfig

TILE = 128
"""Rows of a tile in products of matrices on GPUs."""


@dataclass(frozen=True)
class Choice:
    """Value taken for a key, with the reason."""

    key: str
    taken: str
    why: str

    def __str__(self) -> str:
        """Return a line for people."""
        return f"{self.key}: {self.taken} ({self.why})"


def choices(model: ModelConfig, sequence_len: int, on_gpu: bool) -> list[Choice]:
    """Return all choices of a model.

    Args:
        model: configuration of the model.
        sequence_len: tokens of the longest row.
        on_gpu: True if the model is computed on a GPU.
    """
    found = [output_layer(model, on_gpu), row_multiple(model, sequence_len, on_gpu)]
    if on_gpu:
        found.append(compiled(model))
    return [lora_forward(model, on_gpu), *found] if model.lora else found


def lora_forward(model: ModelConfig, on_gpu: bool) -> Choice:
    """Return whether `AdapterProduct` or peft computes the adapters of a model with `lora`."""
    key, lora = "model.lora_forward", model.lora
    assert lora is not None
    if model.lora_forward == "peft":
        return Choice(key, "peft", "as configured")
    if lora.dora:
        return Choice(key, "peft", "model.lora.dora scales each row of the whole matrix")
    if lora.dropout:
        return Choice(key, "peft", "model.lora.dropout draws on the input of each adapter")
    if model.lora_forward == "fused":
        return Choice(key, "fused", "as configured")
    # the mantissa of a power of two is 0.5
    if on_gpu or math.frexp(lora.scale)[0] == 0.5:
        return Choice(key, "fused", "fewer passes" + ("" if on_gpu else ", with the bits of peft"))
    return Choice(key, "peft", f"the scale {lora.scale:g} is no power of two, so on a CPU the last bits would differ")


def output_layer(model: ModelConfig, on_gpu: bool) -> Choice:
    """Return whether torch or kernels of Triton compute logprobs from logits."""
    key = "model.output_layer"
    if model.output_layer != "auto":
        return Choice(key, model.output_layer, "as configured")
    if not on_gpu:
        return Choice(key, "torch", "on a CPU")
    if not is_installed("triton"):
        return Choice(key, "torch", "triton is not installed")
    if c_compiler() is None:
        return Choice(key, "torch", "Triton needs a C compiler (CC), and there is none")
    return Choice(key, "triton", "if its values are those of torch at the start")


def row_multiple(model: ModelConfig, sequence_len: int, on_gpu: bool) -> Choice:
    """Return the number of tokens to multiples of which rows are padded."""
    key = "model.row_multiple"
    if model.row_multiple is not None:
        return Choice(key, str(model.row_multiple), "as configured")
    if not on_gpu:
        return Choice(key, "1", "on a CPU no row is padded")
    # products of matrices are computed in tiles of up to 128 rows
    found = max(1, round(sequence_len / 8 / TILE)) * TILE
    return Choice(key, str(found), f"{-(-sequence_len // found)} lengths up to packer.sequence_len")


def compiled(model: ModelConfig) -> Choice:
    """Return whether torch.compile compiles the layers of a model on a GPU."""
    key = "model.compile"
    if model.compile:
        return Choice(key, "true", "as configured")
    return Choice(key, "false", "true: faster steps after minutes at each start; last bits of a replay may differ")


def interprets_triton() -> bool:
    """Return whether kernels of Triton run in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
