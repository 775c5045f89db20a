"""Attention for GPUs with what torch brings along: its kernel for sequences of different lengths (torch ≥ 2.11).

The kernel is FlashAttention's inside torch, so no other package is needed. A shared prefix is computed once, in layers
without a window; layers whose window is shorter than a sample get a copy of the prefix for each sample, since the
window of a completion's token depends on the length of the completion so far. The kernel has no soft cap and no
dropout; layers with a cap are computed by FlexAttention, and layers with dropout in padded blocks.
"""

import inspect
from functools import cache
from typing import Any

from torch import Tensor

from actors.models.attention.flash import Sequences
from actors.models.attention.flex import flex_row_attention
from actors.models.attention.padded import gathered
from actors.models.attention.rows import PackedRow, recomputed
from actors.models.attention.shared_prompts import Segments, SharedPromptAttention


@cache
def _parameters() -> frozenset[str]:
    """Return the names of the kernel's parameters, which differ by version; empty if this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def has_varlen() -> bool:
    """Return whether this torch has the kernel, with windows, which torch 2.10 lacks."""
    return "window_size" in _parameters()


def varlen_row_attention(
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
    if dropout or softcap is not None:
        options: Any = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap}
        return flex_row_attention(module, query, key, value, attention_mask, packed_row=packed_row, **options)
    dtype = value.dtype  # under autocast, norms of queries and keys return float32, which the kernel refuses
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # (R, heads, dim)
    segments = packed_row.planned(Segments.of)
    if sliding_window is None or segments.longest_sample <= sliding_window:
        return SharedPromptAttention.apply(q, k, v, segments, scaling)[None], None  # type: ignore[no-untyped-call]
    given: Any = {"scale": scaling, "window": sliding_window}
    return windowed_attention(module, q, k, v, attention_mask, packed_row=packed_row, **given)


@recomputed
def windowed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_row: PackedRow,
    scale: float | None,
    window: int,
) -> tuple[Tensor, None]:
    """Compute causal attention with a window inside each sample, with copies of shared tokens; (R, heads, dim) each."""
    from torch.nn.attention.varlen import varlen_attn  # imported here, since older torch has none

    plan = packed_row.planned(Sequences.of)
    q, k, v = (gathered(x, plan.index_N) for x in (query, key, value))  # (N, heads, dim)
    grouped = q.shape[1] != k.shape[1]
    # torch 2.11 takes fewer heads of keys without being asked, and has no such argument
    asked: dict[str, Any] = {"enable_gqa": grouped} if "enable_gqa" in _parameters() else {}
    out: Any = varlen_attn(
        q,
        k,
        v,
        plan.starts,
        plan.starts,
        plan.longest,
        plan.longest,
        scale=scale,
        # causal; the window includes the token itself
        window_size=(window - 1, 0),
        **asked,
    )
    return out.index_select(0, plan.back_R)[None], None
