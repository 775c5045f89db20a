"""How many positions a model's config.json says it has."""

from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from actors.models.positions import num_positions


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, 0),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 96}}, 96),
        ({"max_position_embeddings": 32768, "rope_scaling": None}, 32768),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
            },
            131072,
        ),
    ],
)
def test_positions_are_those_after_scaling(config: dict[str, Any], positions: int) -> None:
    """Types whose max_position_embeddings is after scaling are taken at their word."""
    assert num_positions(config) == positions


def test_configurations_of_transformers_are_understood() -> None:
    """What the embedded engine asks: the loaded configuration, in the names of the installed version."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}
    assert num_positions(Qwen2Config(max_position_embeddings=96, rope_scaling=yarn).to_dict()) == 384
    assert num_positions(LlamaConfig(max_position_embeddings=96).to_dict()) == 96
