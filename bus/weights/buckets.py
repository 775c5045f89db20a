"""Weights cut into buckets: flat byte tensors of bounded size, and a header that says what lies where.

    header = JSON {content, files, buckets: [[[name, dtype, shape, digest], ...], ...]}

Bytes are marked twice. A tensor's digest, BLAKE3, says what they are: the header has it, and a manifest has that of the
header without its cuts, so the same weights have the same digest in any run. A bucket's code, GMAC (NIST SP 800-38D)
under a key of this version alone, says that they are the trainer's: whoever got the key over the control plane checks
by it what comes over a wire, at a fifth of the cost of a digest (21 GB/s a thread here, beside 4.2).
"""

import hmac
import json
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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


class Place(NamedTuple):
    """A tensor in a bucket."""

    name: str
    dtype: str
    """As torch prints it, without the package."""
    shape: tuple[int, ...]
    digest: str
    """BLAKE3 of its bytes, hex."""

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        import torch

        kind: torch.dtype = getattr(torch, self.dtype)
        return kind.itemsize * math.prod(self.shape)


Bucket = tuple[Place, ...]
"""Its tensors lie in it one after the other, without gaps."""


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
        try:
            tree: dict[str, Any] = json.loads(data)
            buckets = tuple(tuple(Place(n, d, tuple(s), h) for n, d, s, h in bucket) for bucket in tree["buckets"])
            header = cls(tree["content"], tree["files"], buckets)
            found = header.digest
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"the header of the weights is none: {error}") from error
        if found != digest:
            raise ValueError("the header of the weights is not the one that the trainer published")
        return header

    @property
    def digest(self) -> str:
        """BLAKE3, hex, of the whole version: of what is in all buckets, wherever it was cut."""
        uncut = replace(self, buckets=(tuple(chain.from_iterable(self.buckets)),))
        return blake3(uncut.encode()).hexdigest()

    @property
    def sizes(self) -> list[int]:
        """Bytes of each bucket."""
        return [sum(place.num_bytes for place in bucket) for bucket in self.buckets]


@dataclass(frozen=True)
class Parcel:
    """A version ready to be sent: its header and the bytes of its buckets. It shares no memory with the weights."""

    header: Header
    bytes_of: "Sequence[torch.Tensor]"
    """uint8, one per bucket, on the CPU."""
    key: bytes = field(repr=False)
    codes: Sequence[bytes]
    """One per bucket."""


def pack(weights: Weights, bucket_bytes: int, spare: "Sequence[torch.Tensor]" = ()) -> Parcel:
    """Cut and copy, tensor by tensor in the given order; a tensor larger than a bucket is a bucket of its own.

    Args:
        weights: of a version.
        bucket_bytes: of a bucket, at most.
        spare: buckets of a version that nobody reads any more, whose memory may be taken.
    """
    cuts = list(_cut(weights, bucket_bytes))
    flats = staged([sum(tensor.nbytes for _, tensor in tensors) for tensors in cuts], spare)
    key = secrets.token_bytes(KEY_BYTES)
    with ThreadPoolExecutor(FILLERS) as fillers:
        marks = list(fillers.map(partial(_fill, key), count(), flats, cuts))
    header = Header(weights.content, dict(weights.files), tuple(bucket for bucket, _ in marks))
    return Parcel(header, flats, key, [code for _, code in marks])


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

    tensors = {}
    parts = torch.split(flat, [place.num_bytes for place in bucket])
    for place, part in zip(bucket, parts, strict=True):
        kind = getattr(torch, place.dtype)
        aligned = part.clone() if part.storage_offset() % kind.itemsize else part  # a view needs its own alignment
        tensors[place.name] = aligned.view(kind).view(place.shape)
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
) -> tuple[Bucket, bytes]:
    """Copy tensors into bucket `number`; returns what it holds, and its code.

    Each is marked while its bytes are in a near cache, and copied by numpy: torch would do it by threads of its own,
    which then wait beside ours, busily.
    """
    places, mac = [], _mac(key, number)
    start = 0
    for name, tensor in tensors:
        part = flat.numpy()[start : start + tensor.nbytes]
        part[:] = tensor.detach().cpu().contiguous().reshape(-1).view(flat.dtype).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(Place(name, dtype, tuple(tensor.shape), blake3(part.data).hexdigest()))
        _feed(mac, part)
        start += tensor.nbytes
    return tuple(places), _code(mac)


def _mac(key: bytes, number: int) -> AEADEncryptionContext:
    """GMAC of bucket `number`; no other bytes may ever have the same key and number."""
    return Cipher(algorithms.AES(key), modes.GCM(number.to_bytes(12, "big"))).encryptor()


def _feed(mac: AEADEncryptionContext, data: NDArray[np.uint8]) -> None:
    for start in range(0, data.size, MAC_BYTES):
        mac.authenticate_additional_data(data[start : start + MAC_BYTES].data)


def _code(mac: AEADEncryptionContext) -> bytes:
    mac.finalize()
    return mac.tag
