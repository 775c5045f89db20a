"""Attention for GPUs: the whole row in a single compiled kernel, which skips invisible blocks (torch's FlexAttention).

A shared prefix stays in a single place. On a CPU nothing is compiled, and there is no backward pass.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from actors.models.attention.padded import padded_attention
from actors.models.attention.rows import PackedRow, ends_of

Index = Tensor


class RowMask:
    """Visibility between the tokens of a row, with the blocks a kernel may skip."""

    def __init__(self, row: PackedRow) -> None:
        self._size = len(row.token_ids_R)
        self._ends_R = row.tensor(ends_of(row))
        self._positions_R = row.position_ids_R
        self._masks: dict[int | None, BlockMask] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else compiled layers get a variant per state
    def mask(self, sliding_window: int | None) -> BlockMask:
        """Return the block mask for layers with this window; cached, since all layers of a kind use the same mask."""
        if sliding_window in self._masks:
            return self._masks[sliding_window]
        ends_R, positions_R = self._ends_R, self._positions_R

        def sees(batch: Index, head: Index, query: Index, key: Index) -> Tensor:
            # row order is causal order, and depth first: the tokens that see a key are directly behind it
            seen = (query >= key) & (query < ends_R[key])
            if sliding_window is not None:
                seen = seen & (positions_R[query] - positions_R[key] < sliding_window)
            return seen

        make = _compiled(create_block_mask, positions_R.device.type)
        found: BlockMask = make(sees, None, None, self._size, self._size, device=positions_R.device)
        self._masks[sliding_window] = found
        return found


def flex_row_attention(
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
    """Compute causal attention inside each sample of a packed row; (1, heads, R, dim) → (1, R, heads, dim).

    With dropout of attention weights the row is computed in padded blocks instead: this kernel has no dropout.
    """
    if dropout:
        options: Any = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap}
        return padded_attention(module, query, key, value, attention_mask, packed_row=packed_row, **options)
    attend = _compiled(flex_attention, query.device.type)
    out = attend(
        query.to(value.dtype),  # under autocast, norms of queries and keys return float32
        key.to(value.dtype),
        value,
        score_mod=_capped(softcap) if softcap is not None else None,
        block_mask=packed_row.planned(RowMask).mask(sliding_window),
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2), None


@cache
def _capped(softcap: float) -> Callable[[Tensor, Index, Index, Index, Index], Tensor]:
    def capped(score: Tensor, batch: Index, head: Index, query: Index, key: Index) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compile a function for rows of any length; on a CPU return the function unchanged."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function
