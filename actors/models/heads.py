"""Division of a model among ranks by attention heads, from its config.json. Needs no torch."""

import math
from collections.abc import Mapping
from typing import Any

from schemas.config.trainer import TrainerConfig
from schemas.errors import ConfigError

BY_LONGEST = {"dynamic", "longrope", "su"}
"""Types of RoPE scaling whose frequencies depend on the longest position that a forward pass sees."""


def undividable(config: Mapping[str, Any], trainer: TrainerConfig, key: str) -> str:
    """Return the reason why ranks can't compute a model's rows together; empty if they can, or if nothing is known.

    Each rank takes as many heads of queries as another. With `context_parallel`, keys and values with fewer heads go to
    several ranks; with `tensor_parallel` a rank has weights of its own heads alone.

    Args:
        config: config.json, or the same as a dictionary.
        trainer: configuration of the ranks.
        key: name of the model in the configuration of the run.
    """
    size = trainer.ranks_per_row
    if size == 1:
        return ""
    setting = "trainer.tensor_parallel" if trainer.tensor_parallel > 1 else "trainer.context_parallel"
    if config.get("vision_config"):
        return f"{setting}: {key} has a vision tower, and rows with images are not divided; set 1"
    config = config.get("text_config") or config
    if kinds := _rope_types(config) & BY_LONGEST:
        return (
            f"{setting}: the rotary embedding of {key} is of type {', '.join(sorted(kinds))}, which "
            "depends on the longest position of a row, and each rank sees a part of the row; set 1"
        )
    num_heads, num_kv_heads = (
        found if isinstance(found, int) else 0
        for found in (config.get("num_attention_heads") or config.get("n_head"), config.get("num_key_value_heads"))
    )
    num_kv_heads = num_kv_heads or num_heads
    if trainer.tensor_parallel > 1:
        fitting = [t for t in range(1, num_heads + 1) if math.gcd(num_heads, num_kv_heads) % t == 0]
    else:
        fitting = [c for c in range(1, num_heads + 1) if num_heads % math.lcm(num_kv_heads, c) == 0]
    if size in fitting or not fitting:
        return ""
    return (
        f"{setting}: {size} ranks can't divide the {num_heads} attention heads of {key} ({num_kv_heads} "
        f"for keys and values); set {', '.join(map(str, fitting[:-1])) or fitting[0]} or {fitting[-1]}"
    )


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return the types of RoPE scaling, of all types of layers."""
    found = set[str]()
    for scaling in (config.get("rope_scaling"), config.get("rope_parameters")):
        each = [scaling or {}, *(one for one in (scaling or {}).values() if isinstance(one, Mapping))]
        found |= {str(one.get("rope_type") or one.get("type")) for one in each}
    return found


def check_divides(model: Any, trainer: TrainerConfig, key: str = "model.path") -> None:
    """Check that ranks can compute the rows of a model together.

    Args:
        model: a causal language model of transformers.
        trainer: configuration of the ranks.
        key: name of the model in the configuration.

    Raises:
        ConfigError: the attention heads do not divide, or the model takes images.
    """
    if reason := undividable(model.config.to_dict(), trainer, key):
        raise ConfigError(reason)
