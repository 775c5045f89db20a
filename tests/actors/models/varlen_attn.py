"""torch's kernel for sequences of different lengths, in the plainest way: torch has none for CPUs.

Registered as torch's own operators, so that their signatures are those of the installed torch, and that its
`varlen_attn` runs as it is. As the kernel's, the backward pass computes the probabilities from the log-sum-exp that it
is given, and never from the scores of its own keys alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def scores_of(query: Tensor, key: Tensor, causal: bool, scale: float | None, reach: int) -> tuple[Tensor, float]:
    """(heads, queries, keys), −inf where a query does not see a key; the last of both stand at the same position."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    age = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))[None]
    unseen = torch.zeros_like(age, dtype=torch.bool)
    if causal:
        unseen |= age < 0
    if reach >= 0:
        unseen |= age > reach
    return scores.masked_fill(unseen, float("-inf")), scale


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(N, heads, dim) of sequences one after the other → outputs, log-sum-exp (heads, N) in float32, random state."""
    assert not dropout_p
    assert not return_debug_mask
    assert not any(x is not None for x in others.values())
    reach = _checked(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right)
    causal = is_causal or window_size_right == 0
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query), dtype=_exact(query))
    for q, k in _sequences(cum_seq_q, cum_seq_k):
        keys, values = (_for_all_heads(x[k], query.shape[1]).to(lse.dtype) for x in (key, value))
        scores, _ = scores_of(query[q].to(lse.dtype), keys, causal, scale, reach)
        lse[:, q] = scores.logsumexp(-1)
        out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    nothing = torch.zeros(2, dtype=torch.uint64)
    return out, lse, nothing, torch.empty(0), torch.empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's: P = exp(S − lse), dS = P (dO Vᵀ − rowsum(dO O))."""
    reach = _checked(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right)
    assert logsumexp.shape == (query.shape[1], len(query))
    assert logsumexp.is_contiguous()
    causal, exact = is_causal or window_size_right == 0, logsumexp.dtype
    d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
    for q, k in _sequences(cum_seq_q, cum_seq_k):
        of_out, queries = grad_out[q].to(exact), query[q].to(exact)
        keys, values = (_for_all_heads(x[k], query.shape[1]).to(exact) for x in (key, value))
        scores, factor = scores_of(queries, keys, causal, scale, reach)
        weights = (scores - logsumexp[:, q, None]).exp()
        delta = (of_out * out[q].to(exact)).sum(-1).T[..., None]
        of_scores = weights * (torch.einsum("qhd,khd->hqk", of_out, values) - delta) * factor
        d_query[q] = torch.einsum("hqk,khd->qhd", of_scores, keys).to(query.dtype)
        for found, weighted, by in ((d_key, of_scores, queries), (d_value, weights, of_out)):
            for_all = torch.einsum("hqk,qhd->khd", weighted, by)
            found[k] = for_all.unflatten(1, (found.shape[1], -1)).sum(2).to(found.dtype)
    return d_query, d_key, d_value


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    max_q: int,
    max_k: int,
    left: int | None,
    right: int | None,
) -> int:
    """What the kernel requires; return the window's reach to the left, without the token itself, −1 for no window."""
    assert query.dtype == key.dtype == value.dtype
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    for starts, longest, size in ((starts_q, max_q, len(query)), (starts_k, max_k, len(key))):
        sizes = [end - start for start, end in pairwise(starts.tolist())]
        assert min(sizes) > 0, "an empty sequence"
        assert (max(sizes), sum(sizes)) == (longest, size)
    assert right in (None, -1, 0)
    return -1 if left is None else left


def _sequences(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    bounds = (pairwise(starts.tolist()) for starts in (starts_q, starts_k))
    return ((slice(*q), slice(*k)) for q, k in zip(*bounds, strict=True))


def _for_all_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@contextmanager
def kernels_for_cpus() -> Iterator[None]:
    """Meanwhile, torch's operators run on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()
