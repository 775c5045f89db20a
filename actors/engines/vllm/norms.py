"""Norms with noise for a server (see `algorithms.noise`), always computed from clean norms.

With full weights each version brings clean norms. Adapters lie on the norms of the model's own files.
"""

from dataclasses import replace

import torch
from safetensors import safe_open
from torch import Tensor

from actors.algorithms.noise import NormNoise, is_noisy_norm
from actors.engines.external.staging import model_files
from bus.weights import Weights
from schemas.config.model import ModelConfig


def noisy(weights: Weights, noise: NormNoise, version: int) -> Weights:
    """Return all weights of a version with noise on the norms, and without files: the channel's files are clean."""
    norms = {name: tensor for name, tensor in weights.tensors.items() if is_noisy_norm(name)}
    return replace(weights, tensors=weights.tensors | noise.on(norms, version), directory="")


def model_norms(model: ModelConfig) -> dict[str, Tensor]:
    """Return the norms that get noise, from the model's own files, in the server's precision.

    Raises:
        ConfigError: the model has no safetensors files.
    """
    norms: dict[str, Tensor] = {}
    for path in model_files(model):
        with safe_open(path, "pt") as file:
            norms |= {name: file.get_tensor(name) for name in file.keys() if is_noisy_norm(name)}  # noqa: SIM118
    # noise must come out of the same numbers that are served
    return {name: norm.to(getattr(torch, model.dtype)) for name, norm in norms.items()}
