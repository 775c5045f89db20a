"""Group of the ranks that compute rows together (`actors.models.attention.row_ranks`), for one of these ranks."""

from typing import Any

import torch
from torch import Tensor


class RowGroup:
    """Ranks that compute rows together, in a process group of torch: gloo through CPUs, NCCL between GPUs.

    Args:
        group: group of these ranks alone.
        place: rank of this process in the group.
        size: number of ranks in the group.
        device: device of the tensors that the group takes.
        has_own_heads: True for a model whose weights are cut among the ranks (`tensor_parallel`).
    """

    def __init__(self, group: Any, place: int, size: int, device: torch.device, has_own_heads: bool = False) -> None:
        self.place, self.size, self.has_own_heads = place, size, has_own_heads
        self._group, self._device = group, device

    def with_own_heads(self) -> "RowGroup":
        """Return the same ranks, for a model whose weights are cut among them."""
        return RowGroup(self._group, self.place, self.size, self._device, has_own_heads=True)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send `parts[i]` to rank i; return what all ranks sent here, in the order of ranks.

        A host that gets no answer waits in gloo, a GPU in NCCL: `CollectiveWatch` watches either.

        Raises:
            RuntimeError: another rank is gone.
        """
        # as bytes: gloo does not take all types of numbers
        sent = parts.to(self._device).flatten().view(torch.uint8)
        arrived = torch.empty_like(sent)
        if sent.numel():
            self._group.alltoall_base(arrived, sent, [], []).wait()
        return arrived.view(parts.dtype).view(parts.shape).to(parts.device)
