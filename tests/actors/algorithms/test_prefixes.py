"""Prefixes in common: an order of samples in which each shares as much with its predecessor as with any."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from actors.algorithms.prefixes import nested


def arrays(*texts: str) -> tuple[list[NDArray[np.int32]], list[int]]:
    """Tokens and prompt lengths of texts in which `|` ends the prompt."""
    tokens = [np.array([ord(c) for c in text if c != "|"], np.int32) for text in texts]
    return tokens, [text.index("|") for text in texts]


def test_a_branch_shares_sampled_tokens_and_stands_behind_their_sample() -> None:
    """The example of the module."""
    assert nested(*arrays("ab|XYZ.", "abXc|V.", "ab|W.")) == ([0, 1, 2], [0, 3, 2])


def test_the_branch_that_leaves_latest_comes_first() -> None:
    """Else the other would hide the tokens that it shares."""
    assert nested(*arrays("ab|XYZ.", "abXc|V.", "abXYd|V.")) == ([0, 2, 1], [0, 4, 3])


def test_the_last_token_of_a_sample_is_not_shared_by_a_branch_but_among_branches() -> None:
    """The first sample's row lacks it; the second sample's prompt holds it."""
    assert nested(*arrays("ab|XY", "abXYc|V.", "abXYd|V.")) == ([0, 1, 2], [0, 3, 4])


def test_equal_completions_of_a_prompt_are_computed_apart() -> None:
    """Single turns: in their order, with the prompt alone shared."""
    assert nested(*arrays("ab|XY", "ab|XY", "ab|XYZ")) == ([0, 1, 2], [0, 2, 2])


def test_samples_with_nothing_in_common_share_nothing() -> None:
    """Also where one is alone."""
    assert nested(*arrays("ab|X", "c|Y")) == ([1, 0], [0, 0])
    assert nested(*arrays("ab|X")) == ([0], [0])


@given(st.integers(0, 2**32))
def test_the_row_is_as_short_as_in_any_order(seed: int) -> None:
    """Over few letters, so that much is in common; compared with random orders, each sharing with the best before."""
    rng = random.Random(seed)
    tokens = [
        np.array([rng.randrange(2) for _ in range(rng.randint(2, 8))], np.int32) for _ in range(rng.randint(1, 7))
    ]
    prompts = [rng.randint(1, ids.size) for ids in tokens]

    def shared_in(order: list[int]) -> int:
        total = 0
        for place, b in enumerate(order):
            best = 0
            for other in order[:place]:
                most = min(prompts[b], tokens[other].size - (tokens[other].size > prompts[other]))
                size = 0
                while size < min(most, tokens[b].size) and tokens[b][size] == tokens[other][size]:
                    size += 1
                best = max(best, size)
            total += best
        return total

    order, shared = nested(tokens, prompts)
    assert sorted(order) == list(range(len(tokens)))
    for place in range(1, len(order)):
        one, before = tokens[order[place]], tokens[order[place - 1]]
        assert one[: shared[place]].tolist() == before[: shared[place]].tolist()
        assert shared[place] <= prompts[order[place]]
        assert shared[place] <= before.size - (before.size > prompts[order[place - 1]])
    for _ in range(20):
        other = rng.sample(order, len(order))
        assert shared_in(other) <= sum(shared)
