"""Attention for packed rows, registered with transformers' AttentionInterface, so that no model code is copied."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import AttentionInterface

from actors.models.attention.flash import flash_attention
from actors.models.attention.flex import flex_row_attention
from actors.models.attention.padded import padded_attention
from actors.models.attention.rows import PackedRow, pack_row
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

__all__ = ["NAMES", "PADDED", "PackedRow", "implementation", "pack_row"]

PADDED = "grpo_padded"
"""Name of the padded attention in transformers, which runs on every device."""
NAMES = {"padded": PADDED, "flash": "grpo_varlen", "flex": "grpo_flex"}
"""Names in transformers, by value of `model.attention`. A name with `flash` in it would mean transformers' own
attention."""


def implementation(config: ModelConfig, device: torch.device) -> str:
    """Return the name under which transformers finds the attention for a device, as `model.attention` says.

    Raises:
        ConfigError: the configured attention can't run on the device.
    """
    on_gpu, has_flash = device.type == "cuda", find_spec("flash_attn") is not None
    chosen: str = config.attention
    if chosen == "auto":
        # flash-attn has no kernels for float32
        on_this_gpu = "flash" if has_flash and config.dtype == "bfloat16" else "flex"
        chosen = on_this_gpu if on_gpu else "padded"
    if chosen != "padded" and not on_gpu:
        raise ConfigError(f"model.attention: {chosen} needs a GPU, and the model is on {device}; use auto or padded")
    if chosen == "flash" and not has_flash:
        raise ConfigError("model.attention: flash needs the package flash-attn, which is not installed; use auto")
    return NAMES[chosen]


# not traced by torch.compile: index arrays have other shapes for each row
_untraced: Any = torch.compiler.disable
AttentionInterface.register(NAMES["padded"], _untraced(padded_attention))
AttentionInterface.register(NAMES["flash"], _untraced(flash_attention))
AttentionInterface.register(NAMES["flex"], flex_row_attention)
