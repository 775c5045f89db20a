"""Linear layer whose frozen weight is codes: y = x Wᵀ, with W decoded for each product and kept by none."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from actors.models.quantized.codes import Codes


class QuantizedLinear(nn.Linear):
    """Linear layer with a frozen weight of codes; the gradient of its input is exact for the decoded weight.

    A subclass of `nn.Linear`, since peft gives adapters to those. The codes are in `weight` as bytes: peft gives new
    adapters the precision of a floating-point `weight`, and 8 bits are too few for them.
    """

    def __init__(self, in_features: int, out_features: int, codes: Codes, bias_dtype: torch.dtype | None) -> None:
        """Make an empty layer, whose tensors have the names of the files until `hold_bytes`.

        Args:
            in_features: number of inputs.
            out_features: number of outputs.
            codes: the number format.
            bias_dtype: precision of the bias; None: no bias.
        """
        nn.Module.__init__(self)  # not that of nn.Linear, which makes a whole weight
        self.in_features, self.out_features, self.codes = in_features, out_features, codes
        layout = codes.layout(out_features, in_features)
        for name, (shape, dtype) in layout.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        bias = None if bias_dtype is None else torch.empty(out_features, dtype=bias_dtype)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._names = tuple(layout)

    def hold_bytes(self) -> None:
        """Rename the tensor of codes to `weight`, as bytes, once the files' tensors are loaded."""
        first = self._names[0]
        loaded = getattr(self, first)
        delattr(self, first)
        self.weight = nn.Parameter(loaded.data.view(torch.uint8), requires_grad=False)

    def decoded(self) -> Tensor:
        """Return the weight that the codes stand for, in float32, (out, in)."""
        first, *scales = self._names
        return self.codes.decode({first: self.weight} | {name: getattr(self, name) for name in scales})

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Linear
        """Return the product with the decoded weight, in the precision of autocast or of the input."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        out: Tensor = _Product.apply(input.to(dtype), self)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        """Return sizes and format, for people."""
        return f"{self.in_features}, {self.out_features}, {self.codes.name}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """x Wᵀ + b that keeps neither x nor W for the backward pass: W is decoded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        """Decode the weight in the precision of x, and multiply."""
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return linear(x, layer.decoded().to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        [of_out] = of_outputs
        return of_out @ ctx.layer.decoded().to(of_out.dtype), None
