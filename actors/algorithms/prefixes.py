"""Prefixes that samples of a group have in common, which a packed row holds once.

A conversation with branches becomes several samples. The prompt of a branch starts with tokens of an earlier sample: of
its prompt, and often of its completion too. Tokens that a policy has sampled are then context for the branch, and in
the loss of the earlier sample alone. Below, `|` ends a prompt; the second sample's prompt starts with the first one's
prompt and half of its completion:

    samples   ab|XYZ.   abXc|V.   ab|W.         row   a b X Y Z  c V  W
    order     0 1 2                             shared   0 3 2

Tokens behind a sample's prompt are never taken from another sample, even if equal.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def nested(tokens: Sequence[NDArray[np.int32]], prompts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return an order of samples, and of each the number of leading tokens that it has in common with its predecessor.

    The row is as short as any that shares prefixes of prompts. Samples with equal prompts keep their order.

    Args:
        tokens: prompt and completion of each sample.
        prompts: number of prompt tokens of each sample.
    """
    # the last token of a completion predicts nothing, so the row doesn't hold it
    held = np.array([ids.size - (ids.size > prompt) for ids, prompt in zip(tokens, prompts, strict=True)], np.int64)
    common_BB = _common(tokens)
    # a longer prompt can share more than a shorter one, so the sample with the shorter prompt comes first
    by_prompt = sorted(range(len(tokens)), key=lambda b: (prompts[b], b))
    shared = [0] * len(tokens)
    branches: list[list[int]] = [[] for _ in tokens]
    roots: list[int] = []
    for place, b in enumerate(by_prompt):
        earlier = by_prompt[:place]
        taken = np.minimum(common_BB[b, earlier], held[earlier])
        best = int(taken.argmax()) if place else 0  # of equals the first: the sample that owns the tokens
        shared[b] = min(int(taken[best]), prompts[b]) if place else 0
        (branches[earlier[best]] if shared[b] else roots).append(b)
    # depth first, and of one sample the branch that leaves latest before the others: what a sample shares is then
    # always the start of its predecessor
    order, left = [], roots[::-1]
    while left:
        b = left.pop()
        order.append(b)
        left += sorted(branches[b], key=shared.__getitem__, reverse=True)[::-1]
    return order, [shared[b] for b in order]


def _common(tokens: Sequence[NDArray[np.int32]]) -> Ints:
    """Return the length of the longest common prefix of each pair of samples, (B, B)."""
    # among sorted samples, a pair's common prefix is the shortest one of the neighbours between
    ranked = sorted(range(len(tokens)), key=lambda b: tokens[b].astype(">i4").tobytes())
    neighbours = np.array([_common_prefix(tokens[a], tokens[b]) for a, b in pairwise(ranked)], np.int64)
    found = np.zeros((len(tokens), len(tokens)), np.int64)
    for rank, b in enumerate(ranked):
        found[b, ranked[rank + 1 :]] = np.minimum.accumulate(neighbours[rank:])
    return np.maximum(found, found.T)


def _common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    size = min(one.size, other.size)
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size
