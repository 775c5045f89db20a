"""The layer's values and gradients against float64, packed rows, and what is kept for the backward pass."""

from itertools import product

import pytest
import torch
from torch import nn

from actors.models.quantized.codes import Codes
from actors.models.quantized.layer import QuantizedLinear
from tests.actors.models.quantized.test_codes import ALL, read


def made(codes: Codes, out: int, inner: int, bias: bool) -> tuple[QuantizedLinear, torch.Tensor]:
    """A layer with random codes, and its weight in float64."""
    torch.manual_seed(out + inner)
    tensors = codes.encode(torch.randn(out, inner))
    layer = QuantizedLinear(inner, out, codes, torch.float32 if bias else None)
    for name, tensor in tensors.items():
        getattr(layer, name).data.copy_(tensor)
    if bias:
        layer.bias.data.normal_()
    layer.hold_bytes()
    return layer, torch.from_numpy(read(tensors, codes))


@pytest.mark.parametrize(("out", "inner", "tokens"), [(1, 16, 1), (24, 48, 5), (64, 128, 300)])
@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients_are_those_of_the_decoded_weight(name: str, out: int, inner: int, tokens: int) -> None:
    """To 1e-5 in float32 and 1e-6 in float64, for y and for the gradient of x, with and without bias."""
    for bias, (dtype, tolerance) in product((False, True), ((torch.float32, 1e-5), (torch.float64, 1e-6))):
        layer, weight = made(ALL[name], out, inner, bias)
        if bias:
            layer.bias.data = layer.bias.data.to(dtype)
        x = torch.randn(2, tokens, inner, dtype=dtype, requires_grad=True)
        of_y = torch.randn(2, tokens, out, dtype=dtype)
        y = layer(x)
        y.backward(of_y)
        exact = x.detach().double() @ weight.T + (layer.bias.double() if bias else 0)
        size = float((x.detach().double().abs() @ weight.abs().T).max())
        torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance / 10 * size)
        exact = of_y.double() @ weight
        size = float((of_y.double().abs() @ weight.abs()).max())
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), exact, rtol=tolerance, atol=tolerance / 10 * size)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_a_batch_do_not_depend_on_each_other(name: str) -> None:
    """A packed row gives each token what it gets alone."""
    layer, _ = made(ALL[name], 32, 48, bias=False)
    x = torch.randn(64, 48)
    torch.testing.assert_close(layer(x), torch.cat([layer(one[None]) for one in x]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_nothing_wide_is_kept_for_the_backward_pass(name: str) -> None:
    """Neither inputs nor decoded weights: the graph saves no tensor."""
    layer, _ = made(ALL[name], 32, 48, bias=True)
    saved: list[torch.Size] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        y = layer(torch.randn(64, 48, requires_grad=True))
    y.sum().backward()
    assert saved == []


def test_autocast_decides_the_precision_of_the_product() -> None:
    """As for a linear layer: bfloat16 out of float32 inputs under autocast, also in the backward pass."""
    layer, weight = made(ALL["fp8"], 32, 48, bias=True)
    plain = nn.Linear(48, 32)
    plain.weight.data.copy_(weight)
    plain.bias.data.copy_(layer.bias.data)
    x = torch.randn(4, 48, requires_grad=True)
    found = []
    for each in (layer, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = each(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        found.append((y.detach(), x.grad.clone()))
        x.grad = None
    assert found[0][0].dtype == torch.bfloat16
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
