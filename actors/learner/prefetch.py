"""Prefetching of micro-batches on a GPU: the next one is made while one is computed.

A thread makes a micro-batch in host memory and joins its tensors in one block. The trainer's thread copies the block to
the GPU in one transfer, through pinned memory, for which it does not wait.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from actors.learner.micro_batches import MicroBatch
from actors.models.attention import PackedRow
from bus import threads

Holder = TypeVar("Holder", MicroBatch, PackedRow)
HOST = torch.device("cpu")
ALIGNMENT = 64
"""Bytes to whose multiples the starts of tensors in a block are rounded up."""


@dataclasses.dataclass(frozen=True)
class HostBlock:
    """A micro-batch in host memory whose tensors are parts of one block of bytes."""

    micro: MicroBatch
    bytes_N: Tensor
    """(N,) bytes of all tensors."""
    starts: dict[int, int]
    """First byte of each tensor, by the `id` of the tensor."""

    def on(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on a device, by one copy."""
        # pinned here, not in the thread that made the block: there the current GPU may be another rank's
        bytes_N = self.bytes_N.pin_memory() if device.type == "cuda" else self.bytes_N
        moved_N = bytes_N.to(device, non_blocking=True)

        def part(tensor: Tensor) -> Tensor:
            start = self.starts[id(tensor)]
            return moved_N[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        # the new row has no plans yet: those of a kernel are made on the device of its tensors
        row = dataclasses.replace(_with(self.micro.row, part), _plans={})
        return dataclasses.replace(_with(self.micro, part), row=row)


def host_block(micro: MicroBatch) -> HostBlock:
    """Copy the tensors of a micro-batch without images, in host memory, into one block."""
    assert micro.row.images is None, "features of images are on the device already"
    tensors = [*_tensors(micro.row).values(), *_tensors(micro).values()]
    starts, end = {}, 0
    for tensor in tensors:
        starts[id(tensor)] = end
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    bytes_N = torch.empty(end, dtype=torch.uint8)
    for tensor in tensors:
        start = starts[id(tensor)]
        bytes_N[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    return HostBlock(micro, bytes_N, starts)


def prefetched(
    numbers: Sequence[int], make: Callable[[int, torch.device], MicroBatch], device: torch.device
) -> Iterator[MicroBatch]:
    """Yield micro-batches on a device in the given order, each made while the one before is computed.

    Args:
        numbers: numbers of the micro-batches.
        make: returns a micro-batch without images, by its number, on a device. Called in a thread; an error in it is
            raised here, when its micro-batch is due.
        device: device of the tensors.
    """
    with threads.Workers(1, "micro-batches") as thread:

        def begin(number: int) -> "Future[HostBlock]":
            return thread.submit(lambda: host_block(make(number, HOST)))

        made: list[Future[HostBlock]] = []
        for number in numbers:
            made.append(begin(number))
            if len(made) == 2:
                yield made.pop(0).result().on(device)
        for last in made:
            yield last.result().on(device)


def _tensors(holder: MicroBatch | PackedRow) -> dict[str, Tensor]:
    found = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _with(holder: Holder, part: Callable[[Tensor], Tensor]) -> Holder:
    tensors: dict[str, Any] = {name: part(tensor) for name, tensor in _tensors(holder).items()}
    return dataclasses.replace(holder, **tensors)
