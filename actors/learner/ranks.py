"""Ranks of one gang for a learner: sums and exchanges over all ranks, with the same bits on each.

Sums gather every rank's part and add the parts in the order of ranks, so the result does not depend on timing, and a
single process can repeat the computation (`actors replay`). Nothing is pickled. A collective waits as long as the gang
lives: during a collective `check` is called, which raises when the packer has told the gang to exit.

    exchange   gloo
    sum        gloo through the CPUs, or NCCL between GPUs (`sum_on`), with the same additions
    row group  gloo or NCCL, between the ranks that compute rows together
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from actors.learner import process_groups
from actors.learner.devices import gpu_name
from actors.learner.row_group import RowGroup
from bus import threads, torch_groups

log = structlog.get_logger("learner")

POLL_SECONDS = 0.0005
"""Seconds between two checks of a collective under way."""
BUCKET_ELEMENTS = 16 << 20
"""Elements gathered at once in a sum: 64 MiB of float32 from each rank."""


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

    def sum_on(self, device: torch.device, name: str) -> None:
        """Sum tensors on a device there from now on, if all ranks can. All ranks must call.

        Args:
            device: device of this rank's tensors.
            name: name of the device, unlike that of any other device; empty if sums there are impossible.

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

    def sum_on(self, device: torch.device, name: str) -> None:
        """Do nothing: there is nothing to add."""


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
        self.rank, self.size, self._check, self._timeout = rank, size, check, timeout
        self._meeting_point, self._host = meeting_point, host
        meeting_point.parent.mkdir(parents=True, exist_ok=True)
        self._group: Any = _waiting(lambda: process_groups.gloo(self._store(""), rank, size, host), check, timeout)
        self._summing: Any = self._group
        """Group of sums of tensors on `_summing_device`."""
        self._summing_device = torch.device("cpu")
        self._watched: list[Any] = []
        """Groups between GPUs whose collectives nothing but an abort can end."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the sum over all ranks, in buckets to bound the memory.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1).to(self._summing_device) for tensor in bucket])
            # no all-reduce: gloo and NCCL add each chunk in another order of ranks, which one process could not repeat
            parts = self._gather(flat, self._summing)
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
        lengths = [int(n) for n in self._gather(torch.tensor([len(value)]), self._group)]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)  # all values may be empty
        # frombuffer refuses an empty one
        padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else 0
        parts = self._gather(padded, self._group)
        return [bytes(part[:length].numpy()) for part, length in zip(parts, lengths, strict=True)]

    def sum_on(self, device: torch.device, name: str, backend: str = "nccl") -> None:
        """Sum tensors on a device there from now on, if all ranks can; otherwise go on through the CPUs.

        Ranks that share a GPU can't: NCCL refuses a second rank on it.

        Args:
            device: device of this rank's tensors.
            name: name of the device, unlike that of any other device; empty if sums there are impossible.
            backend: `nccl`; in tests also `gloo`, which takes tensors on a CPU.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        make = partial(self._group_on, device, backend)
        group = self._made_by_all(name, make, "gradients are summed through the CPUs")
        if group is not None:
            self._summing, self._summing_device = group, device

    def mesh(self, device: torch.device) -> Any:
        """Return the ranks as torch's DeviceMesh, with separate collectives: gloo on CPUs, NCCL on GPUs.

        Call it once per process, as torch allows only one; a process takes part in a single incarnation of the gang.
        """
        distributed: Any = torch.distributed
        store = self._store(".mesh")
        backend = "nccl"
        if device.type != "cuda":
            # a gloo backend bound to this address: torch's own listens where the machine's name resolves to
            backend, host = "gloo_on_host", self._host  # the registry is for ever, and must not keep this object alive
            if backend not in distributed.Backend.backend_list:
                distributed.Backend.register_backend(
                    backend, lambda store, rank, size, _: process_groups.gloo(store, rank, size, host), devices=["cpu"]
                )
        torch_groups.restrain_watchdog()
        distributed.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=process_groups.UNBOUNDED
        )
        if backend == "nccl":
            self._watched.append(distributed.group.WORLD)
        return distributed.device_mesh.init_device_mesh(device.type, (self.size,))

    def grid(self, device: torch.device, columns: int, names: tuple[str, str]) -> Any:
        """Return the ranks as a DeviceMesh of two dimensions, with collectives along each. Call `mesh` before.

        Args:
            device: device of this rank's tensors.
            columns: number of neighbouring ranks along the second dimension, a divisor of the number of ranks.
            names: names of the dimensions.
        """
        distributed: Any = torch.distributed
        shape = (self.size // columns, columns)
        grid = distributed.device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=names)
        if device.type == "cuda":
            self._watched += [grid.get_group(name) for name in names]
        return grid

    def row_group(self, device: torch.device, size: int) -> RowGroup:
        """Return the ranks that compute rows together with this one: `size` neighbours. All ranks must call.

        Their tensors travel between GPUs if all ranks of the gang have a GPU of their own, otherwise through the CPUs.

        Args:
            device: device of this rank's tensors.
            size: number of ranks for each row, a divisor of the number of ranks.

        Raises:
            RanksBrokenError: another rank is gone, or did not come in time.
        """
        number, place = divmod(self.rank, size)

        def make() -> Any:
            return process_groups.nccl(self._store(f".rows_{number}", size), place, size, device)

        group = self._made_by_all(gpu_name(device), make, "rows are exchanged through the CPUs")
        if group is not None:
            self._watched.append(group)
            return RowGroup(group, place, size, device)
        store = self._store(f".rows_{number}.cpu", size)
        group = _waiting(lambda: process_groups.gloo(store, place, size, self._host), self._check, self._timeout)
        return RowGroup(group, place, size, torch.device("cpu"))

    def _made_by_all(self, name: str, make: Callable[[], Any], otherwise: str) -> Any:
        """Return a group between devices; None on all ranks if one of them has no device of its own, or can't join.

        Args:
            name: name of this rank's device, as for `sum_on`.
            make: makes this rank's group; called in a thread.
            otherwise: what the ranks do instead if a device can't join, for the log.
        """
        names = self.exchange(name.encode())
        if not all(names) or len(set(names)) < self.size:
            return None
        group, reason = None, "another rank could not join"
        try:
            group = _waiting(make, self._check, self._timeout)
        except RanksBrokenError as error:
            reason = str(error)
        # decided together: a rank that does it elsewhere than the others would wait for ever
        if all(self.exchange(b"made" if group is not None else b"")):
            return group
        _abandoned.append(group)  # to destroy a group would wait for ranks that are not in it
        log.warning(otherwise, device=name, why=reason)
        return None

    def abort(self) -> None:
        """End collectives between GPUs in which this rank waits, for a process that is about to exit. Thread-safe."""
        for group in self._watched:
            process_groups.abort(group)

    def _store(self, suffix: str, size: int | None = None) -> Any:
        # a file for each group: keys of one would confuse the other
        distributed: Any = torch.distributed
        return distributed.FileStore(f"{self._meeting_point}{suffix}", size or self.size)

    def _group_on(self, device: torch.device, backend: str) -> Any:
        store = self._store(".sums")
        if backend == "gloo":
            return process_groups.gloo(store, self.rank, self.size, self._host)
        return process_groups.nccl(store, self.rank, self.size, device)

    def _gather(self, tensor: Tensor, group: Any) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            work = group.allgather([parts], [tensor])
            while not work.is_completed():
                self._check()  # raises to leave: the group's own wait can't be ended from outside
                time.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise RanksBrokenError(f"rank {self.rank} of {self.size} lost another rank: {error}") from error
        except BaseException:
            _abandoned.append(group)  # keeps the group alive until the process exits
            if group is not self._group:
                process_groups.abort(group)  # a kernel of NCCL would hold the GPU's memory, which the next gang needs
            raise
        return parts


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
