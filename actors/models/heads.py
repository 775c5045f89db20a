"""Division of a model's rows among ranks by attention heads, from its config.json. Needs no torch."""

import math
from collections.abc import Mapping
from typing import Any

from schemas.errors import ConfigError

BY_LONGEST = {"dynamic", "longrope", "su"}
"""Types of RoPE scaling whose frequencies depend on the longest position that a forward pass sees."""


def undividable(config: Mapping[str, Any], size: int, key: str) -> str:
    """Return the reason why ranks can't compute a model's rows together; empty if they can, or if nothing is known.

    Each rank takes as many heads of queries as another. Keys and values with fewer heads go to several ranks.

    Args:
        config: config.json, or the same as a dictionary.
        size: number of ranks for each row, 1 or more.
        key: name of the model in the configuration of the run.
    """
    if size == 1:
        return ""
    if config.get("vision_config"):
        return f"trainer.context_parallel: {key} has a vision tower, and rows with images are not divided; set 1"
    config = config.get("text_config") or config
    if kinds := _rope_types(config) & BY_LONGEST:
        return (
            f"trainer.context_parallel: the rotary embedding of {key} is of type {', '.join(sorted(kinds))}, which "
            "depends on the longest position of a row, and each rank sees a part of the row; set 1"
        )
    num_heads, num_kv_heads = (
        found if isinstance(found, int) else 0
        for found in (config.get("num_attention_heads") or config.get("n_head"), config.get("num_key_value_heads"))
    )
    num_kv_heads = num_kv_heads or num_heads
    fitting = [c for c in range(1, num_heads + 1) if num_heads % math.lcm(num_kv_heads, c) == 0]
    if size in fitting or not fitting:
        return ""
    return (
        f"trainer.context_parallel: {size} ranks can't divide the {num_heads} attention heads of {key} ({num_kv_heads} "
        f"for keys and values); set {', '.join(map(str, fitting[:-1])) or fitting[0]} or {fitting[-1]}"
    )


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return the types of RoPE scaling, of all types of layers."""
    found = set[str]()
    for scaling in (config.get("rope_scaling"), config.get("rope_parameters")):
        each = [scaling or {}, *(one for one in (scaling or {}).values() if isinstance(one, Mapping))]
        found |= {str(one.get("rope_type") or one.get("type")) for one in each}
    return found


def check_divides(model: Any, size: int, key: str = "model.path") -> None:
    """Check that ranks can compute the rows of a model together.

    Args:
        model: a causal language model of transformers.
        size: number of ranks for each row.
        key: name of the model in the configuration.

    Raises:
        ConfigError: the attention heads do not divide, or the model takes images.
    """
    if reason := undividable(model.config.to_dict(), size, key):
        raise ConfigError(reason)
