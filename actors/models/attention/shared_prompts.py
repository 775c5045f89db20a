"""A shared prompt computed once: two calls of torch's kernel for sequences of different lengths, merged.

A completion's token attends to the prompt and to the completion so far. Computed in one call, each completion needs a
copy of the prompt; the gradients of all copies are then added up. Here the work is divided by keys instead:

    own      each prompt with itself, and each completion with itself; causal
    prompt   the completions of each group, as one sequence of queries, with the keys of the group's prompt

Each call returns the outputs and the log-sum-exp of the scores, which together give the output over all keys (the merge
of FlashAttention's blocks: Dao et al. 2022, arXiv 2205.14135). The backward pass of a call needs the probabilities of
its keys alone. Given the merged output and log-sum-exp, the kernel computes exactly those, so each call's gradient is
that of the whole attention. The kernel adds up the gradients of the prompt's keys and values in float32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from actors.models.attention.rows import PackedRow


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
class Segments:
    """Division of a row with shared prompts into the two calls. C tokens of completions attend to P of prompts."""

    own: Sequences
    """Whole row: a shared prompt, each of its completions, and each sample with a prompt of its own."""
    prompt: Sequences | None
    """Completions and prompts of the groups with several samples; None if no group has any."""
    completions_C: Tensor
    """(C,) row index of the queries of the call `prompt`."""
    prompts_P: Tensor
    """(P,) row index of its keys."""
    longest_sample: int

    @classmethod
    def of(cls, row: PackedRow) -> "Segments":
        """Return the segments of a row."""
        groups: dict[int, list[int]] = {}  # samples, by the row index of the prompt's first token
        for b, index in enumerate(row.samples):
            groups.setdefault(int(index[0]), []).append(b)
        own_sizes, query_sizes, key_sizes = [], [], []
        completions, prompts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for members in groups.values():
            size = row.prompts[members[0]]
            found = [row.samples[b][size:] for b in members if len(row.samples[b]) > size]
            if len(found) < 2:  # nothing to share
                own_sizes.append(size + sum(map(len, found)))
                continue
            own_sizes += [size, *map(len, found)]
            key_sizes.append(size)
            query_sizes.append(sum(map(len, found)))
            completions += found
            prompts.append(row.samples[members[0]][:size])
        return cls(
            own=Sequences.of(row, own_sizes, own_sizes),
            prompt=Sequences.of(row, query_sizes, key_sizes) if key_sizes else None,
            completions_C=row.tensor(np.concatenate(completions)),
            prompts_P=row.tensor(np.concatenate(prompts)),
            longest_sample=max(map(len, row.samples)),
        )


class SharedPromptAttention(torch.autograd.Function):
    """Attention inside each sample of a row, with neither a copy of a prompt nor a window.

    `apply(query, key, value, segments, scale)` takes and returns (R, heads, dim). Key and value may have fewer heads,
    each for as many consecutive heads of the query. Runs where torch's kernel runs: on CUDA, in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
        """Compute both calls and merge them."""
        out, lse, states = _attend(query, key, value, segments.own, causal=True, scale=scale)
        if segments.prompt is not None:
            rows_C, rows_P = segments.completions_C, segments.prompts_P
            other, other_lse, others = _attend(
                query[rows_C], key[rows_P], value[rows_P], segments.prompt, causal=False, scale=scale
            )
            out_C, lse_C = merged(out[rows_C], lse[:, rows_C], other, other_lse)
            out, lse = out.index_copy(0, rows_C, out_C), lse.index_copy(1, rows_C, lse_C)
            states += others
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(query, key, value, out, lse, *states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Add the gradient of the call `prompt` to that of the call `own`, in float32."""
        [of_out] = of_outputs
        query, key, value, out, lse, *states = ctx.saved_tensors
        segments: Segments = ctx.segments
        gradients = _attend_backward(
            of_out, query, key, value, out, lse, states[:2], segments.own, causal=True, scale=ctx.scale
        )
        if segments.prompt is not None:
            rows_C, rows_P = segments.completions_C, segments.prompts_P
            others = _attend_backward(
                of_out[rows_C],
                query[rows_C],
                key[rows_P],
                value[rows_P],
                out[rows_C],
                # the kernel reads rows of consecutive numbers
                lse[:, rows_C].contiguous(),
                states[2:],
                segments.prompt,
                causal=False,
                scale=ctx.scale,
            )
            gradients = [
                _added(gradient, rows, other)
                for gradient, rows, other in zip(gradients, (rows_C, rows_P, rows_P), others, strict=True)
            ]
        return (*gradients, None, None)


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
