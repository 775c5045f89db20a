"""The ranks of one gang, as far as a learner needs them: sums and exchanges over all, with the same bits on each.

Sums gather every rank's part and add them in the order of ranks, so the result does not depend on who was first, and a
single process can compute it again (`actors replay`). Nothing is pickled. A collective never waits longer than the gang
lives: while it is under way `check` is called, which raises when the packer has told the gang to exit.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

POLL_SECONDS = 0.0005
BUCKET_ELEMENTS = 16 << 20
"""Of gradients that are gathered at once: 64 MiB of float32 from each rank."""
UNBOUNDED = timedelta(days=1)
"""For gloo itself: how long a collective may take is for the packer to say, through leases."""


class RanksBrokenError(Exception):
    """Another rank can't be reached; the packer will tell the gang to exit."""


class Ranks(Protocol):
    """This rank among all."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over all ranks.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        ...

    def exchange(self, value: bytes) -> list[bytes]:
        """The values that all ranks gave, in their order.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        ...


class Alone:
    """A gang of one."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def exchange(self, value: bytes) -> list[bytes]:
        """Nobody to talk to."""
        return [value]


ALONE = Alone()
_abandoned: list[Any] = []
"""Groups with a collective under way: to destroy one waits for the collective, in whatever thread collects garbage."""


class GlooRanks:
    """Ranks in processes of their own, which find each other through a file that all of them see.

    Args:
        rank, size: of the gang.
        meeting_point: a file of this incarnation; in a directory that all ranks share.
        host: address of this machine that the other ranks reach.
        check: called while waiting; raises when the gang shall not wait any more.
        timeout: seconds in which all ranks must have met.

    Raises:
        RanksBrokenError: they have not.
    """

    def __init__(
        self, rank: int, size: int, meeting_point: Path, host: str, check: Callable[[], object], timeout: float
    ) -> None:
        self.rank, self.size, self._check = rank, size, check
        self._meeting_point, self._host = meeting_point, host
        meeting_point.parent.mkdir(parents=True, exist_ok=True)
        self._group: Any = _waiting(lambda: _meet(rank, size, meeting_point, host), check, timeout)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """In buckets, so that the memory for it is bounded."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in bucket])
            parts = self._gather(flat)
            total = parts[0]
            for part in parts[1:]:
                total += part
            for tensor, values in zip(bucket, torch.split(total, [t.numel() for t in bucket]), strict=True):
                tensor.detach().copy_(values.view_as(tensor))

    def exchange(self, value: bytes) -> list[bytes]:
        """Lengths first, then all values padded to the longest."""
        lengths = [int(n) for n in self._gather(torch.tensor([len(value)]))]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else 0
        parts = self._gather(padded)
        return [bytes(part[:length].numpy()) for part, length in zip(parts, lengths, strict=True)]

    def mesh(self, device: torch.device) -> Any:
        """The ranks as torch's DeviceMesh, with collectives of their own: gloo on CPUs, NCCL on GPUs.

        There is one in a process, as torch has it; an incarnation of the gang is one process on each rank.
        """
        distributed: Any = torch.distributed
        store = distributed.FileStore(f"{self._meeting_point}.mesh", self.size)
        backend = "nccl" if device.type == "cuda" else _gloo_on(self._host)
        distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=UNBOUNDED)
        return distributed.device_mesh.init_device_mesh(device.type, (self.size,))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            work = self._group.allgather([parts], [tensor])
            while not work.is_completed():
                self._check()
                time.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise RanksBrokenError(f"rank {self.rank} of {self.size} lost another one: {error}") from error
        except BaseException:
            _abandoned.append(self._group)
            raise
        return parts


def _meet(rank: int, size: int, meeting_point: Path, host: str) -> Any:
    distributed: Any = torch.distributed
    return _gloo(distributed.FileStore(str(meeting_point), size), rank, size, host)


def _gloo(store: Any, rank: int, size: int, host: str) -> Any:
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = UNBOUNDED
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _gloo_on(host: str) -> str:
    """A name for gloo on this address: torch's own would listen wherever the machine's name leads."""
    name, backend = "gloo_on_host", torch.distributed.Backend
    if name not in backend.backend_list:
        backend.register_backend(name, lambda store, rank, size, _: _gloo(store, rank, size, host), devices=["cpu"])
    return name


def _waiting(make: Callable[[], Any], check: Callable[[], object], timeout: float) -> Any:
    """What `make` returns, from a thread of its own: a rank that waits for the others hears that it shall exit."""
    made: list[Any] = []
    failed: list[RuntimeError] = []

    def run() -> None:
        try:
            made.append(make())
        except RuntimeError as error:  # what torch raises
            failed.append(error)

    thread = threading.Thread(target=run, name="meeting", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:
        check()
        thread.join(0.05)
    if not made:
        reason = failed[0] if failed else f"not all were there within trainer.gang_timeout {timeout:g} s"
        raise RanksBrokenError(f"the ranks of the gang did not meet: {reason}")
    return made[0]


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one type, up to BUCKET_ELEMENTS together; a larger tensor is a bucket of its own."""
    buckets: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        if not buckets or filled + tensor.numel() > BUCKET_ELEMENTS or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.numel()
    return buckets
