"""Weights cut into buckets: flat byte tensors of bounded size, and a header with the place of each tensor.

Bytes are marked twice. The digest of a tensor (BLAKE3, in the header) tells its content. The manifest has the digest of
the header without the cuts, so equal weights have equal digests in any run. The code of a bucket (GMAC, NIST SP
800-38D, with a key of this version alone) proves to an engine, with the key from the control plane, that the bytes
are the trainer's. A code costs a fifth of a digest (21 GB/s per thread, against 4.2).

    header = JSON {content, files, buckets: [[[name, dtype, shape, digest], ...], ...]}
"""

import hmac
import json
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher, algorithms, modes
from numpy.typing import NDArray

from bus import threads
from bus.weights import Weights, check_files
from bus.weights.inside.grpo_actors_handles import TensorPlace, tensors_in

if TYPE_CHECKING:
    import torch

FILLERS = 2
"""Threads that copy and digest buckets: a single thread is slower than a fast network."""
KEY_BYTES, CODE_BYTES = 32, 16
MAC_BYTES = 1 << 28
"""Bytes per call to OpenSSL: its lengths have 32 bits, and an embedding may be larger."""


class Place(NamedTuple):
    """A tensor in a bucket. Example: `Place("lm_head.weight", "bfloat16", (151936, 896), "9f3c…")`."""

    name: str
    dtype: str
    """Name of the torch dtype without `torch.`."""
    shape: tuple[int, ...]
    digest: str
    """BLAKE3 of the tensor's bytes, hex."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        import torch

        kind: torch.dtype = getattr(torch, self.dtype)
        return kind.itemsize * math.prod(self.shape)


Bucket = tuple[Place, ...]
"""Tensors of a bucket in order; their bytes follow without gaps."""


@dataclass(frozen=True)
class Header:
    """The contents of a version: small files, and the tensors of each bucket."""

    content: Literal["full", "adapter"]
    files: dict[str, str]
    """Small text files by name (`bus.weights.FILES`)."""
    buckets: tuple[Bucket, ...]

    def encode(self) -> bytes:
        """Return the header as JSON. Equal headers give equal bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, digest: str) -> "Header":
        """Return a header from an unauthenticated wire.

        Args:
            data: JSON of the header.
            digest: digest in the manifest.

        Raises:
            ValueError: the data are no header, or a header with another digest.
        """
        try:
            tree: dict[str, Any] = json.loads(data)
            buckets = tuple(tuple(Place(n, d, tuple(s), h) for n, d, s, h in bucket) for bucket in tree["buckets"])
            check_files(tree["content"], tree["files"])
            header = cls(tree["content"], tree["files"], buckets)
            found = header.digest
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"the header of the weights can't be read: {error}") from error
        if found != digest:
            raise ValueError("the header of the weights is not the one that the trainer published")
        return header

    @property
    def digest(self) -> str:
        """BLAKE3 of the whole version, hex. Independent of the cuts into buckets."""
        uncut = replace(self, buckets=(tuple(chain.from_iterable(self.buckets)),))
        return blake3(uncut.encode()).hexdigest()

    @property
    def sizes(self) -> list[int]:
        """Bytes of each bucket."""
        return [sum(place.num_bytes for place in bucket) for bucket in self.buckets]


@dataclass(frozen=True)
class PackedWeights:
    """A version ready to be sent. Shares no memory with the weights: training may go on."""

    header: Header
    bytes_of: "Sequence[torch.Tensor]"
    """Buckets: a uint8 tensor [num_bytes] each, on the CPU."""
    key: bytes = field(repr=False)
    """Key of the codes: 32 random bytes, for this version alone. Travels in the manifest."""
    codes: Sequence[bytes]
    """GMAC codes of the buckets, 16 bytes each."""

    @property
    def is_on_gpu(self) -> bool:
        """True if the buckets are in the memory of a GPU."""
        return any(flat.is_cuda for flat in self.bytes_of)


def pack(weights: Weights, bucket_bytes: int, spare: "Sequence[torch.Tensor]" = ()) -> PackedWeights:
    """Copy weights into buckets, tensor by tensor in the given order.

    Args:
        weights: weights of a version, on any device.
        bucket_bytes: most bytes of a bucket; a larger tensor fills a bucket alone.
        spare: buckets of an older version, no longer read; their memory is reused if all sizes fit.
    """
    cuts = list(cut(weights, bucket_bytes))
    flats = staged([sum(tensor.nbytes for _, tensor in tensors) for tensors in cuts], spare)
    # new for each version: bucket numbers are the nonces, and codes can be forged once a key has used a nonce twice
    key = secrets.token_bytes(KEY_BYTES)
    with threads.Workers(FILLERS, "filler") as fillers:
        marks = list(fillers.map(partial(_fill, key), count(), flats, cuts))
    header = Header(weights.content, dict(weights.files), tuple(bucket for bucket, _ in marks))
    return PackedWeights(header, flats, key, [code for _, code in marks])


