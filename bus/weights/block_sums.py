"""Checksums of tensors, computed where the tensor is, equal on every device.

A hash of the bytes themselves would need them in host memory. So the device reduces each block of 128 KiB to a few
numbers, and only those are hashed on the host (BLAKE3), 0.02 % of the bytes.

The number of a block for a point x is the sum of w_i × x^(i + 1) modulo 2^31 − 1, over its 16-bit words w. For two
different blocks and a random x these numbers are equal with a probability of 2^16 / 2^31 at most (a polynomial of
degree 2^16 has no more zeros); with POINTS points, 2^−60. The sums are one matrix product in float64, exact on any
device and in any order: a power is cut into two halves of 16 bits, so no partial sum reaches 2^53.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

PRIME = (1 << 31) - 1
WORDS = 1 << 16
"""16-bit words of a block."""
BLOCK_BYTES = 2 * WORDS
POINTS = 4
CHUNK_BLOCKS = {"cpu": 16, "cuda": 256}
"""Blocks at once, by device: as float64 they stay near a core, or fill a GPU (8 and 128 MiB)."""


def block_sums(flat: "torch.Tensor", key: bytes) -> "torch.Tensor":
    """Return the numbers of each block of a tensor.

    Args:
        flat: bytes on any device, a uint8 tensor [num_bytes]. The last block counts as filled up with zeros, so
            two tensors are told apart by their numbers and their lengths.
        key: 32 bytes, from which the points follow.

    Returns:
        An int64 tensor [num_blocks, POINTS] on the same device.
    """
    import torch

    factors = torch.from_numpy(_factors(key)).to(flat.device)
    whole = flat.numel() // BLOCK_BYTES * BLOCK_BYTES
    chunks = torch.split(flat[:whole], CHUNK_BLOCKS[flat.device.type] * BLOCK_BYTES)
    sums = [_sums(_words(chunk).view(-1, WORDS), factors) for chunk in chunks if chunk.numel()]
    if whole < flat.numel():
        rest = flat[whole:]
        words = _words(torch.cat([rest, rest.new_zeros(rest.numel() % 2)]))
        sums.append(_sums(words.view(1, -1), factors[: len(words)]))
    return torch.cat(sums) if sums else torch.empty(0, POINTS, dtype=torch.int64, device=flat.device)


def digest_of(sums: "torch.Tensor", num_bytes: int, key: bytes) -> bytes:
    """Return 32 bytes that tell the numbers of a tensor's blocks, and its length, from all others.

    Args:
        sums: numbers of the blocks, on the CPU.
        num_bytes: bytes of the tensor.
        key: 32 bytes; without them nobody can find other bytes with the same digest.
    """
    return blake3(num_bytes.to_bytes(8, "little") + sums.numpy().astype("<i8").tobytes(), key=key).digest()


def _words(chunk: "torch.Tensor") -> "torch.Tensor":
    import torch

    # a view with another dtype must start at a multiple of its element size
    aligned = chunk.clone() if chunk.storage_offset() % 2 else chunk
    return aligned.view(torch.int16)


def _sums(words: "torch.Tensor", factors: "torch.Tensor") -> "torch.Tensor":
    import torch

    # |word| ≤ 2^15 and a factor < 2^16, so a sum of 2^16 products is below 2^47
    sums = (words.to(torch.float64) @ factors).to(torch.int64)
    return (sums[:, :POINTS] + ((sums[:, POINTS:] % PRIME) << 16)) % PRIME


@lru_cache(maxsize=4)
def _factors(key: bytes) -> NDArray[np.float64]:
    """Return the lower and the upper 16 bits of the powers of each point: float64 [WORDS, 2 × POINTS]."""
    drawn = np.frombuffer(blake3(b"points", key=key).digest(4 * POINTS), "<u4").astype(np.uint64)
    powers = np.empty((WORDS, POINTS), np.uint64)
    powers[0] = drawn % np.uint64(PRIME - 2) + np.uint64(2)
    known = 1
    while known < WORDS:
        # x^(i + 1) × x^known: both below 2^31
        powers[known : 2 * known] = powers[:known] * powers[known - 1] % np.uint64(PRIME)
        known *= 2
    return np.concatenate([powers & np.uint64(0xFFFF), powers >> np.uint64(16)], axis=1).astype(np.float64)
