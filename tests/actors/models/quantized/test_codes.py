"""Codes of 8 and 4 bits against a reader of their bits in NumPy, written from the formats' definitions."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.models.quantized.codes import FORMATS, Codes, Fp8Codes, Nvfp4Codes

ALL: dict[str, Codes] = {
    **FORMATS,
    "fp8 tensor": Fp8Codes(per_row=False),
    "fp8 block": Fp8Codes(block=(8, 24)),
}
SHAPES = [(1, 16), (7, 48), (130, 256)]


def fp8_value(byte: int) -> float:
    """Value of FP8_E4M3 by its definition: sign, four bits of exponent with bias 7, three bits of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp4_value(code: int) -> float:
    """Value of FP4_E2M1 by its definition: sign, two bits of exponent with bias 1, one bit of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def read(tensors: dict[str, Tensor], codes: Codes) -> Any:
    """Weight in float64, (out, in), element by element."""

    def fp8(tensor: Tensor) -> Any:
        return np.vectorize(fp8_value)(tensor.view(torch.uint8).numpy())

    if isinstance(codes, Nvfp4Codes):
        packed = tensors["weight_packed"].numpy()
        factor = float(tensors["weight_global_scale"])
        scales = fp8(tensors["weight_scale"]) / factor
        rows, half = packed.shape
        found = np.zeros((rows, 2 * half))
        for i in range(rows):
            for j in range(2 * half):
                byte = int(packed[i, j // 2])
                found[i, j] = fp4_value(byte >> 4 if j % 2 else byte & 15) * scales[i, j // 16]
        return found
    assert isinstance(codes, Fp8Codes)
    values, scales = fp8(tensors["weight"]), tensors["weight_scale"].double().numpy()
    if codes.block is None:
        return values * scales.reshape(-1, 1)
    rows, columns = codes.block
    return np.array(
        [[v * scales[i // rows, j // columns] for j, v in enumerate(row)] for i, row in enumerate(values.tolist())]
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_the_decoded_weight_is_what_the_bits_say(name: str, shape: tuple[int, int]) -> None:
    """Each element to 1e-6, for random bits of a layer as for encoded weights."""
    codes = ALL[name]
    torch.manual_seed(0)
    tensors = codes.encode(torch.randn(shape) * torch.rand(shape[0], 1))
    np.testing.assert_allclose(codes.decode(tensors).double().numpy(), read(tensors, codes), rtol=1e-6, atol=0)
    assert {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()} == codes.layout(*shape)


@pytest.mark.parametrize(("name", "step"), [("fp8", 2.0**-4), ("fp8 tensor", 2.0**-4), ("fp8 block", 2.0**-4)])
def test_a_weight_moves_by_half_a_step_of_eight_bits_at_most(name: str, step: float) -> None:
    """A mantissa of three bits: a relative error of a sixteenth, above the smallest normal values."""
    torch.manual_seed(1)
    weight = torch.randn(64, 96)
    found = ALL[name].decode(ALL[name].encode(weight))
    large = weight.abs() > 0.05
    assert float(((found - weight).abs() / weight.abs())[large].max()) <= step


def test_each_weight_of_four_bits_is_the_nearest_of_its_scale() -> None:
    """No other code of the group would be nearer; a tie goes to the even code, as in compressed-tensors."""
    torch.manual_seed(2)
    codes, weight = Nvfp4Codes(), torch.randn(32, 64)
    tensors = codes.encode(weight)
    steps = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    values = torch.tensor([fp4_value(code) for code in range(16)])
    candidates = values * steps.repeat_interleave(16, 1)[..., None]
    nearest = (candidates - weight[..., None]).abs().amin(-1)
    assert torch.allclose((codes.decode(tensors) - weight).abs(), nearest, rtol=1e-5, atol=1e-7)


def test_ties_of_four_bits_go_to_the_even_code() -> None:
    """The group's largest weight is 6 steps of 1, so the others are between two codes."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    weight = torch.tensor([[6.0, *ties, *(-t for t in ties), 0.0]])
    found = Nvfp4Codes().decode(Nvfp4Codes().encode(weight))
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    torch.testing.assert_close(found, torch.tensor([[6.0, *expected, *(-e for e in expected), 0.0]]))


def test_siblings_have_one_factor() -> None:
    """An engine joins q, k and v to a single tensor, which has a single factor."""
    torch.manual_seed(3)
    small, large = torch.randn(16, 32), torch.randn(8, 32) * 100
    codes = Nvfp4Codes()
    factors = [codes.encode(small, [large]), codes.encode(large, [small])]
    assert torch.equal(factors[0]["weight_global_scale"], factors[1]["weight_global_scale"])
    assert not torch.equal(factors[0]["weight_global_scale"], codes.encode(small)["weight_global_scale"])


@pytest.mark.parametrize("name", ALL)
def test_zeros_and_extreme_weights_stay_finite(name: str) -> None:
    """A row of zeros has no scale of its own; the smallest and the largest float32 give no infinity."""
    for weight in (torch.zeros(4, 48), torch.full((4, 48), 1e-38), torch.full((4, 48), 3e38)):
        found = ALL[name].decode(ALL[name].encode(weight))
        assert bool(torch.isfinite(found).all())
        if not weight.any():
            assert not found.any()


def test_a_width_without_whole_groups_is_named() -> None:
    """NVFP4 has a scale per 16 weights; FP8 takes any width."""
    assert "40 inputs are no multiple of 16" in Nvfp4Codes().problem(40)
    assert not Nvfp4Codes().problem(48)
    assert not Fp8Codes().problem(41)
