"""Selective recomputation: what a layer keeps for its backward pass, and what is computed again there.

Products of matrices and attention are kept, since they are nearly all of a layer's computation; norms, rotary
embeddings, activation functions, copies and the products of adapters are computed again, since they are most of its
memory ("selective activation recomputation", Korthikanti et al. 2022; prime-rl's `ac.mode: selective`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.baddbmm.default: 1,
    torch.ops.aten._scaled_mm.default: 0,
    torch.ops.aten._grouped_mm.default: 0,
}
"""Operations that multiply matrices, with the argument that is the left factor."""
SHORTEST_SUM = 128
"""Least length of the sums in a kept product. A product of an adapter, over its rank, costs little for its size."""
ATTENTION = ("_attention", "flash_attn", "varlen_attn")
"""Parts of the names of operations that compute attention, those of torch and of the package flash-attn."""


def is_kept(operation: Any, arguments: Sequence[Any]) -> bool:
    """Return whether the result of an operation is kept for the backward pass."""
    if (left := PRODUCTS.get(operation)) is not None:
        return bool(arguments[left].shape[-1] >= SHORTEST_SUM)
    return any(part in str(operation) for part in ATTENTION)


def contexts() -> Any:
    """Return the contexts of a layer's forward pass and of its recomputation, for `torch.utils.checkpoint`."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE


class KeptResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes that selective recomputation keeps, for a forward pass inside its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, torch.UntypedStorage] = {}
        """By address. Held, since another result may get the address of one that is gone."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the kept results."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returns."""
        result = func(*args, **(kwargs or {}))
        if is_kept(func, args):
            storages = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._storages |= {storage._cdata: storage for storage in storages}
        return result
