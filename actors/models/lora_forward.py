"""Forward pass of peft's adapters without peft's passes over wide tensors: y = base(x) + scale · (x Aᵀ) Bᵀ.

Parameters, names and checkpoints stay peft's; only `forward` of an adapted layer is replaced. peft casts the input to
the adapter's float32 for each adapter, multiplies the wide output by the scale, and adds in a third pass; its backward
pass multiplies the wide gradient by the scale. Here the scale is applied to x Aᵀ, which is as narrow as the rank, and
the input is kept as it is, once for all layers that read it.

The base layer runs unchanged, whatever it is (quantised, a Conv1D). So gradients of the input are added in peft's
order, and with a scale that is a power of two, where multiplication is exact, all results have peft's bits.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

LAYERS = {"Linear", "Linear4bit"}
"""Types of peft's adapted layers that are two matrices beside a layer."""


class AdapterProduct(torch.autograd.Function):
    """base + scale · (x Aᵀ) Bᵀ, which keeps x and the narrow scale · x Aᵀ for the backward pass.

    `apply(base, x, a, b, scale)` takes base (…, out), x (…, in), a (rank, in) and b (out, rank), x, a and b in a single
    precision, and returns (…, out) in that of the base.
    """

    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Compute the narrow product, then add the wide one to the base in one pass."""
        narrow = linear(x, a).mul_(scale)
        ctx.scale, ctx.base_dtype = scale, base.dtype
        # of the first layer, whose input has no gradient, `a` is not needed again
        ctx.save_for_backward(x, narrow, a if ctx.needs_input_grad[1] else None, b)
        return linear(narrow, b).add_(base).to(base.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of base, x, a and b."""
        [of_out] = of_outputs
        x, narrow, a, b = ctx.saved_tensors
        wide = of_out.flatten(0, -2).to(narrow.dtype)
        of_narrow = (wide @ b).mul_(ctx.scale)
        return (
            of_out,
            None if a is None else (of_narrow @ a).view(x.shape),
            of_narrow.T @ x.flatten(0, -2),
            wide.T @ narrow.flatten(0, -2),
            None,
        )


def replace_forward(adapted: nn.Module) -> int:
    """Replace the forward of all plain adapted layers of a peft model; return their number."""
    layers = list(_plain_layers(adapted))
    for layer in layers:
        # parameters and hooks stay in place. Not a function of the object: torch would compile code for each layer
        layer.__class__ = _with_narrow_forward(type(layer))  # type: ignore[arg-type]  # a class can be hashed
    return len(layers)


def _plain_layers(adapted: nn.Module) -> Iterator[Any]:
    for module in adapted.modules():
        if type(module).__name__ in LAYERS and type(module).__module__.startswith("peft.tuners.lora."):
            yield module


@cache
def _with_narrow_forward(of_peft: Any) -> type:
    """Return a class of adapted layers like peft's, with this module's forward pass."""

    def forward(self: Any, x: Tensor) -> Tensor:
        # without its adapter (the reference), or merged: peft's forward is the base layer then
        if self.disable_adapters or self.merged:
            out: Tensor = of_peft.forward(self, x)
            return out
        return _forward(self, x)

    return type(of_peft.__name__, (of_peft,), {"forward": forward, "__module__": of_peft.__module__})


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Compute an adapted layer with its one active adapter."""
    base: Tensor = layer.base_layer(x)
    [name] = layer.active_adapters
    # read at each call: sharding puts other tensors in their place while a layer runs
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else a.dtype
    out: Tensor = AdapterProduct.apply(  # type: ignore[no-untyped-call]
        base, x.to(dtype), a.to(dtype), b.to(dtype), layer.scaling[name]
    )
    return out
