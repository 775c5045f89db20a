"""Keys and values of running sequences in slots, and the attention function over the slots.

A forward is either a prefill (whole sequences packed in one row, no token cached yet) or a decode (one new
token per sequence). Both write the new keys and values to the slots of the sequences. A decode reads slots 0…B−1, so
its batch is a view of the cache. The cache grows by doubling, to the longest sequence and the largest batch so far.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from actors.models.attention.padded import capped_attention, padded_attention
from actors.models.attention.rows import PackedRow

NAME = "grpo_slots"
"""Name of the attention function in transformers' registry."""

SMALLEST = 16
"""Least number of slots, and of positions per slot, in a cache."""


class SlotCache:
    """Keys and values, per layer (slots, heads, length, dim), up to `max_slots` and `max_length`."""

    def __init__(self, max_slots: int, max_length: int) -> None:
        self._limits = max_slots, max_length
        self._size = 0, 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def reserve(self, slots: int, length: int) -> None:
        """Make room for the first `slots` slots with `length` positions each. Contents are kept."""
        wanted = (slots, length)
        if all(have >= want for have, want in zip(self._size, wanted, strict=True)):
            return
        s, n = (
            max(have, min(limit, max(SMALLEST, 1 << (want - 1).bit_length())))  # the next power of two
            for have, want, limit in zip(self._size, wanted, self._limits, strict=True)
        )
        for store in (self.keys, self.values):
            for layer, old in store.items():
                # zeros, not `empty`: a masked position has weight 0, and 0 × NaN of old memory would be NaN
                new = old.new_zeros((s, old.shape[1], n, old.shape[3]))
                new[: old.shape[0], :, : old.shape[2]] = old
                store[layer] = new
        # assigned last: if an allocation fails, the real size is at least the recorded one
        self._size = s, n

    def write(self, layer: int, slots_T: Tensor, positions_T: Tensor, key_T: Tensor, value_T: Tensor) -> None:
        """Store keys and values (T, heads, dim) at (slot, position); the caller has reserved the room."""
        for store, new in ((self.keys, key_T), (self.values, value_T)):
            # the first forward tells the heads and the dtype of a layer
            if layer not in store:
                slots, length = self._size
                store[layer] = new.new_zeros((slots, new.shape[1], length, new.shape[2]))
            store[layer][slots_T, :, positions_T] = new

    def move(self, device: torch.device) -> None:
        """Move all keys and values to a device."""
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                store[layer] = tensor.to(device)

    def repeat(self, slot: int, count: int, length: int) -> None:
        """Copy the first `length` positions of a slot to the next `count` slots."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[slot + 1 : slot + 1 + count, :, :length] = tensor[slot, :, :length]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` positions of `sources` to `targets`. No slot may be in both."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[targets, :, :length] = tensor[sources, :, :length]


@dataclass(frozen=True)
class CachePlan:
    """Plan of one forward: a prefill of `packed_row`, or a decode of slots 0…B−1 if `packed_row` is None."""

    cache: SlotCache
    slots_T: Tensor
    """Slot of each token."""
    positions_T: Tensor
    """Position of each token in its sequence."""
    length: int
    """Positions read by a decode: the longest context, the new token included."""
    packed_row: PackedRow | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def seen(self, sliding_window: int | None) -> Tensor:
        """Return the positions seen by each sequence of a decode, (B, 1, 1, length); cached for all layers."""
        found = self._masks.get(sliding_window)
        if found is None:
            age_BL = self.positions_T[:, None] - torch.arange(self.length, device=self.positions_T.device)[None]
            seen_BL = age_BL >= 0
            if sliding_window is not None:
                seen_BL &= age_BL < sliding_window
            found = self._masks[sliding_window] = seen_BL[:, None, None]
        return found


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache_plan: CachePlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention of new tokens over the sequences' slots; (1, heads, T, dim) → (1, T, heads, dim)."""
    plan, layer = cache_plan, module.layer_idx
    plan.cache.write(layer, plan.slots_T, plan.positions_T, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if plan.packed_row is not None:
        # whole sequences: the new keys and values are all there are, so the cache need not be read
        return padded_attention(
            module,
            query,
            key,
            value,
            None,
            packed_row=plan.packed_row,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    batch, num_heads = len(plan.slots_T), query.shape[1]
    k, v = (store[layer][:batch, :, : plan.length] for store in (plan.cache.keys, plan.cache.values))
    # query heads that share a key head stand as rows of one query, so that keys are never repeated
    q = query[0].transpose(0, 1).reshape(batch, k.shape[1], -1, query.shape[3])
    seen = plan.seen(sliding_window)
    if softcap is not None:
        out = capped_attention(q, k, v, seen, scaling, softcap)
    else:
        mask = seen.expand(-1, -1, q.shape[2], -1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(1, batch, num_heads, -1), None


AttentionInterface.register(NAME, slot_attention)
