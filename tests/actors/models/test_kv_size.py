"""Size of a token's keys and values, against numbers computed by hand."""

from typing import Any

import pytest

from actors.models.kv_size import kv_bytes_per_token


@pytest.mark.parametrize(
    ("config", "item_bytes", "expected"),
    [
        # Qwen3-0.6B: 28 layers, 8 heads of keys of 128
        (
            {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
            2,
            2 * 28 * 8 * 128 * 2,
        ),
        # Qwen2.5-0.5B says no head_dim: 896 / 14
        (
            {"num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
            2,
            2 * 24 * 2 * 64 * 2,
        ),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 4, 2 * 12 * 768 * 4),  # GPT-2
        ({"text_config": {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}}, 4, 2 * 2 * 8 * 4),
        ({}, 4, 0),
    ],
)
def test_bytes_of_a_tokens_keys_and_values(config: dict[str, Any], item_bytes: int, expected: int) -> None:
    """In the names of the families that people train."""
    assert kv_bytes_per_token(config, item_bytes) == expected
