"""Noise on the norms of the inference policy, which makes it explore more where it is certain (QeRL, 2510.11696).

The trainer stays clean; the engine's logprobs are those of the noisy policy, so importance ratios stay right. Every
engine draws the same noise for a version: a policy is one thing, wherever it is served.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.config.noise import NoiseConfig

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "norm",
)
"""Modules whose weight is noisy; those of queries and keys are not."""


def sigma_at(version: int, total: int, config: NoiseConfig) -> float:
    """Standard deviation for a policy version of a run of `total` steps.

    Nothing in the first of equal intervals, then from `sigma_start` down to `sigma_end` by equal factors. Of 40 steps
    with the defaults: 0 at step 0, 0.05 at 4, 0.0281171 at 8, … 0.0005 at 36.
    """
    stages = config.num_stages
    if stages <= 2:
        trend = [config.sigma_start]
    else:
        fall = config.sigma_end / config.sigma_start
        trend = [config.sigma_start * fall ** (i / (stages - 2)) for i in range(stages - 1)]
    interval = int(min(version, total) / (total / (len(trend) + 1)))
    return trend[min(interval, len(trend)) - 1] if interval else 0.0


def is_noisy_norm(name: str) -> bool:
    """Whether a parameter is the weight of such a norm."""
    return name.endswith(".weight") and name.split(".")[-2] in NORMS


@dataclass(frozen=True)
class NormNoise:
    """The noise of one run."""

    config: NoiseConfig
    total_steps: int
    seed: int

    def on(self, clean: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
        """Each weight with the noise of a version, in its own precision and place.

        Args:
            clean: norm weights by their Hugging Face names, which decide what is drawn for each.
            version: of the policy.
        """
        sigma = sigma_at(version, self.total_steps, self.config)
        return {name: weight + sigma * self._draw(name, weight, version) for name, weight in clean.items()}

    def _draw(self, name: str, weight: Tensor, version: int) -> Tensor:
        digest = hashlib.sha256(f"norm noise {self.seed} {version} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(weight.shape, generator=generator).to(weight)
