"""Attention for GPUs: all samples of a row in a single call of FlashAttention's kernel for different lengths."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.models.attention.padded import gathered
from actors.models.attention.rows import PackedRow, recomputed


@dataclass(frozen=True)
class Sequences:
    """Samples of a row, one after the other. A shared prompt is repeated for each sample."""

    index_N: Tensor
    """(N,) row index of each sample token."""
    starts: Tensor
    """(B+1,) int32 offsets of the samples among the N tokens."""
    longest: int
    """Length of the longest sample."""
    back_R: Tensor
    """(R,) index among the N outputs for each token of the row."""

    @classmethod
    def of(cls, row: PackedRow) -> "Sequences":
        """Return the samples of a row, without padding."""
        index_N, sizes = np.concatenate(row.samples), [index.size for index in row.samples]
        back_R = np.zeros(len(row.token_ids_R), np.int64)
        # tokens of a shared prompt stand in several samples with equal outputs: the last of them is taken
        back_R[index_N] = np.arange(index_N.size)
        starts = row.tensor(np.cumsum([0, *sizes])).to(torch.int32)
        return cls(row.tensor(index_N), starts, max(sizes), row.tensor(back_R))


@recomputed
def flash_attention(
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
    from flash_attn import flash_attn_varlen_func

    plan = packed_row.planned(Sequences.of)
    dtype = value.dtype  # under autocast, norms of queries and keys return float32, which the kernel refuses
    q, k, v = (gathered(x[0].transpose(0, 1), plan.index_N).to(dtype) for x in (query, key, value))  # (N, heads, dim)
    out: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        plan.starts,
        plan.starts,
        plan.longest,
        plan.longest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,  # within each sample, as `starts` says
        # the window includes the token itself
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0,
        deterministic=True,  # also in the backward pass: a replay has the same bits
    )
    return out.index_select(0, plan.back_R)[None], None
