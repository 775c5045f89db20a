"""Trial of Triton's kernels at the start, on the very device and in the precision of the run."""

import structlog
import torch
from torch import Tensor

from actors.models import choices
from actors.models.logprobs import LogitTransform, chunked_logprobs_and_entropy
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

log = structlog.get_logger("models")

TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""Largest difference between the kernels and torch, in values of about 1."""


def takes_triton(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels of Triton compute logprobs from logits.

    Args:
        model: configuration of the model.
        device: device of computation.
        dtype: precision of the logits.

    Raises:
        ConfigError: `model.output_layer: triton` is configured, and the kernels do not run here.
    """
    if choices.output_layer(model, device.type == "cuda").taken != "triton":
        return False
    if device.type != "cuda" and not choices.interprets_triton():
        raise ConfigError(f"model.output_layer: triton needs a GPU, and the model is on {device}; use auto or torch")
    problem = trial(device, dtype)
    if problem and model.output_layer == "triton":
        raise ConfigError(f"model.output_layer: triton: {problem}; use auto or torch")
    if problem:
        log.warning("logprobs are computed by torch", why=problem)
    return not problem


def trial(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the kernels can't be used; empty if values and gradients are those of torch."""
    try:
        plain, fused = (_computed(device, dtype, fused) for fused in (False, True))
    except Exception as error:  # noqa: BLE001 - a compiler has many ways to fail, and torch computes the same
        first_line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return f"the kernels do not run: {first_line}"
    worst = max(float((one - other).abs().max()) for one, other in zip(plain, fused, strict=True))
    # written so that NaN is a problem too
    return "" if worst <= TOLERANCES[dtype] else f"the kernels differ from torch by {worst:.2g}"


def _computed(device: torch.device, dtype: torch.dtype, fused: bool) -> list[Tensor]:
    """Return logprobs, entropies and gradients of a made-up output layer, larger than a kernel's block."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    tokens, size, vocabulary = 6, 16, 5000
    hidden, weight, bias = made(tokens, size), made(vocabulary, size), made(vocabulary)
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    temperatures = torch.linspace(0, 2, tokens, device=device)
    transform = LogitTransform(scale=0.5, cap=20.0)
    found = chunked_logprobs_and_entropy(
        hidden, weight, bias, ids, temperatures, transform, entropy_gradient=True, fused=fused
    )
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), (hidden, weight, bias))
    return [x.detach().float() for x in (*found, *gradients)]