def staged(sizes: Sequence[int], spare: "Sequence[torch.Tensor]") -> "Sequence[torch.Tensor]":
    """Return memory for buckets: uint8 tensors of the given sizes. Spare memory is returned if all sizes fit.

    Sizes stay the same throughout a run. New memory costs more than its filling: 1.6 µs for the first touch of 4 KiB.

    Args:
        sizes: bytes of each bucket.
        spare: tensors no longer used.
    """
    import torch

    if list(sizes) == [flat.numel() for flat in spare]:
        return spare
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def verify(key: bytes, number: int, flat: "torch.Tensor", code: bytes) -> None:
    """Check a bucket from an unauthenticated wire.

    Args:
        key: key of the version, from its manifest.
        number: index of the bucket.
        flat: bytes of the bucket, a uint8 tensor [num_bytes].
        code: code of this bucket.

    Raises:
        ValueError: the bytes differ from the trainer's.
    """
    mac = _mac(key, number)
    _feed(mac, flat.numpy())
    # in constant time: `==` would tell a forger how many bytes are right
    if not hmac.compare_digest(_code(mac), code):
        raise ValueError(f"bucket {number} arrived with other bytes than the trainer published")


def codes_from(text: bytes, num_buckets: int) -> list[bytes]:
    """Return the codes of all buckets, from their hex digits in a row. Forged codes fit no bytes, so none is checked.

    Raises:
        ValueError: the text does not hold `num_buckets` codes.
    """
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * CODE_BYTES * num_buckets), text):
        raise ValueError(f"the codes of the weights are not those of {num_buckets} buckets")
    codes = bytes.fromhex(text.decode())
    return [codes[i : i + CODE_BYTES] for i in range(0, len(codes), CODE_BYTES)]


def unpack(bucket: Bucket, flat: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """Return the tensors of a bucket by name. Each is a view of the bucket's bytes, or a copy if misaligned."""
    return tensors_in(flat, places_of(bucket))


def places_of(bucket: Bucket, start: int = 0) -> list[TensorPlace]:
    """Return the places of a bucket's tensors in a block.

    Args:
        bucket: tensors in order.
        start: first byte of the bucket in the block.
    """
    places = []
    for place in bucket:
        places.append((place.name, place.dtype, list(place.shape), start))
        start += place.num_bytes
    return places


def cut(weights: Weights, bucket_bytes: int) -> "Iterator[Sequence[tuple[str, torch.Tensor]]]":
    """Yield the tensors of each bucket by name: neighbours up to `bucket_bytes`, or one larger tensor."""
    cut: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights.tensors.items():
        # no tensor is divided: a digest is of all bytes of a tensor
        if cut and size + tensor.nbytes > bucket_bytes:
            yield cut
            cut, size = [], 0
        cut.append((name, tensor))
        size += tensor.nbytes
    if cut:
        yield cut


def dtype_name(tensor: "torch.Tensor") -> str:
    """Return the name of a tensor's dtype without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def _fill(
    key: bytes, number: int, flat: "torch.Tensor", tensors: "Iterable[tuple[str, torch.Tensor]]"
) -> tuple[Bucket, bytes]:
    """Copy tensors into bucket `number`, and return the places of the tensors and the bucket's code."""
    threads.mark("trainer.filler")
    places, mac = [], _mac(key, number)
    start = 0
    for name, tensor in tensors:
        part = flat.numpy()[start : start + tensor.nbytes]
        # numpy copies in this thread; torch would use threads of its own, which keep spinning next to the fillers
        part[:] = tensor.detach().cpu().contiguous().reshape(-1).view(flat.dtype).numpy()
        places.append(Place(name, dtype_name(tensor), tuple(tensor.shape), blake3(part.data).hexdigest()))
        # at once, while the bytes are still in a cache near the core
        _feed(mac, part)
        start += tensor.nbytes
    return tuple(places), _code(mac)


def _mac(key: bytes, number: int) -> AEADEncryptionContext:
    """Return a new GMAC for bucket `number`. The same key and number must never be used for two different buckets."""
    # GMAC is GCM without plaintext: the bucket is fed as associated data, its number is the nonce
    return Cipher(algorithms.AES(key), modes.GCM(number.to_bytes(12, "big"))).encryptor()


def _feed(mac: AEADEncryptionContext, data: NDArray[np.uint8]) -> None:
    for start in range(0, data.size, MAC_BYTES):
        mac.authenticate_additional_data(data[start : start + MAC_BYTES].data)


def _code(mac: AEADEncryptionContext) -> bytes:
    mac.finalize()
    return mac.tag
