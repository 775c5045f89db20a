"""The function of flash-attn 2 that we call, with its parameters, in the plainest way: it has none for CPUs."""

from itertools import pairwise

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """(N, heads, dim) of sequences one after the other."""
    assert causal
    assert deterministic
    assert not dropout_p
    assert q.dtype == k.dtype == v.dtype
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max_seqlen_k == max(end - start for start, end in pairwise(bounds))
    return torch.cat(
        [
            attend(q[start:end], k[start:end], v[start:end], softmax_scale, window_size[0], softcap)
            for start, end in pairwise(bounds)
        ]
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, reach: int, softcap: float) -> Tensor:
    """Compute causal attention in one sequence; `reach` is the window to the left, without the token itself."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(q))
    age = at[:, None] - at[None]
    unseen = (age < 0) | ((age > reach) if reach >= 0 else torch.zeros_like(age, dtype=torch.bool))
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)
