"""Micro-batches for the losses whose ratio is to the engine's policy, and what a loss makes of them."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from actors.algorithms.losses import LossInputs, LossOutput, compute_loss
from schemas.config.objective import ObjectiveConfig


def inputs_of(p: Sequence[float], q: Sequence[float], advantages: Sequence[float], **changes: Any) -> LossInputs:
    """One completion from the trainer's and the engine's probabilities; every token is in the loss."""
    given = {
        "logprobs_T": torch.tensor([math.log(x) for x in p], dtype=torch.float64, requires_grad=True),
        "inference_logprobs_T": torch.tensor([math.log(x) for x in q], dtype=torch.float64),
        "advantages_T": torch.tensor(advantages, dtype=torch.float64),
        "loss_mask_T": torch.ones(len(p), dtype=torch.bool),
        "completion_of_T": torch.zeros(len(p), dtype=torch.int64),
        "num_completions": 1,
        "loss_tokens": len(p),
    }
    return LossInputs(**given | changes)


def random_inputs(seed: int) -> LossInputs:
    """Nine completions of 1 to 8 tokens, a quarter of them not in the loss, some advantages 0, of versions 1 to 6."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (9,), generator=rng)
    size = int(lengths.sum())

    def near(logprobs: torch.Tensor) -> torch.Tensor:
        return (logprobs + 0.6 * torch.randn(size, generator=rng, dtype=torch.float64)).clamp(max=-1e-3)

    start = -2 * torch.rand(size, generator=rng, dtype=torch.float64)
    return LossInputs(
        logprobs_T=near(start).requires_grad_(),
        inference_logprobs_T=near(start),
        old_logprobs_T=near(start),
        teacher_logprobs_T=near(start),
        advantages_T=torch.randn(size, generator=rng, dtype=torch.float64) * (torch.rand(size, generator=rng) > 0.2),
        loss_mask_T=torch.rand(size, generator=rng) > 0.25,
        completion_of_T=torch.repeat_interleave(torch.arange(9), lengths),
        num_completions=9,
        loss_tokens=37,
        versions_T=torch.randint(1, 7, (size,), generator=rng),
        version=6,
    )


def computed(inputs: LossInputs, config: Any) -> tuple[LossOutput, list[float]]:
    """The loss alone, and its gradient by token."""
    output = compute_loss(inputs, ObjectiveConfig(loss=config))
    (grad,) = torch.autograd.grad(output.loss, inputs.logprobs_T)
    return output, grad.tolist()


def counts(output: LossOutput, *names: str) -> list[int]:
    """Sums that are counts of tokens."""
    return [int(output.sums[name]) for name in names]
