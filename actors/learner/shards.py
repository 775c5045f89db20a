"""Tensors spread over the ranks of a gang (torch's DTensor), and tensors held whole by each rank."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Value = TypeVar("Value", Tensor, int, "Tensor | int")


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. All ranks must call at the same time for a spread tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a tensor that is not spread is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Iterable[tuple[str, Tensor]], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor whole, in order.

    All ranks must iterate; ranks without `keep` only lend parts.
    """
    for name, tensor in tensors:
        # one at a time: a rank without `keep` drops each whole tensor before the next
        found = whole(tensor.detach())
        if keep:
            yield name, found


def spread_as(local: Tensor, like: Tensor, per: int = 1) -> Tensor:
    """Return this rank's part of a tensor as the spread tensor that it is a part of; unchanged if `like` is not spread.

    Args:
        local: part with the axes of `like`.
        like: tensor that is spread in the same way.
        per: numbers along the last axis of `like` for each number of the tensor.
    """
    if not isinstance(like, DTensor):
        return local
    shape = _shape_per(like, per)
    # ranks may have unequal parts, so torch can't find the whole shape from this one
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=_strides(shape)
    )


def placed(value: Value, like: Tensor, per: int = 1) -> Value:
    """Return a state of a parameter on the parameter's device, and spread like the parameter if the shapes agree.

    Args:
        value: whole state.
        like: parameter.
        per: numbers along the parameter's last axis for each number of the state.
    """
    if isinstance(value, int):
        return value
    here = value.to(like.device)
    if not isinstance(like, DTensor) or here.shape != _shape_per(like, per):
        return here
    # no broadcast (src_data_rank): each rank has read the whole state
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)


def _shape_per(like: Tensor, per: int) -> torch.Size:
    return like.shape if per == 1 else torch.Size([*like.shape[:-1], like.shape[-1] // per])


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Overwrite a tensor in place by the whole value; a spread tensor takes this rank's part of it."""
    tensor.copy_(placed(value, tensor) if isinstance(tensor, DTensor) else value)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in groups that torch computes together: those spread over the same mesh of ranks."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None) -> float:
    """Scale all gradients down to a global norm of `limit`, if given; return the norm before, equal on each rank."""
    groups = by_mesh(p for p in parameters if p.grad is not None)
    # over all parameters and ranks before any is scaled; of spread gradients the norm itself is a spread scalar
    norms = [whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    norm = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    if limit is not None:
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, limit, norm)
    return float(norm)
