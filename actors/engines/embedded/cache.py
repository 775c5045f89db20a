"""Keys and values of running sequences in slots, and the attention function that reads and writes them.

A forward is either a prefill (whole sequences in one packed row, nothing of them cached yet) or a decode (one new token
of each sequence). Both write the new keys and values to the sequences' slots. The cache grows by doubling, so it is as
large as the longest sequence and the largest batch have needed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from actors.policy.attention import PackedRow, packed_attention

NAME = "grpo_slots"


class SlotCache:
    """Keys and values, per layer (slots, heads, length, dim)."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(self, layer: int, slots_T: Tensor, positions_T: Tensor, key_T: Tensor, value_T: Tensor) -> None:
        """Store (T, heads, dim) at (slot, position)."""
        needed = int(slots_T.max()) + 1, int(positions_T.max()) + 1
        for store, new in ((self.keys, key_T), (self.values, value_T)):
            store[layer] = _grown(store.get(layer), needed, new)
            store[layer][slots_T, :, positions_T] = new

    def copy_prefix(self, source: int, targets: Tensor, length: int) -> None:
        """Give slots the first `length` positions of another slot: completions of one prompt share its prefill."""
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                grown = _grown(tensor, (int(targets.max()) + 1, length), tensor)
                grown[targets, :, :length] = grown[source, :, :length]
                store[layer] = grown


def _grown(tensor: Tensor | None, needed: tuple[int, int], like: Tensor) -> Tensor:
    slots, length = needed
    if tensor is not None and tensor.shape[0] >= slots and tensor.shape[2] >= length:
        return tensor
    heads, dim = like.shape[1], like.shape[-1]
    old_slots, old_length = (tensor.shape[0], tensor.shape[2]) if tensor is not None else (0, 0)
    shape = (max(slots, old_slots, min(2 * slots, 16)), heads, max(old_length, 1 << (length - 1).bit_length(), 16), dim)
    grown = like.new_zeros(shape)
    if tensor is not None:
        grown[:old_slots, :, :old_length] = tensor
    return grown


@dataclass(frozen=True)
class CachePlan:
    """What one forward does. `packed_row` is set for a prefill and None for a decode."""

    cache: SlotCache
    slots_T: Tensor
    positions_T: Tensor
    length: int
    """Longest context of a decode, the new token included."""
    contiguous: bool
    """Whether the slots of a decode are 0…B−1, so that nothing need be gathered."""
    packed_row: PackedRow | None = None


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
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of new tokens over their sequences' slots; (1, heads, T, dim) → (1, T, heads, dim)."""
    plan, layer = cache_plan, module.layer_idx
    plan.cache.write(layer, plan.slots_T, plan.positions_T, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if plan.packed_row is not None:
        return packed_attention(
            module, query, key, value, None, packed_row=plan.packed_row, scaling=scaling, sliding_window=sliding_window
        )
    keys, values = plan.cache.keys[layer], plan.cache.values[layer]
    batch = slice(0, len(plan.slots_T)) if plan.contiguous else plan.slots_T
    k, v = keys[:, :, : plan.length][batch], values[:, :, : plan.length][batch]
    age_BL = plan.positions_T[:, None] - torch.arange(plan.length, device=k.device)[None]
    seen_BL = age_BL >= 0
    if sliding_window is not None:
        seen_BL &= age_BL < sliding_window
    out = scaled_dot_product_attention(
        query[0].transpose(0, 1)[:, :, None],
        k,
        v,
        attn_mask=seen_BL[:, None, None],
        scale=scaling,
        enable_gqa=k.shape[1] != query.shape[1],
    )
    return out[:, :, 0][None], None


AttentionInterface.register(NAME, slot_attention)
