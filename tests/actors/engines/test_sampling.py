"""Sampling as a function of logits and one random number, with numbers to check by hand."""

import math

import numpy as np
import pytest
import torch

from actors.engines.embedded.sampling import sample, uniforms

LOGITS = torch.tensor([[math.log(5), math.log(1), math.log(4)]])
"""Probabilities 0.5, 0.1, 0.4."""


def draw(uniform: float, temperature: float = 1.0, top_p: float = 1.0) -> tuple[int, float]:
    """Token and probability of one draw."""
    tokens, logprobs = sample(
        LOGITS, np.array([temperature], np.float32), np.array([top_p], np.float32), np.array([uniform])
    )
    return int(tokens[0]), math.exp(float(logprobs[0]))


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.59, 1), (0.61, 2), (1 - 2**-53, 2)])
def test_the_random_number_picks_its_share_of_the_distribution(uniform: float, token: int) -> None:
    """Shares [0, 0.5), [0.5, 0.6), [0.6, 1)."""
    assert draw(uniform) == (token, pytest.approx([0.5, 0.1, 0.4][token]))


def test_logprob_is_that_of_the_tempered_distribution() -> None:
    """Temperature 0.5 squares the weights: 25, 1, 16 of 42."""
    assert draw(0.0, temperature=0.5) == (0, pytest.approx(25 / 42))
    assert draw(0.999, temperature=0.5) == (2, pytest.approx(16 / 42))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.5, {0: 1.0}),
        (0.51, {0: 5 / 9, 2: 4 / 9}),
        (0.89, {0: 5 / 9, 2: 4 / 9}),
        (0.91, {0: 0.5, 1: 0.1, 2: 0.4}),
    ],
)
def test_nucleus_is_the_fewest_tokens_that_reach_top_p(top_p: float, kept: dict[int, float]) -> None:
    """Logprobs are those of the renormalised rest, and nothing outside is ever drawn."""
    drawn = dict(draw(u, top_p=top_p) for u in np.linspace(0, 0.999, 200))
    assert drawn == pytest.approx(kept)


def test_temperature_zero_is_greedy_with_the_untempered_logprob() -> None:
    """Whatever the random number, the most probable token."""
    assert {draw(u, temperature=0.0)[0] for u in (0.0, 0.55, 0.99)} == {0}
    assert draw(0.99, temperature=0.0)[1] == pytest.approx(0.5)


def test_each_sequence_has_its_own_settings() -> None:
    """Greedy, hot and narrow in one batch."""
    tokens, logprobs = sample(
        LOGITS.expand(3, 3), np.array([0, 0.5, 1], np.float32), np.array([1, 1, 0.5], np.float32), np.full(3, 0.99)
    )
    assert tokens.tolist() == [0, 2, 0]
    assert np.exp(logprobs).tolist() == pytest.approx([0.5, 16 / 42, 1.0])


def test_a_token_without_probability_is_never_drawn() -> None:
    """Not at either end of the random numbers."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for uniform in (0.0, 1 - 2**-53):
        tokens, _ = sample(logits, np.ones(1, np.float32), np.ones(1, np.float32), np.array([uniform]))
        assert tokens.tolist() == [1]


def test_random_numbers_are_uniform_and_depend_on_seed_and_position_alone() -> None:
    """Neighbouring seeds and positions share nothing; mean and spread are those of [0, 1)."""
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 50)
    positions = np.tile(np.arange(50, dtype=np.uint64), 200)
    drawn = uniforms(seeds, positions)
    assert np.unique(drawn).size == drawn.size
    assert 0 <= drawn.min() < drawn.max() < 1
    assert drawn.mean() == pytest.approx(0.5, abs=0.01)
    assert drawn.std() == pytest.approx(12**-0.5, abs=0.01)
    table = drawn.reshape(200, 50)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03
    assert uniforms(seeds[77:78], positions[77:78])[0] == drawn[77]
