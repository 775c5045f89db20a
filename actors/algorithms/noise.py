"""Noise on the norm weights of the served policy, for more exploration (QeRL, arXiv 2510.11696).

The trainer's weights stay clean. The engine reports the logprobs of the noisy policy, so importance ratios stay right.
All engines draw the same noise for a version, since a version must be the same policy on every engine.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.config import RunConfig
from schemas.config.noise import NoiseConfig
from schemas.errors import ConfigError

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "norm",
)
"""Names of the modules with noisy weights; norms of queries and keys stay clean."""
VISION = "visual"
"""Name of the module with the vision tower, whose norms stay clean."""


def sigma_at(version: int, total: int, config: NoiseConfig) -> float:
    """Return the standard deviation of the noise for a policy version in a run of `total` steps.

    The run is cut into `num_stages` equal stages: 0 in the first, then from `sigma_start` down to `sigma_end` by equal
    factors. With 1 or 2 stages: 0 in the first half of the run, `sigma_start` in the second. 40 steps with the
    defaults: 0 at version 0, 0.05 at 4, 0.0281171 at 8, … 0.0005 at 36.
    """
    stages = config.num_stages
    if stages <= 2:
        trend = [config.sigma_start]
    else:
        fall = config.sigma_end / config.sigma_start
        trend = [config.sigma_start * fall ** (i / (stages - 2)) for i in range(stages - 1)]
    # interval 0 is the noiseless first stage, so trend[0] belongs to interval 1
    interval = int(min(version, total) / (total / (len(trend) + 1)))
    return trend[min(interval, len(trend)) - 1] if interval else 0.0


def is_noisy_norm(name: str) -> bool:
    """Return whether a parameter (by its Hugging Face name) is a norm weight that gets noise."""
    parts = name.split(".")
    return name.endswith(".weight") and parts[-2] in NORMS and VISION not in parts


@dataclass(frozen=True)
class NormNoise:
    """Noise of one run."""

    config: NoiseConfig
    """Schedule of the standard deviation."""
    total_steps: int
    """Steps of the run, `trainer.max_steps`."""
    seed: int
    """Seed of the run."""

    def on(self, clean: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
        """Return each weight plus the noise of a version, in the weight's own dtype and on its device.

        Args:
            clean: norm weights by their Hugging Face names; the name seeds the draw.
            version: of the policy.
        """
        sigma = sigma_at(version, self.total_steps, self.config)
        noisy = {}
        for name, weight in clean.items():
            # drawn on the CPU and seeded by name, so that neither the device nor the order of weights changes the noise
            digest = hashlib.sha256(f"norm noise {self.seed} {version} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            noisy[name] = weight + sigma * torch.randn(weight.shape, generator=generator).to(weight)
        return noisy


def norm_noise(config: RunConfig) -> NormNoise | None:
    """Return the noise that engines add to the norm weights of a run's policy; None if not configured."""
    noise = config.inference.noise
    if noise is not None and not config.trainer.max_steps:
        raise ConfigError(
            "inference.noise: its stages are parts of trainer.max_steps, which an actor that is started by itself does "
            "not know from trainer.max_epochs; set trainer.max_steps instead, or use `actors up`"
        )
    return None if noise is None else NormNoise(noise, config.trainer.max_steps, config.seed)
