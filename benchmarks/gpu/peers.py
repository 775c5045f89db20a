"""Other processes of the phase `weights`: `python -m benchmarks.gpu.peers ROLE DEVICE BYTES …`, answers as JSON.

A handle of shared memory is a tuple of numbers and bytes from torch, passed on as JSON: nothing is pickled.
"""

import base64
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainer_cases import answer
from bus import torch_groups
from bus.weights.process_groups import ProcessGroup, Wait

distributed: Any = torch.distributed
HOST, SECONDS = "127.0.0.1", 30.0
PERIOD = 251
"""Bytes after which a pattern repeats; a prime, so that blocks that change places are seen."""


def handle_of(tensor: Tensor) -> list[Any]:
    """Return the handle of a tensor's memory for another process of this machine, as JSON values."""
    storage: Any = tensor.untyped_storage()
    parts = storage._share_cuda_() if tensor.is_cuda else storage._share_filename_cpu_()
    return [{"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part for part in parts]


def opened(handle: list[Any], device: torch.device) -> Tensor:
    """Return the bytes behind a handle of another process."""
    parts = [base64.b64decode(part["base64"]) if isinstance(part, dict) else part for part in handle]
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(*parts) if device.type == "cuda" else kind._new_shared_filename_cpu(*parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def checksum(tensor: Tensor) -> int:
    """Return a sum, modulo 2**64, that depends on each byte and its place; the size is a multiple of 8 bytes."""
    words = tensor.view(torch.int64)
    return int((words * (2 * torch.arange(words.numel(), device=tensor.device) + 1)).sum())


def pattern(num_bytes: int, device: torch.device) -> Tensor:
    """Return bytes that repeat in no block of a usual size."""
    period = torch.arange(PERIOD, dtype=torch.uint8, device=device)
    return period.repeat(num_bytes // PERIOD + 1)[:num_bytes].clone()


def produce(device: torch.device, num_bytes: int) -> None:
    """Make memory at the first request, and change all of it at each later one."""
    if device.type == "cuda":
        torch.cuda.init()
    memory = pattern(num_bytes, device)
    for number, _ in enumerate(sys.stdin):
        try:
            if number:
                memory += 1
                _synchronize(device)
            answer(handle=handle_of(memory) if number == 0 else None, checksum=checksum(memory))
        except RuntimeError as error:
            answer(error=str(error)[:1_000])


def consume(device: torch.device, num_bytes: int) -> None:
    """Open the memory of a handle, or copy from the memory opened before; answer with the checksum of a copy."""
    own = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    theirs = own
    for line in sys.stdin:
        try:
            started = time.perf_counter()
            handle = json.loads(line)["handle"]
            if handle is not None:
                theirs = opened(handle, device)
            open_ms = 1e3 * (time.perf_counter() - started)
            own.copy_(theirs)
            _synchronize(device)
            started = time.perf_counter()
            for _ in range(5):
                own.copy_(theirs)
            _synchronize(device)
            rate = 5 * num_bytes / (time.perf_counter() - started) / 1e9
            answer(checksum=checksum(own), open_ms=open_ms, gigabytes_per_second=rate)
        except RuntimeError as error:
            answer(error=str(error)[:1_000])


def group(device: torch.device, num_bytes: int, backend: str, rank: int, size: int, port: int) -> None:
    """Broadcast from rank 0 in a group, give the group up, and broadcast in a new one."""
    store = distributed.TCPStore(
        HOST, port, is_master=rank == 0, timeout=timedelta(seconds=SECONDS), wait_for_workers=False
    )
    values = pattern(num_bytes, device)
    expected, rates = checksum(values), []
    try:
        for turn in range(2):
            own = values.clone() if rank == 0 else torch.zeros_like(values)
            join = {"gloo": _gloo, "nccl": _nccl}[backend]
            broadcast, leave = join(distributed.PrefixStore(str(turn), store), rank, size, device)
            broadcast(own)
            _synchronize(device)
            started = time.perf_counter()
            broadcast(own)
            _synchronize(device)
            rates.append(num_bytes / (time.perf_counter() - started) / 1e9)
            assert checksum(own) == expected
            leave()
        # rank 0 serves the store, and must not leave first
        store.set(f"done/{rank}", "1")
        store.wait([f"done/{other}" for other in range(size)])
        time.sleep(0.2 if rank == 0 else 0)
        answer(gigabytes_per_second=rates)
    except Exception as error:  # noqa: BLE001 - the words of a refusal are the result
        answer(error=f"{type(error).__name__}: {error}"[:1_500])


Group = tuple[Callable[[Tensor], object], Callable[[], object]]
"""Functions of a group: broadcast of a tensor from rank 0, and the end."""


def _gloo(store: Any, rank: int, size: int, device: torch.device) -> Group:
    """Return the group with which versions of the weights are sent between CPUs."""
    wait = Wait(lambda: None, SECONDS)
    made = ProcessGroup("group", lambda: store, rank, size, HOST, wait, device)
    return lambda tensor: made.broadcast(tensor, wait).wait(), made.leave


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Group:
    """Return a group of NCCL, made as that of the weights, which has no group for one process."""
    made = torch_groups.nccl(store, rank, size, device, timedelta(seconds=SECONDS))
    return lambda tensor: made.broadcast(tensor, 0).wait(), made.abort


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    role, place, number, *rest = sys.argv[1:]
    where, count = torch.device(place), int(number)
    if role == "group":
        group(where, count, rest[0], *map(int, rest[1:]))
    else:
        {"producer": produce, "consumer": consume}[role](where, count)
    sys.stdout.flush()
    os._exit(0)
