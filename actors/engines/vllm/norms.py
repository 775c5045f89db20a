"""Noise on the norms of the policy that a server serves (see `algorithms.noise`), always from clean ones.

All weights come clean with each version, an adapter over norms that are those of the model's own files.
"""

from dataclasses import replace

import torch
from safetensors import safe_open
from torch import Tensor

from actors.algorithms.noise import NormNoise, is_noisy_norm
from actors.engines.folders import model_files
from bus.weights import Weights
from schemas.config.model import ModelConfig


def noisy(weights: Weights, noise: NormNoise, version: int) -> Weights:
    """All weights of a version with its noise, and no files: those of the channel are clean."""
    norms = {name: tensor for name, tensor in weights.tensors.items() if is_noisy_norm(name)}
    return replace(weights, tensors=weights.tensors | noise.on(norms, version), directory="")


def model_norms(model: ModelConfig) -> dict[str, Tensor]:
    """The norms that have noise, from the model's own files, in the precision that it is served in.

    Raises:
        ConfigError: it has no safetensors.
    """
    norms: dict[str, Tensor] = {}
    for path in model_files(model):
        with safe_open(path, "pt") as file:
            norms |= {name: file.get_tensor(name) for name in file.keys() if is_noisy_norm(name)}  # noqa: SIM118
    return {name: norm.to(getattr(torch, model.dtype)) for name, norm in norms.items()}
