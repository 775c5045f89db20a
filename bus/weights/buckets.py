"""Weights cut into buckets: flat byte tensors of bounded size, and a header that says what lies where.

    header = JSON {content, files, buckets: [{num_bytes, digest, tensors: [[name, dtype, shape], ...]}, ...]}

A manifest carries the header's digest over the control plane, the header carries each bucket's. So whoever has the
manifest can check all that comes over any wire, a bucket at a time. Digests are BLAKE3's: as hard to forge as sha256's,
and 2.7 times as fast here (4.8 GB/s a thread).
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3

from bus.weights import Weights

if TYPE_CHECKING:
    import torch

HASHERS = 2
"""Threads that digest buckets, in trainer and engine each: one alone is slower than a good wire."""

TensorPlace = tuple[str, str, tuple[int, ...]]
"""(name, dtype as torch prints it without the package, shape)."""


@dataclass(frozen=True)
class Bucket:
    """What one bucket holds: its tensors lie in it one after the other, without gaps."""

    num_bytes: int
    digest: str
    """BLAKE3 of the bytes, hex."""
    tensors: tuple[TensorPlace, ...]


@dataclass(frozen=True)
class Header:
    """What a version consists of."""

    content: Literal["full", "adapter"]
    files: dict[str, str]
    buckets: tuple[Bucket, ...]

    def encode(self) -> bytes:
        """JSON, the same bytes for the same header."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, digest: str) -> "Header":
        """Read a header that came over an unauthenticated wire.

        Raises:
            ValueError: it is not the one with this digest.
        """
        if blake3(data).hexdigest() != digest:
            raise ValueError("the header of the weights is not the one that the trainer published")
        tree: dict[str, Any] = json.loads(data)
        buckets = tuple(
            Bucket(b["num_bytes"], b["digest"], tuple((n, d, tuple(shape)) for n, d, shape in b["tensors"]))
            for b in tree["buckets"]
        )
        return cls(tree["content"], tree["files"], buckets)

    @property
    def digest(self) -> str:
        """BLAKE3 of the encoded header, hex: that of the whole version."""
        return blake3(self.encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Parcel:
    """A version ready to be sent: its header and the bytes of its buckets. It shares no memory with the weights."""

    header: Header
    bytes_of: "tuple[torch.Tensor, ...]"
    """uint8, one per bucket, on the CPU."""


def pack(weights: Weights, bucket_bytes: int) -> Parcel:
    """Cut and copy, tensor by tensor in the given order; a tensor larger than a bucket is a bucket of its own."""
    import torch

    filled = list(_filled(weights, bucket_bytes))
    flats, digests = [], []
    with ThreadPoolExecutor(HASHERS) as hashers:
        for names in filled:
            flats.append(torch.cat([_as_bytes(weights.tensors[name]) for name in names]))
            digests.append(hashers.submit(digest_of, flats[-1]))
    buckets = tuple(
        Bucket(flat.numel(), digest.result(), tuple(_place(name, weights.tensors[name]) for name in names))
        for names, flat, digest in zip(filled, flats, digests, strict=True)
    )
    return Parcel(Header(weights.content, dict(weights.files), buckets), tuple(flats))


def verify(bucket: Bucket, flat: "torch.Tensor") -> None:
    """Compare bytes that came over an unauthenticated wire with their digest.

    Raises:
        ValueError: they are not what the trainer published.
    """
    if digest_of(flat) != bucket.digest:
        raise ValueError(f"a bucket of {bucket.num_bytes} bytes arrived with another digest than the trainer published")


def unpack(bucket: Bucket, flat: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """The tensors of a bucket, as views of its bytes."""
    import torch

    tensors, start = {}, 0
    for name, dtype, shape in bucket.tensors:
        kind = getattr(torch, dtype)
        size = _num_bytes(kind, shape)
        part = flat[start : start + size]
        if start % kind.itemsize:  # a view needs its own alignment
            part = part.clone()
        tensors[name] = part.view(kind).view(shape)
        start += size
    return tensors


def digest_of(flat: "torch.Tensor") -> str:
    """BLAKE3 of a uint8 tensor on the CPU, hex."""
    return blake3(flat.numpy().data).hexdigest()


def _filled(weights: Weights, bucket_bytes: int) -> Iterator[Sequence[str]]:
    names: list[str] = []
    filled = 0
    for name, tensor in weights.tensors.items():
        size = tensor.numel() * tensor.itemsize
        if names and filled + size > bucket_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def _as_bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _place(name: str, tensor: "torch.Tensor") -> TensorPlace:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _num_bytes(dtype: "torch.dtype", shape: Sequence[int]) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size
