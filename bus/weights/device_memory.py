"""Versions of the weights on the device where they are trained, in one block that other processes can map.

A process on the same device copies from the trainer's block into its own, mapped by a handle; others receive by
broadcast. Marks are computed on the device (`bus.weights.block_sums`), so no byte passes through the host.

On a CPU the device is the host's memory, and everything else is the same.
"""

import hmac
import json
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3

from bus.weights import Weights
from bus.weights.block_sums import block_sums, digest_of
from bus.weights.buckets import (
    CODE_BYTES,
    KEY_BYTES,
    Header,
    PackedWeights,
    Place,
    cut,
    dtype_name,
    places_of,
)
from bus.weights.inside.grpo_actors_handles import Handle, beside, file_handle, gpu_handle, opened

if TYPE_CHECKING:
    import torch

CONTENT_KEY = blake3(b"grpo-actors: content of a tensor").digest()
"""Key of the digests of tensors: the same in every run, since equal weights have equal digests."""
GROWING, PLAIN = "expandable_segments:True", "expandable_segments:False"
"""Settings of torch's allocator of GPU memory."""
ALIGNMENT = 512
"""Buckets begin at multiples of this number of bytes in their block, as allocators of GPUs do."""


class Block(Sequence["torch.Tensor"]):
    """The buckets of a version: slices of one block of memory.

    Args:
        sizes: bytes of each bucket.
        device: device of the memory.
    """

    def __init__(self, sizes: Sequence[int], device: "torch.device") -> None:
        import torch

        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
        self.starts = starts[:-1]
        """First byte of each bucket."""
        self._file = -1
        if device.type == "cpu":
            self._file = os.memfd_create("grpo-actors-weights")
            os.ftruncate(self._file, max(starts[-1], 1))
            self._flat = torch.frombuffer(mmap.mmap(self._file, max(starts[-1], 1)), dtype=torch.uint8)
            # mappings outlive it, here and in other processes
            weakref.finalize(self, os.close, self._file)
        else:
            with plain_segments():
                try:
                    self._flat = torch.empty(starts[-1], dtype=torch.uint8, device=device)
                except torch.OutOfMemoryError as error:
                    raise OSError(
                        f"{device} has no room for {starts[-1] / 1e9:.1f} GB of weights ({error}); lower weights.keep, "
                        "or set weights.channel: rendezvous"
                    ) from error
        self._handle: Handle = {}
        self._slices = [self._flat[start : start + size] for start, size in zip(self.starts, sizes, strict=True)]

    def __getitem__(self, index: Any) -> Any:
        """Return a bucket."""
        return self._slices[index]

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._slices)

    def handle(self) -> Handle:
        """Return the handle of the block, for other processes; it leads nowhere once the block is freed."""
        if not self._handle:
            on_host = self._file >= 0
            self._handle = file_handle(self._file, self._flat.numel()) if on_host else gpu_handle(self._flat)
        return self._handle

    def overwrite(self, handle: Handle) -> None:
        """Copy from the block of a handle, which has buckets of the same sizes.

        Raises:
            OSError, ValueError: as `opened`, or the block has another size.
        """
        with beside(self._flat.device) if self._flat.is_cuda else nullcontext() as stream:
            theirs = opened(handle)
            if theirs.numel() != self._flat.numel():
                raise ValueError(
                    f"the trainer's block has {theirs.numel()} bytes, and {self._flat.numel()} were announced"
                )
            self._flat.copy_(theirs)
            if stream is not None:
                # before the trainer hears that the block was read
                stream.synchronize()


@contextmanager
def plain_segments() -> Iterator[None]:
    """Keep torch from allocating in segments that grow: another process maps these only with rights of a debugger."""
    import torch

    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")
    if GROWING not in settings:
        yield
        return
    torch.cuda.memory._set_allocator_settings(settings.replace(GROWING, PLAIN))
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(settings)


