"""Weights cut into buckets: flat byte tensors of bounded size, and a header that says what lies where.

    header = JSON {content, files, buckets: [{num_bytes, digest, tensors: [[name, dtype, shape], ...]}, ...]}

Two things are told of a bucket's bytes. Its digest, BLAKE3, says what they are: the header has it, a manifest has the
header's, so the same weights have the same digest in any run. Its code, GMAC (NIST SP 800-38D) under a key of this
version alone, says that they are the trainer's: whoever got the key over the control plane checks by it what comes over
a wire, at a fifth of the cost of a digest (21 GB/s a thread here, beside 4.2).
"""

import hmac
import json
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher, algorithms, modes
from numpy.typing import NDArray

from bus.weights import Weights

if TYPE_CHECKING:
    import torch

FILLERS = 2
"""Threads that copy and digest buckets: one alone is slower than a good wire."""
KEY_BYTES, CODE_BYTES = 32, 16
MAC_BYTES = 1 << 28
"""Of one call: OpenSSL counts in 32 bits, and an embedding may be larger."""

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
    bytes_of: "Sequence[torch.Tensor]"
    """uint8, one per bucket, on the CPU."""
    key: bytes
    codes: Sequence[bytes]
    """One per bucket."""


def pack(weights: Weights, bucket_bytes: int, spare: "Sequence[torch.Tensor]" = ()) -> Parcel:
    """Cut and copy, tensor by tensor in the given order; a tensor larger than a bucket is a bucket of its own.

    Args:
        weights: of a version.
        bucket_bytes: of a bucket, at most.
        spare: buckets of a version that nobody reads any more, whose memory may be taken.
    """
    filled = list(_cut(weights, bucket_bytes))
    flats = staged([sum(tensor.nbytes for _, tensor in tensors) for tensors in filled], spare)
    key = secrets.token_bytes(KEY_BYTES)
    with ThreadPoolExecutor(FILLERS) as fillers:
        marks = list(fillers.map(partial(_fill, key), count(), flats, filled))
    buckets = tuple(
        Bucket(flat.numel(), digest, tuple(_place(name, tensor) for name, tensor in tensors))
        for flat, (digest, _), tensors in zip(flats, marks, filled, strict=True)
    )
    return Parcel(Header(weights.content, dict(weights.files), buckets), flats, key, [code for _, code in marks])


def staged(sizes: Sequence[int], spare: "Sequence[torch.Tensor]") -> "Sequence[torch.Tensor]":
    """Memory for buckets, uint8: the spare one where it has these sizes, as it has throughout a run.

    Memory that is touched for the first time costs more than what fills it: 1.6 us for each 4 KiB here.
    """
    import torch

    if list(sizes) == [flat.numel() for flat in spare]:
        return spare
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def verify(key: bytes, number: int, flat: "torch.Tensor", code: bytes) -> None:
    """Check bytes that came over an unauthenticated wire, beside the code of bucket `number`.

    Raises:
        ValueError: they are not what the trainer published.
    """
    mac = _mac(key, number)
    _feed(mac, flat.numpy())
    if not hmac.compare_digest(_code(mac), code):
        raise ValueError(f"bucket {number} arrived with other bytes than the trainer published")


def codes_from(text: bytes, num_buckets: int) -> list[bytes]:
    """Read the codes of all buckets, hex, one behind the other: forged ones fit no bytes, so they need no check.

    Raises:
        ValueError: they are not as many.
    """
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * CODE_BYTES * num_buckets), text):
        raise ValueError(f"the codes of the weights are not those of {num_buckets} buckets")
    codes = bytes.fromhex(text.decode())
    return [codes[i : i + CODE_BYTES] for i in range(0, len(codes), CODE_BYTES)]


def unpack(bucket: Bucket, flat: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """The tensors of a bucket, as views of its bytes."""
    import torch

    kinds = [getattr(torch, dtype) for _, dtype, _ in bucket.tensors]
    sizes = [kind.itemsize * math.prod(shape) for kind, (_, _, shape) in zip(kinds, bucket.tensors, strict=True)]
    tensors = {}
    for (name, _, shape), kind, part in zip(bucket.tensors, kinds, torch.split(flat, sizes), strict=True):
        aligned = part.clone() if part.storage_offset() % kind.itemsize else part  # a view needs its own alignment
        tensors[name] = aligned.view(kind).view(shape)
    return tensors


def _cut(weights: Weights, bucket_bytes: int) -> "Iterator[Sequence[tuple[str, torch.Tensor]]]":
    cut: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights.tensors.items():
        if cut and size + tensor.nbytes > bucket_bytes:
            yield cut
            cut, size = [], 0
        cut.append((name, tensor))
        size += tensor.nbytes
    if cut:
        yield cut


def _fill(
    key: bytes, number: int, flat: "torch.Tensor", tensors: "Iterable[tuple[str, torch.Tensor]]"
) -> tuple[str, bytes]:
    """Copy tensors into bucket `number`; returns its digest and its code, taken while the bytes lie in a near cache.

    Copied by numpy: torch would do it by threads of its own, which then wait beside ours, busily.
    """
    digest, mac = blake3(), _mac(key, number)
    start = 0
    for _, tensor in tensors:
        part = flat.numpy()[start : start + tensor.nbytes]
        part[:] = tensor.detach().cpu().contiguous().reshape(-1).view(flat.dtype).numpy()
        digest.update(part.data)
        _feed(mac, part)
        start += tensor.nbytes
    return digest.hexdigest(), _code(mac)


def _mac(key: bytes, number: int) -> AEADEncryptionContext:
    """GMAC of bucket `number`; no other bytes may ever have the same key and number."""
    return Cipher(algorithms.AES(key), modes.GCM(number.to_bytes(12, "big"))).encryptor()


def _feed(mac: AEADEncryptionContext, data: NDArray[np.uint8]) -> None:
    for start in range(0, data.size, MAC_BYTES):
        mac.authenticate_additional_data(data[start : start + MAC_BYTES].data)


def _code(mac: AEADEncryptionContext) -> bytes:
    mac.finalize()
    return mac.tag


def _place(name: str, tensor: "torch.Tensor") -> TensorPlace:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
