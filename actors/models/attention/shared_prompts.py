"""Shared prefixes computed once: calls of torch's kernel for sequences of different lengths, merged.

The tokens of a row are a tree of runs, and a token attends to its own run so far and to all runs above. Computed in one
call, each sample needs a copy of the runs above; the gradients of all copies are then added up. Here the work is
divided by keys instead:

    own       each run with itself; causal
    level d   all tokens below a run at depth d, as one sequence of queries, with the keys of the run

A group's prompt with its completions is one level; a branch of a branch needs a further level.

Each call returns the outputs and the log-sum-exp of the scores, which together give the output over all keys (the merge
of FlashAttention's blocks: Dao et al. 2022, arXiv 2205.14135). The backward pass of a call needs the probabilities of
its keys alone. Given the merged output and log-sum-exp, the kernel computes exactly those, so each call's gradient is
that of the whole attention. The kernel adds up the gradients of the prompt's keys and values in float32.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from actors.models.attention.rows import PackedRow, ends_of


@dataclass(frozen=True)
class Sequences:
    """Sequences of a call: offsets among queries and among keys, both (S+1,) int32, and the longest of each."""

    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, row: PackedRow, query_sizes: list[int], key_sizes: list[int]) -> "Sequences":
        """Return the sequences of these lengths, on the device of the row."""
        queries, keys = (row.tensor(np.cumsum([0, *sizes])).to(torch.int32) for sizes in (query_sizes, key_sizes))
        return cls(queries, keys, max(query_sizes), max(key_sizes))


@dataclass(frozen=True)
class Level:
    """Call in which C tokens attend to the runs above them, at one depth of the tree, with P tokens."""

    sequences: Sequences
    queries_C: Tensor
    """(C,) row index of the queries."""
    keys_P: Tensor
    """(P,) row index of the keys."""


@dataclass(frozen=True)
class Segments:
    """Division of a row with shared prefixes into calls."""

    own: Sequences
    """Whole row: a shared prompt, each of its completions, and each sample with a prompt of its own."""
    levels: tuple[Level, ...]
    """Calls of the shared runs, by depth; none if no samples share any."""
    longest_sample: int

    @classmethod
    def of(cls, row: PackedRow) -> "Segments":
        """Return the segments of a row."""
        ends_R = ends_of(row)
        # a run's tokens are seen to one end; where a branch leaves, the end changes
        starts = np.concatenate([[0], np.flatnonzero(np.diff(ends_R)) + 1, [ends_R.size]])
        levels: list[list[tuple[int, int, int]]] = []  # of each run that is shared, by depth: start, end, end of tree
        above: list[int] = []  # ends of the trees that the run is in
        for start, end in pairwise(starts.tolist()):
            while above and above[-1] <= start:
                above.pop()
            whole = int(ends_R[start])
            if whole > end:
                if len(above) == len(levels):
                    levels.append([])
                levels[len(above)].append((start, end, whole))
                above.append(whole)
        own_sizes = np.diff(starts).tolist()
        return cls(
            own=Sequences.of(row, own_sizes, own_sizes),
            levels=tuple(
                Level(
                    Sequences.of(row, [whole - end for _, end, whole in runs], [end - start for start, end, _ in runs]),
                    row.tensor(np.concatenate([np.arange(end, whole) for _, end, whole in runs])),
                    row.tensor(np.concatenate([np.arange(start, end) for start, end, _ in runs])),
                )
                for runs in levels
            ),
            longest_sample=max(map(len, row.samples)),
        )


class SharedPromptAttention(torch.autograd.Function):
    """Attention inside each sample of a row, with neither a copy of a prefix nor a window.

    `apply(query, key, value, segments, scale)` takes and returns (R, heads, dim). Key and value may have fewer heads,
    each for as many consecutive heads of the query. Runs where torch's kernel runs: on CUDA, in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
        """Compute all calls and merge them."""
        out, lse, states = _attend(query, key, value, segments.own, causal=True, scale=scale)
        if len(segments.levels) > 1:  # rounded once, behind the last merge
            out = out.to(torch.promote_types(out.dtype, torch.float32))
        for level in segments.levels:
            rows_C, rows_P = level.queries_C, level.keys_P
            other, other_lse, others = _attend(
                query[rows_C], key[rows_P], value[rows_P], level.sequences, causal=False, scale=scale
            )
            out_C, lse_C = merged(out[rows_C], lse[:, rows_C], other, other_lse)
            out, lse = out.index_copy(0, rows_C, out_C), lse.index_copy(1, rows_C, lse_C)
            states += others
        out = out.to(query.dtype)
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(query, key, value, out, lse, *states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Add the gradients of the levels to that of the call `own`, in float32."""
        [of_out] = of_outputs
        query, key, value, out, lse, *states = ctx.saved_tensors
        segments: Segments = ctx.segments
        gradients = _attend_backward(
            of_out, query, key, value, out, lse, states[:2], segments.own, causal=True, scale=ctx.scale
        )
        if len(segments.levels) > 1:  # rounded once, behind the last sum
            gradients = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in gradients]
        for number, level in enumerate(segments.levels, start=1):
            rows_C, rows_P = level.queries_C, level.keys_P
            others = _attend_backward(
                of_out[rows_C],
                query[rows_C],
                key[rows_P],
                value[rows_P],
                out[rows_C],
                # the kernel reads rows of consecutive numbers
                lse[:, rows_C].contiguous(),
                states[2 * number : 2 * number + 2],
                level.sequences,
                causal=False,
                scale=ctx.scale,
            )
            gradients = [
                _added(gradient, rows, other)
                for gradient, rows, other in zip(gradients, (rows_C, rows_P, rows_P), others, strict=True)
            ]
        return (*(x.to(given.dtype) for x, given in zip(gradients, (query, key, value), strict=True)), None, None)


def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys of two calls.

    Args:
        out: (N, heads, dim) output of a call.
        lse: (heads, N) log of the sum of exp(score) over its keys.
        other: output of the other call, for the same queries.
        other_lse: its log-sum-exp.
    """
    both = torch.logaddexp(lse, other_lse)
    share, other_share = ((x - both).exp().transpose(0, 1)[..., None] for x in (lse, other_lse))
    # float32 as the kernel has its sums; in one precision with the result, so that it is rounded once
    return (share * out + other_share * other).to(out.dtype), both


def _added(gradient: Tensor, rows: Tensor, other: Tensor) -> Tensor:
    # each row is there once, so the order of additions is fixed
    exact = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.index_copy(0, rows, (gradient[rows].to(exact) + other.to(exact)).to(gradient.dtype))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return output (N, heads, dim), log-sum-exp (heads, N), and what the backward pass wants of the random state.

    By torch's operator, and not by `varlen_attn`: that ignores the gradient of the log-sum-exp, and its backward pass
    can't be given other outputs than its own.
    """
    out, lse, *states, _ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        sequences.query_starts,
        sequences.key_starts,
        sequences.longest_query,
        sequences.longest_key,
        0.0,  # dropout
        causal,
        False,  # return_debug_mask
        scale=scale,
    )
    expected = (query.shape[1], query.shape[0])
    if lse.shape != expected:
        raise RuntimeError(
            f"torch {torch.__version__} returns the log-sum-exp as {tuple(lse.shape)} and not as {expected} (heads, "
            "tokens); set model.attention to flex, and report this"
        )
    return out, lse, states


def _attend_backward(
    of_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    states: list[Tensor],
    sequences: Sequences,
    *,
    causal: bool,
    scale: float | None,
) -> list[Tensor]:
    """Return the gradients of query, key and value; `out` and `lse` are of all keys, also of those of other calls."""
    return list(
        torch.ops.aten._flash_attention_backward(
            of_out,
            query,
            key,
            value,
            out,
            lse,
            sequences.query_starts,
            sequences.key_starts,
            sequences.longest_query,
            sequences.longest_key,
            0.0,  # dropout
            causal,
            *states,
            scale=scale,
        )
    )
