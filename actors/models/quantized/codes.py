"""Codes of 8 and 4 bits for a matrix of weights, and the weights that they stand for. Pure functions.

Names and layouts of the tensors are those of compressed-tensors: `float-quantized` and `nvfp4-pack-quantized`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite value of FP8_E4M3."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of FP4_E2M1 without sign, by their code of three bits."""
FP4_GROUP = 16
"""Number of weights that share a scale in NVFP4."""

Shape = tuple[int, ...]


def _boundaries() -> Tensor:
    """Return the largest float32 below each code's successor, (7,). A value between two codes gets the even one."""
    middles = torch.tensor(FP4_VALUES).unfold(0, 2, 1).mean(1)
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(()))  # the code above is even
    return middles


class Codes(ABC):
    """A number format for the weights of a linear layer."""

    name: str
    """Name of the format, for people."""
    bits: float
    """Bits per weight, with the scales of a large layer."""

    @abstractmethod
    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return shape and precision of each tensor of a layer, by name in the files."""

    @abstractmethod
    def encode(self, weight: Tensor, siblings: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return the tensors that stand for a weight, by name.

        Args:
            weight: the weight, (out, in).
            siblings: weights of layers that an engine may join with this one to a single product, as q, k and v.
        """

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the weight that the tensors stand for, in float32, (out, in)."""

    @abstractmethod
    def problem(self, in_features: int) -> str:
        """Return why a layer with so many inputs can't have this format; empty if it can."""


@dataclass(frozen=True)
class Fp8Codes(Codes):
    """FP8_E4M3 with a float32 scale per row, per tensor, or per block of rows and columns."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: see `per_row`."""
    per_row: bool = True
    """A scale per row, otherwise one for the tensor; without meaning with `block`."""
    name = "fp8"
    bits = 8.0

    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return codes (out, in) and scales."""
        scales: Shape = (out_features, 1) if self.per_row else (1,)
        if self.block:
            scales = (-(-out_features // self.block[0]), -(-in_features // self.block[1]))
        return {"weight": ((out_features, in_features), FP8), "weight_scale": (scales, torch.float32)}

    def encode(self, weight: Tensor, siblings: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return codes whose largest magnitude per scale is FP8's largest value."""
        weight = weight.float()
        largest = self._blocks(weight.abs()).amax((1, 3)) if self.block else weight.abs().amax(1, keepdim=True)
        if not (self.block or self.per_row):
            largest = largest.amax().view(1)
        scales = largest.clamp(min=torch.finfo(torch.float32).tiny) / FP8_MAX
        codes = (weight / self._spread(scales, weight.shape)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return {"weight": codes, "weight_scale": scales}

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return code × scale."""
        codes = tensors["weight"].view(FP8).float()
        return codes * self._spread(tensors["weight_scale"].float(), codes.shape)

    def problem(self, in_features: int) -> str:
        """Return nothing: any layer can have this format."""
        return ""

    def _blocks(self, weight: Tensor) -> Tensor:
        """Return a weight as (blocks of rows, rows, blocks of columns, columns), with zeros at the edges."""
        assert self.block is not None
        rows, columns = self.block
        out, inner = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -inner % columns, 0, -out % rows))
        return padded.view(-1, rows, padded.shape[1] // columns, columns)

    def _spread(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """Return scales as a tensor that multiplies codes."""
        if self.block is None:
            return scales.view(-1, 1)
        spread = scales.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return spread[: shape[0], : shape[1]]


@dataclass(frozen=True)
class Nvfp4Codes(Codes):
    """FP4_E2M1, two codes a byte, with an FP8 scale per 16 weights of a row and a float32 factor for the tensor."""

    name = "nvfp4"
    bits = 4.5

    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return codes (out, in ÷ 2), scales (out, in ÷ 16) and the tensor's factor (1,)."""
        return {
            "weight_packed": ((out_features, in_features // 2), torch.uint8),
            "weight_scale": ((out_features, in_features // FP4_GROUP), FP8),
            "weight_global_scale": ((1,), torch.float32),
        }

    def encode(self, weight: Tensor, siblings: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return codes; the factor for the tensor is shared with the siblings, since engines join their codes."""
        weight = weight.float()
        # by value, so that one sibling's extreme weight decides for all
        largest = max(float(one.abs().amax()) for one in (weight, *siblings))
        factor = torch.tensor([FP8_MAX * FP4_VALUES[-1] / max(largest, torch.finfo(torch.float32).tiny)])
        factor = factor.clamp(max=torch.finfo(torch.float32).max).to(weight.device)
        groups = weight.view(weight.shape[0], -1, FP4_GROUP)
        scales = (groups.abs().amax(2) / FP4_VALUES[-1] * factor).clamp(max=FP8_MAX).to(FP8)
        # a group whose scale rounds to zero is all zeros
        steps = scales.float() / factor
        scaled = torch.where(steps[..., None] > 0, groups / steps[..., None], 0).flatten(1)
        codes = torch.bucketize(scaled.abs(), _boundaries().to(weight.device))
        codes = codes.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
        return {
            "weight_packed": codes[:, 0::2] | (codes[:, 1::2] << 4),
            "weight_scale": scales,
            "weight_global_scale": factor,
        }

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return value of the code × scale of its group ÷ factor of the tensor."""
        packed = tensors["weight_packed"]
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        values = torch.tensor((*FP4_VALUES, *(-v for v in FP4_VALUES)), device=packed.device)[codes]
        steps = tensors["weight_scale"].view(FP8).float() / tensors["weight_global_scale"].float()
        return (values.view(*steps.shape, FP4_GROUP) * steps[..., None]).flatten(1)

    def problem(self, in_features: int) -> str:
        """Return why the inputs can't be divided into groups of a scale."""
        return f"{in_features} inputs are no multiple of {FP4_GROUP}" if in_features % FP4_GROUP else ""


FORMATS: dict[str, Codes] = {"fp8": Fp8Codes(), "nvfp4": Nvfp4Codes()}
"""Formats that `actors quantize` writes."""
