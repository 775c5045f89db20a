"""Running sums that have the same bits each time where torch is asked for that."""

import torch
from torch import Tensor


def running_sums(values: Tensor) -> Tensor:
    """Return along the last dimension the sums of all elements so far.

    On a GPU `cumsum` adds in another order each time, and raises under `torch.use_deterministic_algorithms`. There the
    sums are computed on the CPU.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(-1).to(values.device)
    return values.cumsum(-1)
