"""Float32 weights of a model that computes in 16 bits: the masters, which training changes.

bfloat16 has 8 bits of mantissa. Most updates of a weight are smaller than the distance to the next such number, and so
are most micro-batches' shares of a gradient, so every sum is float32:

    backward   gradient of a weight ─▶ added to its master's gradient ─▶ dropped
    update     optimizer changes the masters ─▶ the masters are rounded into the model
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from actors.models import loading


class MasterWeights:
    """Weights that the optimizer, sums over ranks, clipping and checkpoints see.

    Args:
        model: model that computes. With masters, a backward pass leaves no gradients in it.
        masters: the same model in float32, which is never run. None: the model's own weights are trained.
    """

    def __init__(self, model: nn.Module, masters: nn.Module | None) -> None:
        self.model = model if masters is None else masters
        """Model whose parameters are trained."""
        self._rounded: list[Tensor] = []
        self._exact: list[Tensor] = []
        if masters is None:
            return
        # tied weights once; buffers too, so that all of a restored checkpoint reaches the model that computes
        rounded, exact = loading.full_tensors(model), loading.full_tensors(masters)
        assert rounded.keys() == exact.keys()
        self._rounded, self._exact = list(rounded.values()), list(exact.values())
        master_of = dict(masters.named_parameters())
        for name, weight in model.named_parameters():
            if not weight.requires_grad:  # of a frozen vision tower or projector
                continue
            weight.register_post_accumulate_grad_hook(_moves_to(master_of[name]))  # type: ignore[no-untyped-call]
        self.round()

    def round(self) -> None:
        """Round the masters into the model that computes. Call after each change of the masters."""
        if self._rounded:
            with torch.no_grad():
                torch._foreach_copy_(self._rounded, self._exact)


def _moves_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Return a hook that moves a weight's gradient to the master as soon as a backward pass has computed it."""

    def move(weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad += gradient

    return move
