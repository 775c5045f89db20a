"""The whole row in one compiled kernel that skips what no token sees (torch's FlexAttention), on GPUs.

A shared prompt is attended to where it stands. On a CPU nothing is compiled and there is no backward pass.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from actors.policy.attention.padded import padded_attention
from actors.policy.attention.rows import PackedRow

Index = Tensor


class Sight:
    """Which tokens of a row see which, and the blocks of them that a kernel may skip."""

    def __init__(self, row: PackedRow) -> None:
        size = len(row.token_ids_R)
        prompt_R, sample_R = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for b, (index, length) in enumerate(zip(row.samples, row.prompts, strict=True)):
            prompt_R[index] = index[0]  # samples that share a prompt begin at the same token
            sample_R[index[:length]], sample_R[index[length:]] = -1, b
        self._size = size
        self._prompt_R, self._sample_R = row.tensor(prompt_R), row.tensor(sample_R)
        self._positions_R = row.position_ids_R
        self._masks: dict[int | None, BlockMask] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else a compiled layer has a variant for each state
    def mask(self, sliding_window: int | None) -> BlockMask:
        """Made once for each kind of layer."""
        if sliding_window not in self._masks:
            device, size = self._positions_R.device, self._size
            make = _compiled(create_block_mask, device.type)
            self._masks[sliding_window] = make(self._sees(sliding_window), None, None, size, size, device=device)
        return self._masks[sliding_window]

    def _sees(self, sliding_window: int | None) -> Callable[[Index, Index, Index, Index], Tensor]:
        prompt_R, sample_R, positions_R = self._prompt_R, self._sample_R, self._positions_R

        def sees(batch: Index, head: Index, query: Index, key: Index) -> Tensor:
            own = (sample_R[key] == -1) | (sample_R[key] == sample_R[query])
            seen = (query >= key) & (prompt_R[query] == prompt_R[key]) & own
            if sliding_window is not None:
                seen = seen & (positions_R[query] - positions_R[key] < sliding_window)
            return seen

        return sees


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
    """Causal attention inside each sample of a packed row; (1, heads, R, dim) → (1, R, heads, dim).

    A model that drops attention weights out is computed in padded blocks: this kernel can't.
    """
    if dropout:
        options: Any = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap}
        return padded_attention(module, query, key, value, attention_mask, packed_row=packed_row, **options)
    attend = _compiled(flex_attention, query.device.type)
    out = attend(
        query.to(value.dtype),  # norms of queries and keys leave float32 under autocast
        key.to(value.dtype),
        value,
        score_mod=_capped(softcap) if softcap is not None else None,
        block_mask=packed_row.planned(Sight).mask(sliding_window),
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
    """Rows differ in length, so it is compiled for any."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function
