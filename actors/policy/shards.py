"""Tensors that are spread over the ranks of a gang (torch's DTensor), beside those that each rank has whole."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Value = TypeVar("Value", Tensor, int, "Tensor | int")


def whole(tensor: Tensor) -> Tensor:
    """All of it. Of a spread tensor each rank must ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Iterable[tuple[str, Tensor]], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Each tensor whole, one after the other; a rank that shall not `keep` them lends its parts and gets none."""
    for name, tensor in tensors:
        found = whole(tensor.detach())
        if keep:
            yield name, found


def placed(value: Value, like: Tensor) -> Value:
    """A state of a parameter where that is: on its device, and spread as it is where the shapes agree."""
    if isinstance(value, int):
        return value
    here = value.to(like.device)
    if not isinstance(like, DTensor) or here.shape != like.shape:
        return here
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)  # each rank has read it all


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Scale all gradients down to a global norm; returns what it was, on each rank."""
    norm = whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)
