"""Attention sample by sample: gathered from the row into padded blocks of similar lengths, and scattered back.

Linear layers want a single long row; attention wants separate sequences, since a block-diagonal mask over a row would
cost the square of the row. Padding is on the right, so causality alone hides padding from real tokens. Runs on CPUs and
wherever torch's scaled_dot_product_attention runs.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from actors.models.attention.rows import PackedRow, recomputed


@dataclass(frozen=True)
class Blocks:
    """Division of a row into blocks, one per class of lengths, and the way back."""

    indices: tuple[Tensor, ...]
    """Row indices of each block, (b, l)."""
    back_R: Tensor
    """(R,) index of each row token's output in the concatenated outputs of the blocks."""
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, row: PackedRow) -> "Blocks":
        """Return the blocks of a row. The lengths in a block differ by less than a factor of two."""
        by_class: dict[int, list[NDArray[np.int64]]] = {}
        # classes by powers of two: at most half of a block is padding, and a row has a handful of blocks
        for index in row.samples:
            by_class.setdefault(int(index.size).bit_length(), []).append(index)
        blocks, back, start = [], np.zeros(len(row.token_ids_R), np.int64), 0
        for indices in by_class.values():
            width = max(index.size for index in indices)
            block = np.zeros((len(indices), width), np.int64)  # padding repeats token 0 of the row
            for b, index in enumerate(indices):
                block[b, : index.size] = index
                back[index] = start + b * width + np.arange(index.size)
            blocks.append(block)
            start += block.size
        return cls(tuple(row.tensor(block) for block in blocks), row.tensor(back))

    def mask(self, length: int, sliding_window: int | None) -> Tensor:
        """Return the keys (columns) visible to each query (row) of a block; cached for all layers."""
        found = self._masks.get((length, sliding_window))
        if found is None:
            at = torch.arange(length, device=self.back_R.device)
            age = at[:, None] - at[None]
            found = (age >= 0) & (age < (sliding_window or length))
            self._masks[length, sliding_window] = found
        return found


@recomputed
def padded_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_row: PackedRow,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention inside each sample of a packed row; (1, heads, R, dim) → (1, R, heads, dim)."""
    query_R, key_R, value_R = (x[0].transpose(0, 1) for x in (query, key, value))  # (R, heads, dim)
    blocks = packed_row.planned(Blocks.of)
    outputs = []
    for block in blocks.indices:
        q, k, v = (gathered(x, block).transpose(1, 2) for x in (query_R, key_R, value_R))  # (b, heads, l, dim)
        length = block.shape[1]
        reaches_back = sliding_window is None or length <= sliding_window  # no token of the block is outside the window
        if softcap is not None:
            out = capped_attention(q, k, v, blocks.mask(length, sliding_window), scaling, softcap)
        else:
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                # is_causal instead of a mask where it will do: flash kernels take no mask
                attn_mask=None if reaches_back else blocks.mask(length, sliding_window),
                is_causal=reaches_back,
                scale=scaling,
                dropout_p=dropout,
                enable_gqa=k.shape[1] != q.shape[1],
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, blocks.back_R)[None], None


def gathered(x_R: Tensor, block: Tensor) -> Tensor:
    """Gather rows (R, …) into a block (b, l, …).

    index_select is used because its backward pass on a CPU takes half the time of indexing.
    """
    return x_R.index_select(0, block.flatten()).view(*block.shape, *x_R.shape[1:])


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Compute attention with scores limited to ±softcap by a tanh (Gemma 2). Torch's fused kernels don't offer it.

    Args:
        query: (b, heads, l, dim); key and value may have fewer heads, each for as many consecutive heads of the query.
        seen: bool, broadcast to (b, 1, l, keys).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, float("-inf"))
    # float32, as the fused kernels accumulate
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
