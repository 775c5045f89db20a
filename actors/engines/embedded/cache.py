"""Keys and values of running sequences in slots, and the attention function that reads and writes them.

A forward is either a prefill (whole sequences in one packed row, nothing of them cached yet) or a decode (one new token
of each sequence). Both write the new keys and values to the sequences' slots. A decode reads slots 0…B−1, so its batch
is a view of the cache. The cache grows by doubling, so it is as large as the longest sequence and the largest batch
have needed.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from actors.policy.attention.padded import capped_attention, padded_attention
from actors.policy.attention.rows import PackedRow

NAME = "grpo_slots"

SMALLEST = 16
"""Slots and positions that a cache starts with."""


class SlotCache:
    """Keys and values, per layer (slots, heads, length, dim), up to `max_slots` and `max_length`."""

    def __init__(self, max_slots: int, max_length: int) -> None:
        self._limits = max_slots, max_length
        self._size = 0, 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def reserve(self, slots: int, length: int) -> None:
        """Make room for the first `slots` slots with `length` positions each."""
        wanted = (slots, length)
        if all(have >= want for have, want in zip(self._size, wanted, strict=True)):
            return
        s, n = (
            max(have, min(limit, max(SMALLEST, 1 << (want - 1).bit_length())))
            for have, want, limit in zip(self._size, wanted, self._limits, strict=True)
        )
        self._size = s, n
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = old.new_zeros((s, old.shape[1], n, old.shape[3]))
                store[layer][: old.shape[0], :, : old.shape[2]] = old

    def write(self, layer: int, slots_T: Tensor, positions_T: Tensor, key_T: Tensor, value_T: Tensor) -> None:
        """Store (T, heads, dim) at (slot, position); there is room (`reserve`)."""
        for store, new in ((self.keys, key_T), (self.values, value_T)):
            if layer not in store:
                slots, length = self._size
                store[layer] = new.new_zeros((slots, new.shape[1], length, new.shape[2]))
            store[layer][slots_T, :, positions_T] = new

    def repeat(self, slot: int, count: int, length: int) -> None:
        """Give the `count` slots behind a slot its first `length` positions."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[slot + 1 : slot + 1 + count, :, :length] = tensor[slot, :, :length]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Give `targets` the first `length` positions of other slots; none is both source and target."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[targets, :, :length] = tensor[sources, :, :length]


@dataclass(frozen=True)
class CachePlan:
    """What one forward does: a prefill of `packed_row`, or without one a decode of slots 0…B−1."""

    cache: SlotCache
    slots_T: Tensor
    positions_T: Tensor
    length: int
    """Positions that a decode reads: those of the longest context, the new token included."""
    packed_row: PackedRow | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def seen(self, sliding_window: int | None) -> Tensor:
        """Which positions each sequence of a decode sees, (B, 1, 1, length); made once, since all layers ask for it."""
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
    """Attention of new tokens over their sequences' slots; (1, heads, T, dim) → (1, T, heads, dim)."""
    plan, layer = cache_plan, module.layer_idx
    plan.cache.write(layer, plan.slots_T, plan.positions_T, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if plan.packed_row is not None:
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