class DeviceMemory:
    """Memory of channel `device`.

    Args:
        device: returns the device; called when weights are there, so that torch is imported late.
    """

    channel: Literal["device"] = "device"

    def __init__(self, device: Callable[[], "torch.device"]) -> None:
        self._device_of = device
        self._place = ""

    @property
    def device(self) -> "torch.device":
        """Device of the blocks."""
        import torch

        found = self._device_of()
        # with its number: threads of their own would take GPU 0 for `cuda`
        return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found

    @property
    def place(self) -> str:
        """Name of the memory, TYPE:MACHINE/DEVICE: processes with equal names can map each other's blocks."""
        import torch

        if not self._place:
            kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            # another container sees neither our files below /proc nor the memory in which CUDA counts
            spaces = [str(Path("/proc/self/ns", name).readlink()) for name in ("pid", "ipc")]
            device = self.device
            uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host"
            self._place = f"{device.type}:" + "/".join([kernel, *spaces, uuid])
        return self._place

    def pack(self, weights: Weights, bucket_bytes: int, spare: "Sequence[torch.Tensor]" = ()) -> PackedWeights:
        """Copy weights into buckets, as `bus.weights.buckets.pack`, on the device."""
        import torch

        cuts = list(cut(weights, bucket_bytes))
        flats = self.staged([sum(tensor.nbytes for _, tensor in tensors) for tensors in cuts], spare)
        # new for each version, and only in its manifest: whoever can change the bytes does not know the points
        key = secrets.token_bytes(KEY_BYTES)
        named, parts = list[tuple[int, str, torch.Tensor]](), list[torch.Tensor]()
        for number, (flat, tensors) in enumerate(zip(flats, cuts, strict=True)):
            begin = 0
            for name, tensor in tensors:
                part = flat[begin : begin + tensor.nbytes]
                part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
                named.append((number, name, tensor))
                parts.append(part)
                begin += tensor.nbytes
        sums = [block_sums(part, CONTENT_KEY) for part in parts] + [block_sums(flat, key) for flat in flats]
        # one copy to the host for all of them, which also waits for the device
        on_host = torch.split(torch.cat(sums).cpu(), [len(each) for each in sums]) if sums else ()
        buckets: list[list[Place]] = [[] for _ in flats]
        for (number, name, tensor), part, found in zip(named, parts, on_host[: len(parts)], strict=True):
            digest = digest_of(found, part.numel(), CONTENT_KEY).hex()
            buckets[number].append(Place(name, dtype_name(tensor), tuple(tensor.shape), digest))
        codes = [
            _code(found, flat.numel(), number, key)
            for number, (flat, found) in enumerate(zip(flats, on_host[len(parts) :], strict=True))
        ]
        header = Header(weights.content, dict(weights.files), tuple(map(tuple, buckets)))
        return PackedWeights(header, flats, key, codes)

    def staged(self, sizes: Sequence[int], spare: "Sequence[torch.Tensor]") -> "Sequence[torch.Tensor]":
        """Return memory for buckets: one block. A spare block is returned if all sizes fit."""
        if isinstance(spare, Block) and list(sizes) == [flat.numel() for flat in spare]:
            return spare
        return Block(sizes, self.device)

    def verify(self, key: bytes, number: int, flat: "torch.Tensor", code: bytes) -> None:
        """Check a bucket, as `bus.weights.buckets.verify`, on the device."""
        if not hmac.compare_digest(_code(block_sums(flat, key).cpu(), flat.numel(), number, key), code):
            raise ValueError(f"bucket {number} arrived with other bytes than the trainer published")

    def lend(self, flats: "Sequence[torch.Tensor]", key: bytes) -> bytes:
        """Return the handle of a version's block, with a code: the store is not authenticated."""
        assert isinstance(flats, Block)
        handle = json.dumps(flats.handle()).encode()
        return blake3(handle, key=key).hexdigest().encode() + handle

    def borrow(self, lent: bytes, key: bytes, flats: "Sequence[torch.Tensor]") -> None:
        """Fill buckets from the block that another process has lent.

        Raises:
            ValueError: the handle is not the trainer's, or does not fit.
            OSError: the block can't be mapped.
        """
        assert isinstance(flats, Block)
        code, handle = lent[:64], lent[64:]
        if not hmac.compare_digest(blake3(handle, key=key).hexdigest().encode(), code):
            raise ValueError("the handle of the weights is not the trainer's")
        flats.overwrite(json.loads(handle))

    def share(self, header: Header, flats: "Sequence[torch.Tensor]") -> Callable[[], dict[str, Any]]:
        """Return a function for `Weights.share`."""
        assert isinstance(flats, Block)
        starts = zip(header.buckets, flats.starts, strict=True)
        places = [place for bucket, start in starts for place in places_of(bucket, start)]
        return lambda: {"handle": flats.handle(), "tensors": places}


def _code(sums: "torch.Tensor", num_bytes: int, number: int, key: bytes) -> bytes:
    """Return the code of bucket `number`."""
    return digest_of(sums, num_bytes, blake3(number.to_bytes(8, "little"), key=key).digest())[:CODE_BYTES]
