"""QeRL's noise: the published table of its deviations, which weights it is on, and what decides its draw."""

import pytest
import torch

from actors.algorithms.noise import NormNoise, is_noisy_norm, sigma_at
from schemas.config.noise import NoiseConfig


def test_sigma_of_forty_steps_in_ten_stages() -> None:
    """0.05 to 0.0005: the cited values at steps 0, 4, 8, … 36; a step beyond the end has the last one."""
    cited = [0, 0.05, 0.0281171, 0.0158114, 0.0088914, 0.005, 0.0028117, 0.0015811, 0.0008891, 0.0005]
    assert [sigma_at(step, 40, NoiseConfig()) for step in range(0, 40, 4)] == pytest.approx(cited, abs=5e-8)
    assert sigma_at(3, 40, NoiseConfig()) == 0.0
    assert sigma_at(40, 40, NoiseConfig()) == sigma_at(99, 40, NoiseConfig()) == pytest.approx(5e-4)


@pytest.mark.parametrize("stages", [1, 2])
def test_one_or_two_stages_have_the_first_deviation_alone(stages: int) -> None:
    """Nothing in the first half of ten steps, then sigma_start."""
    config = NoiseConfig(num_stages=stages)
    assert [sigma_at(step, 10, config) for step in (0, 4, 5, 10)] == [0.0, 0.0, 0.05, 0.05]


@pytest.mark.parametrize(
    ("name", "has_noise"),
    [
        ("model.layers.3.input_layernorm.weight", True),
        ("model.layers.3.post_attention_layernorm.weight", True),
        ("model.layers.3.pre_feedforward_layernorm.weight", True),
        ("model.norm.weight", True),
        ("base_model.model.model.norm.weight", True),
        ("model.layers.3.self_attn.q_norm.weight", False),
        ("model.layers.3.self_attn.k_norm.weight", False),
        ("model.layers.3.mlp.up_proj.weight", False),
        ("model.norm.bias", False),
    ],
)
def test_norms_of_layers_are_noisy_and_those_of_queries_and_keys_are_not(name: str, has_noise: bool) -> None:
    """By the names that Hugging Face models have."""
    assert is_noisy_norm(name) == has_noise


def test_noise_has_its_deviation_and_follows_from_seed_version_and_name_alone() -> None:
    """100 000 draws: mean 0 and standard deviation 0.05 within 1 %; bfloat16 weights stay so."""
    clean = {"model.norm.weight": torch.ones(100_000)}
    noise = NormNoise(NoiseConfig(), total_steps=40, seed=1)
    drawn = noise.on(clean, 4)["model.norm.weight"] - 1
    assert drawn.std() == pytest.approx(0.05, rel=0.01)
    assert drawn.mean() == pytest.approx(0.0, abs=5e-4)
    assert torch.equal(noise.on(clean, 4)["model.norm.weight"] - 1, drawn)
    others = [
        noise.on(clean, 5)["model.norm.weight"],
        NormNoise(NoiseConfig(), 40, 2).on(clean, 4)["model.norm.weight"],
        noise.on({"model.layers.0.input_layernorm.weight": torch.ones(100_000)}, 4).popitem()[1],
    ]
    assert all(abs(torch.corrcoef(torch.stack([drawn, other - 1]))[0, 1]) < 0.02 for other in others)
    halved = noise.on({"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)}, 4)["model.norm.weight"]
    assert halved.dtype == torch.bfloat16
    assert torch.equal(noise.on(clean, 0)["model.norm.weight"], clean["model.norm.weight"])


def test_deviation_that_rises_is_refused() -> None:
    """sigma_end above sigma_start."""
    with pytest.raises(ValueError, match=r"sigma_end: 0\.1 is above sigma_start: 0\.05"):
        NoiseConfig(sigma_end=0.1)
