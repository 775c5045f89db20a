"""Attention for packed rows, registered with transformers' AttentionInterface, so that no model code is copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
import torch
from transformers import AttentionInterface

from actors.models.attention.flash import flash_attention
from actors.models.attention.flex import flex_row_attention
from actors.models.attention.padded import padded_attention
from actors.models.attention.rows import PackedRow, dividable, pack_row
from actors.models.attention.varlen import has_varlen, varlen_row_attention
from actors.process.packages import c_compiler, is_installed
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

log = structlog.get_logger("models")

__all__ = ["NAMES", "PADDED", "PackedRow", "attending", "implementation", "pack_row"]

PADDED = "grpo_padded"
"""Name of the padded attention in transformers, which runs on every device."""
NAMES = {"padded": PADDED, "varlen": "grpo_varlen", "flash": "grpo_fa2", "flex": "grpo_flex"}
"""Names in transformers, by value of `model.attention`. A name with `flash` in it would mean transformers' own
attention."""


def implementation(config: ModelConfig, device: torch.device) -> str:
    """Return the name under which transformers finds the attention for a device, as `model.attention` says.

    Raises:
        ConfigError: the configured attention can't run on the device.
    """
    on_gpu = device.type == "cuda"
    chosen: str = config.attention
    if chosen == "auto":
        # FlashAttention, in torch and in its own package, has no kernels for float32
        on_this_gpu = "varlen" if has_varlen() and config.dtype == "bfloat16" else "flex"
        if on_gpu and on_this_gpu == "flex" and c_compiler() is None:
            log.warning(
                "attention is padded", why="FlexAttention is compiled for a GPU, and there is no C compiler (CC)"
            )
            on_this_gpu = "padded"
        chosen = on_this_gpu if on_gpu else "padded"
    if chosen != "padded" and not on_gpu:
        raise ConfigError(f"model.attention: {chosen} needs a GPU, and the model is on {device}; use auto or padded")
    if chosen == "varlen" and not has_varlen():
        raise ConfigError(
            f"model.attention: varlen needs torch 2.11 or newer, and this is {torch.__version__}; use auto"
        )
    if chosen == "flash" and not is_installed("flash_attn"):
        raise ConfigError("model.attention: flash needs the package flash-attn, which is not installed; use auto")
    return NAMES[chosen]


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """Compute a model with another attention meanwhile, given by its name in transformers."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


# not traced by torch.compile: index arrays have other shapes for each row
_untraced: Any = torch.compiler.disable
AttentionInterface.register(NAMES["padded"], _untraced(dividable(padded_attention)))
AttentionInterface.register(NAMES["varlen"], _untraced(dividable(varlen_row_attention)))
AttentionInterface.register(NAMES["flash"], _untraced(dividable(flash_attention)))
AttentionInterface.register(NAMES["flex"], dividable(flex_row_attention))
