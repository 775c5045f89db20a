"""Ranks of one gang for a learner: sums and exchanges over all ranks, with the same bits on each.

Sums gather every rank's part and add the parts in the order of ranks, so the result does not depend on timing, and a
single process can repeat the computation (`actors replay`). Nothing is pickled. A collective waits as long as the gang
lives: during a collective `check` is called, which raises when the packer has told the gang to exit.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bus import threads

POLL_SECONDS = 0.0005
"""Seconds between two checks of a collective under way."""
BUCKET_ELEMENTS = 16 << 20
"""Elements gathered at once in a sum: 64 MiB of float32 from each rank."""
UNBOUNDED = timedelta(days=1)
"""Timeout of gloo itself. The packer decides through leases how long a collective may take."""


class RanksBrokenError(Exception):
    """Error when another rank can't be reached; the packer will tell the gang to exit."""


class Ranks(Protocol):
    """Interface of this rank to all ranks."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by the sum over all ranks.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        ...

    def exchange(self, value: bytes) -> list[bytes]:
        """Return the values given by all ranks, in the order of ranks.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        ...


class SingleRank:
    """Gang of a single rank."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: the sum is the tensor."""

    def exchange(self, value: bytes) -> list[bytes]:
        """Return the only value."""
        return [value]


SINGLE_RANK = SingleRank()
_abandoned: list[Any] = []
"""Process groups with a collective under way. Destroying such a group would wait for the collective, in any thread
where garbage is collected."""


class GlooRanks:
    """Ranks in separate processes, which meet through a file visible to all.

    Args:
        rank: rank of this process.
        size: number of ranks.
        meeting_point: path of a file for this incarnation, in a directory shared by all ranks.
        host: address of this machine, reachable for the other ranks.
        check: called while waiting; raises when the gang shall not wait any more.
        timeout: seconds for all ranks to meet.

    Raises:
        RanksBrokenError: the ranks did not meet in time.
    """

    def __init__(
        self, rank: int, size: int, meeting_point: Path, host: str, check: Callable[[], object], timeout: float
    ) -> None:
        self.rank, self.size, self._check = rank, size, check
        self._meeting_point, self._host = meeting_point, host
        meeting_point.parent.mkdir(parents=True, exist_ok=True)
        store: Any = torch.distributed  # made in the thread, too: the shared folder may hang
        self._group: Any = _waiting(
            lambda: _gloo(store.FileStore(str(meeting_point), size), rank, size, host), check, timeout
        )

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the sum over all ranks, in buckets to bound the memory.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in bucket])
            # no all-reduce: gloo adds each chunk in another order of ranks, which one process could not repeat
            parts = self._gather(flat)
            # always in the order of ranks: float sums depend on the order
            total = parts[0]
            for part in parts[1:]:
                total += part
            for tensor, values in zip(bucket, torch.split(total, [t.numel() for t in bucket]), strict=True):
                tensor.detach().copy_(values.view_as(tensor))

    def exchange(self, value: bytes) -> list[bytes]:
        """Return the values of all ranks, in the order of ranks.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        # collectives need equal sizes: first the lengths, then all values padded to the longest
        lengths = [int(n) for n in self._gather(torch.tensor([len(value)]))]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)  # all values may be empty
        # frombuffer refuses an empty one
        padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else 0
        parts = self._gather(padded)
        return [bytes(part[:length].numpy()) for part, length in zip(parts, lengths, strict=True)]

    def mesh(self, device: torch.device) -> Any:
        """Return the ranks as torch's DeviceMesh, with separate collectives: gloo on CPUs, NCCL on GPUs.

        Call it once per process, as torch allows only one; a process takes part in a single incarnation of the gang.
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
                self._check()  # raises to leave: gloo's own wait can't be ended from outside
                time.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise RanksBrokenError(f"rank {self.rank} of {self.size} lost another rank: {error}") from error
        except BaseException:
            _abandoned.append(self._group)  # keeps the group alive until the process exits
            raise
        return parts


def _gloo(store: Any, rank: int, size: int, host: str) -> Any:
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    # the configured address: by default gloo takes the address of the machine's name
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = UNBOUNDED
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _gloo_on(host: str) -> str:
    """Return the name of a gloo backend bound to this address.

    Torch's own listens where the machine's name resolves to.
    """
    name, backend = "gloo_on_host", torch.distributed.Backend
    if name not in backend.backend_list:
        backend.register_backend(name, lambda store, rank, size, _: _gloo(store, rank, size, host), devices=["cpu"])
    return name


def _waiting(make: Callable[[], Any], check: Callable[[], object], timeout: float) -> Any:
    """Return the result of `make`, called in a thread, so that `check` can raise while other ranks are awaited."""
    made: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            threads.mark("trainer.meeting")
            made.append(make())
        except Exception as error:  # noqa: BLE001 - from torch, or from the file where ranks meet
            failed.append(error)

    thread = threads.start_helper("meeting", run)
    deadline = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:
        check()
        thread.join(0.05)
    if not made:
        reason = failed[0] if failed else f"not all were there within trainer.gang_timeout {timeout:g} s"
        raise RanksBrokenError(f"the ranks of the gang did not meet: {reason}")
    return made[0]


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return groups of neighbouring tensors of equal dtype, up to BUCKET_ELEMENTS together.

    A larger tensor is alone.
    """
    buckets: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        if not buckets or filled + tensor.numel() > BUCKET_ELEMENTS or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.numel()
    return buckets
