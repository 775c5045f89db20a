"""Handles: JSON with which another process maps a block of memory, of the host or of the same GPU. No pickle.

A block of host memory is a file without a name (`memfd_create`), open in the process that made it. Other processes of
the same user open it below /proc; it vanishes with the last process that has it mapped, also after kill -9. A block of
GPU memory is mapped by CUDA IPC. Imports nothing of ours, as the code also runs in a server's environment.

    {"file": "/proc/4711/fd/9", "num_bytes": 1200}
    {"gpu": "GPU-5e…", "num_bytes": 1200, "start": 0, "memory": "…", "size": 2097152, "offset": 0, "counter": "…",
     "counter_offset": 0, "event": "…", "waits": true}
"""

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Handle = dict[str, Any]
"""A handle, as in the example above; bytes are in hex."""
TensorPlace = tuple[str, str, list[int], int]
"""Name, dtype (without `torch.`), shape, and first byte of a tensor in a block."""

FILE = re.compile(r"/proc/\d+/fd/\d+")


def file_handle(descriptor: int, num_bytes: int) -> Handle:
    """Return the handle of a block of host memory, a file that this process has open."""
    return {"file": f"/proc/{os.getpid()}/fd/{descriptor}", "num_bytes": num_bytes}


def gpu_handle(flat: Any) -> Handle:
    """Return the handle of a block on a GPU, made once for each block: torch remembers each for the block's life.

    Args:
        flat: the block, a uint8 tensor on a GPU, with everything in it computed.
    """
    import torch

    # its event is waited for in the other process: on a stream of its own it is not behind a step of training
    with beside(flat.device):
        shared = flat.untyped_storage()._share_cuda_()
    _, memory, size, offset, counter, counter_offset, event, waits = shared
    return {
        "gpu": str(torch.cuda.get_device_properties(flat.device).uuid),
        "num_bytes": flat.numel(),
        "start": flat.storage_offset(),
        "memory": memory.hex(),
        "size": size,
        "offset": offset,
        "counter": counter.hex(),
        "counter_offset": counter_offset,
        "event": event.hex(),
        "waits": waits,
    }


def opened(handle: Handle) -> Any:
    """Map the block of a handle and return it, a uint8 tensor [num_bytes]. Writes never reach a block of the host.

    Raises:
        OSError: the process that made the block is gone, or belongs to another user or, with a GPU, container.
        ValueError: the block is shorter than the handle says, the handle is malformed, or this process does not see
            the GPU.
    """
    return _opened_file(handle) if "file" in handle else _opened_on_gpu(handle)


@contextmanager
def beside(device: Any) -> Iterator[Any]:
    """Yield a new stream, for work of this thread that does not wait for the stream of all other work."""
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # torch's own context yields nothing
    with torch.cuda.stream(stream):
        yield stream


def tensors_in(flat: Any, places: Iterable[TensorPlace]) -> dict[str, Any]:
    """Return tensors of a block by name: views, or copies if misaligned."""
    import torch

    tensors = {}
    for name, dtype, shape, start in places:
        kind: torch.dtype = getattr(torch, dtype)
        part = flat[start : start + kind.itemsize * torch.Size(shape).numel()]
        # a view with another dtype must start at a multiple of its element size
        aligned = part.clone() if part.storage_offset() % kind.itemsize else part
        tensors[name] = aligned.view(kind).view(shape)
    return tensors


def _opened_file(handle: Handle) -> Any:
    import torch

    path, num_bytes = handle["file"], handle["num_bytes"]
    # a path from a peer: nothing else is ever opened
    if not FILE.fullmatch(path):
        raise ValueError(f"{path!r} is no block of memory")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size < num_bytes:
            raise ValueError(f"{path} is shorter than the {num_bytes} bytes of its handle")
        # a private mapping: torch wants memory that can be written
        mapped = mmap.mmap(descriptor, max(num_bytes, 1), access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]


def _opened_on_gpu(handle: Handle) -> Any:
    import torch

    # each process counts its GPUs by itself, from those that it sees
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if handle["gpu"] not in seen:
        raise ValueError(f"this process does not see GPU {handle['gpu']}; it sees {', '.join(seen) or 'none'}")
    device = seen.index(handle["gpu"])
    torch.cuda._lazy_init()  # type: ignore[no-untyped-call]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device,
            bytes.fromhex(handle["memory"]),
            handle["size"],
            handle["offset"],
            bytes.fromhex(handle["counter"]),
            handle["counter_offset"],
            bytes.fromhex(handle["event"]),
            handle["waits"],
        )
    except RuntimeError as error:
        raise OSError(f"memory of GPU {handle['gpu']} can't be mapped: {error}") from error
    flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
    return flat[handle["start"] : handle["start"] + handle["num_bytes"]]
