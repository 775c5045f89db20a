"""Size of the keys and values of a token, from a model's config.json. Needs no torch."""

from collections.abc import Mapping
from typing import Any


def kv_bytes_per_token(config: Mapping[str, Any], item_bytes: int) -> int:
    """Return the bytes of a token's keys and values in all layers; 0 if the configuration does not say.

    Args:
        config: config.json, or the same as a dictionary.
        item_bytes: bytes of a number.
    """
    config = config.get("text_config") or config
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    heads = config.get("num_attention_heads") or config.get("n_head") or 0
    width = config.get("hidden_size") or config.get("n_embd") or 0
    if not heads:
        return 0
    # grouped-query attention has fewer heads of keys
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or width // heads
    return int(2 * layers * kv_heads * dim * item_bytes)
