"""Gradients of a step of the learner, for comparisons."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from actors.learner.learner import TorchLearner


@contextmanager
def captured_gradients(learner: TorchLearner) -> Iterator[dict[str, Tensor]]:
    """Yield a mapping with copies of all gradients by name, clipped, after a step in the block."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        named = learner.trained.named_parameters()
        found.update({name: p.grad.float().cpu().clone() for name, p in named if p.grad is not None})

    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield found
    finally:
        hook.remove()
