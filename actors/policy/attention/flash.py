"""All samples of a row in one call of FlashAttention's kernel for sequences of different lengths, on GPUs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.policy.attention.padded import gathered
from actors.policy.attention.rows import PackedRow


@dataclass(frozen=True)
class Sequences:
    """The samples of a row one after the other, shared prompts as often as they are attended to."""

    index_N: Tensor
    """Row index of each of their tokens."""
    starts: Tensor
    """(B+1,) int32, where they begin."""
    longest: int
    back_R: Tensor
    """Where among the N outputs each row token's stands."""

    @classmethod
    def of(cls, row: PackedRow) -> "Sequences":
        """Without padding."""
        index_N, sizes = np.concatenate(row.samples), [index.size for index in row.samples]
        back_R = np.zeros(len(row.token_ids_R), np.int64)
        back_R[index_N] = np.arange(index_N.size)
        starts = row.tensor(np.cumsum([0, *sizes])).to(torch.int32)
        return cls(row.tensor(index_N), starts, max(sizes), row.tensor(back_R))


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
    """Causal attention inside each sample of a packed row; (1, heads, R, dim) → (1, R, heads, dim)."""
    from flash_attn import flash_attn_varlen_func

    plan = packed_row.planned(Sequences.of)
    dtype = value.dtype  # norms of queries and keys leave float32 under autocast, which the kernel does not know
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
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0,
        deterministic=True,  # in the backward pass, so that a replay has the same bits
    )
    return out.index_select(0, plan.back_R)[None], None
