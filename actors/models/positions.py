"""Number of positions a model can attend to, from its config.json. Needs no torch."""

from collections.abc import Mapping
from typing import Any

SCALED_BY_FACTOR = ("linear", "dynamic", "yarn")
"""Types of RoPE scaling whose factor counts. For `llama3` and `longrope`, `max_position_embeddings` is after
scaling."""


def num_positions(config: Mapping[str, Any]) -> int:
    """Return the number of positions of a model after RoPE scaling; 0 if the configuration does not say.

    Qwen2.5 with 32768 positions and YaRN of factor 4 has 131072. DeepSeek-V3's configuration says 163840, for 4096 ×
    40.

    Args:
        config: config.json, in the names of transformers 5 (`rope_parameters`) or earlier (`rope_scaling`, which
            transformers prefers if both are present).
    """
    config = config.get("text_config") or config
    own = int(config.get("max_position_embeddings") or config.get("n_positions") or 0)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in SCALED_BY_FACTOR:  # also if each type of layer has its own: positions are then after scaling
        return own
    original = int(rope.get("original_max_position_embeddings") or own)
    return max(own, int(original * float(rope.get("factor") or 1.0)))
