"""Attention for packed rows, registered with transformers' AttentionInterface, so that no model code is copied."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import AttentionInterface

from actors.policy.attention.flash import flash_attention
from actors.policy.attention.flex import flex_row_attention
from actors.policy.attention.padded import padded_attention
from actors.policy.attention.rows import PackedRow, pack_row
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

__all__ = ["NAMES", "PADDED", "PackedRow", "implementation", "pack_row"]

PADDED = "grpo_padded"
"""Runs everywhere."""
NAMES = {"padded": PADDED, "flash": "grpo_varlen", "flex": "grpo_flex"}
"""For transformers, which takes a name with `flash` in it for one of its own."""


def implementation(config: ModelConfig, device: torch.device) -> str:
    """The name under which transformers finds what `model.attention` chooses for a device.

    Raises:
        ConfigError: that can't run there.
    """
    on_gpu, has_flash = device.type == "cuda", find_spec("flash_attn") is not None
    chosen: str = config.attention
    if chosen == "auto":
        on_this_gpu = "flash" if has_flash and config.dtype == "bfloat16" else "flex"
        chosen = on_this_gpu if on_gpu else "padded"
    if chosen != "padded" and not on_gpu:
        raise ConfigError(f"model.attention: {chosen} needs a GPU, and the model is on {device}; use auto or padded")
    if chosen == "flash" and not has_flash:
        raise ConfigError("model.attention: flash needs the package flash-attn, which is not installed; use auto")
    return NAMES[chosen]


_untraced: Any = torch.compiler.disable  # what gathers samples has other shapes for each row
AttentionInterface.register(NAMES["padded"], _untraced(padded_attention))
AttentionInterface.register(NAMES["flash"], _untraced(flash_attention))
AttentionInterface.register(NAMES["flex"], flex_row_attention)
