"""Copies of weights in host memory, from which a version is published while training continues.

A copy that changes device and precision at once is converted on the CPU, one tensor after the other. So a tensor on a
GPU is cast there, and copied into pinned memory while the next one is cast; the host waits once, for all of them.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def host_copies(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies on the CPU by name, contiguous, floating-point ones in `dtype`; later steps do not change them.

    Args:
        tensors: names and tensors, each used before the next one is asked for.
        dtype: precision of the copies.
    """
    copies, devices = dict[str, Tensor](), set[torch.device]()
    for name, tensor in tensors:
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.device.type == "cpu":
            copies[name] = tensor.to(kept, copy=True).contiguous()
        else:
            devices.add(tensor.device)
            # the cast tensor may go at once: its memory is used again only behind the copy, on the same stream
            copies[name] = _pinned(tensor.shape, kept).copy_(tensor.to(kept), non_blocking=True)
    for device in devices:
        _wait_for(device)
    return copies


def cast(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors by name where they are, floating-point ones in `dtype`. Those of that precision are no copies."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors}


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _wait_for(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()
