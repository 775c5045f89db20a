"""Context parallelism: several ranks compute a row of tokens together (Ulysses, arXiv:2309.14509).

Each of the c ranks has R / c neighbouring tokens of the row in every layer, and all tokens of 1 / c of the heads in
attention. So any attention of packed rows computes a divided row, with windows, soft caps and shared prefixes.

    layers       R / c tokens, all heads  ─▶  all-to-all  ─▶  R tokens, heads / c      attention
                 R / c tokens, all heads  ◀─  all-to-all  ◀─  R tokens, heads / c
    last layer   R / c hidden states      ─▶  gathered    ─▶  K / c of the K tokens    output layer
                                                              K logprobs on each rank  loss

All ranks compute the same loss from the K logprobs. The gradients of a weight on the ranks add up to its gradient.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class RowRanks(Protocol):
    """Ranks that compute rows together, as seen from one of them."""

    place: int
    """Number of this rank among them, from 0: the part of the row that it has."""
    size: int
    """Number c of the ranks."""
    has_own_heads: bool
    """True if each rank has the weights of its own heads alone (tensor parallelism), so that attention begins and ends
    with all tokens of this rank's heads."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send `parts[i]` to rank i; return what all ranks sent here, in the order of ranks. All ranks must call.

        Args:
            parts: contiguous tensor (c, …) of the same shape on each rank.

        Raises:
            RuntimeError: another rank is gone.
        """
        ...


def with_all_tokens(tensors: Sequence[Tensor], ranks: RowRanks) -> list[Tensor]:
    """Return queries, keys and values of all tokens, for this rank's heads: (1, heads, R / c, dim) → (1, h, R, dim).

    One exchange for all of them. h is heads / c; fewer heads of keys are repeated up to the next multiple of c.
    """
    c = ranks.size
    parts = []
    for x in tensors:
        repeated = math.lcm(x.shape[1], c) // x.shape[1]
        heads = x[0] if repeated == 1 else x[0].repeat_interleave(repeated, 0)
        parts.append(heads.reshape(c, -1, *heads.shape[1:]))  # (c, h, R / c, dim)
    arrived = _exchanged(parts, ranks)
    # the first dimension is now the part of the row
    return [part.transpose(0, 1).flatten(1, 2)[None] for part in arrived]


def with_all_heads(out: Tensor, ranks: RowRanks) -> Tensor:
    """Return the outputs of attention for this rank's tokens: (1, R, heads / c, dim) → (1, R / c, heads, dim)."""
    parts = out[0].reshape(ranks.size, -1, *out.shape[2:])  # (c, R / c, h, dim)
    (arrived,) = _exchanged([parts], ranks)
    return arrived.transpose(0, 1).flatten(1, 2)[None]


def own_part(values_R: Tensor, ranks: RowRanks) -> Tensor:
    """Return this rank's part of the values of a row's tokens; (R / c,)."""
    size = len(values_R) // ranks.size
    return values_R[ranks.place * size : (ranks.place + 1) * size]


def gathered_rows(part_ND: Tensor, ranks: RowRanks) -> Tensor:
    """Return the hidden states of all tokens, from those of each rank's part: (R / c, D) → (R, D).

    Each rank uses some of them, so the gradients of all ranks are added up, in the order of ranks.
    """
    # a copy for each rank, so that autograd adds up what comes back for them
    arrived: Tensor = _Exchanged.apply(_for_all(part_ND, ranks), ranks)  # type: ignore[no-untyped-call]
    return arrived.flatten(0, 1)


def summed_part(summand_ND: Tensor, ranks: RowRanks) -> Tensor:
    """Return the sums of the ranks' summands for this rank's tokens: (R, D) → (R / c, D), added in the order of ranks.

    The transpose of `gathered_rows`.
    """
    parts = summand_ND.reshape(ranks.size, -1, summand_ND.shape[-1])
    arrived: Tensor = _Exchanged.apply(parts, ranks)  # type: ignore[no-untyped-call]
    return arrived.sum(0)


def gathered_results(part_K: Tensor, ranks: RowRanks) -> Tensor:
    """Return the results of all ranks, one after the other: (k, …) → (c · k, …).

    All ranks compute the same loss from them, so the gradient is this rank's part of the loss's gradient.
    """
    return _GatheredResults.apply(part_K, ranks)  # type: ignore[no-any-return, no-untyped-call]


def _exchanged(parts: Sequence[Tensor], ranks: RowRanks) -> list[Tensor]:
    """Exchange the parts (c, …) of several tensors at once."""
    # under autocast, norms of queries and keys return float32, and values are bfloat16: no precision is lost
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    flat = torch.cat([part.to(dtype).reshape(ranks.size, -1) for part in parts], 1)
    arrived: Tensor = _Exchanged.apply(flat, ranks)  # type: ignore[no-untyped-call]
    sizes = [part[0].numel() for part in parts]
    return [x.reshape(part.shape).to(part.dtype) for x, part in zip(torch.split(arrived, sizes, 1), parts, strict=True)]


class _Exchanged(torch.autograd.Function):
    """All-to-all, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: RowRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_to_all(parts.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.all_to_all(gradients[0].contiguous()), None


class _GatheredResults(torch.autograd.Function):
    """Autograd function of `gathered_results`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: RowRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_to_all(_for_all(part, ranks)).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return own_part(gradients[0], ctx.ranks).contiguous(), None


def _for_all(part: Tensor, ranks: RowRanks) -> Tensor:
    """Return a copy for each rank: (n, …) → (c, n, …)."""
    return part.expand(ranks.size, *part.shape).contiguous()
