"""Sampling as a function of logits and one random number, with numbers to check by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.embedded.sampling import Distribution, Drawn, processed_logprobs, sample, uniforms

LOGITS = torch.tensor([[math.log(5), math.log(1), math.log(4)]])
"""Probabilities 0.5, 0.1, 0.4."""


def distribution(*rows: dict[str, float], **changes: Any) -> Distribution:
    """One row of settings per sequence."""
    names: dict[str, tuple[float, Any]] = {
        "temperature": (1.0, np.float32),
        "top_p": (1.0, np.float32),
        "top_k": (0, np.int64),
        "min_p": (0.0, np.float32),
    }
    return Distribution(*(np.array([row.get(n, v) for row in rows], t) for n, (v, t) in names.items()), **changes)


def draw(uniform: float, **settings: float) -> tuple[int, float]:
    """Token and probability of one draw."""
    drawn = sample(LOGITS, distribution(settings), np.array([uniform]))
    return int(drawn.tokens_B[0]), math.exp(float(drawn.logprobs_B[0]))


def probabilities(logits: list[float], bias: dict[int, float] | None = None, **settings: float) -> list[float]:
    """Of one sequence, after all settings."""
    entries = None
    if bias:
        entries = (np.zeros(len(bias), np.int64), np.array(list(bias)), np.array(list(bias.values()), np.float32))
    log_p = processed_logprobs(torch.tensor([logits]), distribution(settings, bias=entries))
    return log_p[0].exp().tolist()  # type: ignore[no-any-return]


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
    rows = ({"temperature": 0}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.9}, {})
    drawn = sample(LOGITS.expand(6, 3), distribution(*rows), np.full(6, 0.99))
    assert drawn.tokens_B.tolist() == [0, 2, 0, 2, 0, 2]
    assert np.exp(drawn.logprobs_B).tolist() == pytest.approx([0.5, 16 / 42, 1.0, 4 / 9, 1.0, 0.4])


LOG = [math.log(weight) for weight in (8.0, 4.0, 2.0, 1.0, 1.0)]
"""Probabilities 8/16, 4/16, 2/16, 1/16, 1/16."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_k": 3}, [8 / 14, 4 / 14, 2 / 14, 0, 0]),
        ({"top_k": 4}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),  # the fourth and the fifth are equals: both stay
        ({"top_k": 99}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        ({"min_p": 0.49}, [8 / 12, 4 / 12, 0, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.7}, [8 / 12, 4 / 12, 0, 0, 0]),
        # top_k first: of 8, 4, 2 the first two are 12/14 > 0.8; top_p alone would have kept three (0.75 < 0.8)
        ({"top_k": 3, "top_p": 0.8}, [8 / 12, 4 / 12, 0, 0, 0]),
        # min_p after the temperature: √8 : √4 : √2 : 1 : 1 is 2.83 : 2 : 1.41 : 1 : 1, and 1.41 ≥ 0.49 · 2.83
        (
            {"min_p": 0.49, "temperature": 2.0},
            [w / (8**0.5 + 4**0.5 + 2**0.5) for w in (8**0.5, 4**0.5, 2**0.5, 0, 0)],
        ),
        # the bias before the temperature: 1 · 2⁵ = 32, and at temperature ½ it is 32² = 1024 beside 8², 4², 2², 1
        (
            {"bias": {4: 5 * math.log(2)}, "temperature": 0.5},
            [w / 1109 for w in (64, 16, 4, 1, 1024)],
        ),
        ({"bias": {0: -100.0, 1: -100.0}}, [0, 0, 0.5, 0.25, 0.25]),
    ],
    ids=str,
)
def test_settings_apply_one_after_the_other(settings: dict[str, Any], expected: list[float]) -> None:
    """Bias, temperature, min_p, top_k, top_p, each to what the one before has left."""
    assert probabilities(LOG, **settings) == pytest.approx(expected, abs=1e-6)


def test_greedy_sees_the_bias() -> None:
    """And nothing else; the logprob is that of the biased distribution."""
    one = (np.array([0]), np.array([1]), np.array([math.log(9)], np.float32))
    drawn = sample(LOGITS, distribution({"temperature": 0}, bias=one), np.array([0.0]))
    assert (drawn.tokens_B.tolist(), np.exp(drawn.logprobs_B).tolist()) == ([1], pytest.approx([0.5]))


def test_the_most_probable_tokens_come_with_the_drawn_one() -> None:
    """The best first, as many as asked for, no more than there are."""
    drawn: Drawn = sample(LOGITS, distribution({}), np.array([0.55]), 2)
    assert (drawn.tokens_B.tolist(), drawn.top_tokens_BK.tolist()) == ([1], [[0, 2]])
    assert np.exp(drawn.top_logprobs_BK[0]).tolist() == pytest.approx([0.5, 0.4])
    assert sample(LOGITS, distribution({}), np.array([0.55]), 20).top_tokens_BK.tolist() == [[0, 2, 1]]
    assert sample(LOGITS, distribution({}), np.array([0.55])).top_tokens_BK.size == 0


def test_neighbours_in_a_batch_leave_a_wide_distribution_whole() -> None:
    """Of 5 000 tokens none is cut by top_p 1, though the sums of their probabilities round."""
    logits = torch.linspace(0, -8, 5000).expand(2, -1)
    log_p = processed_logprobs(logits, distribution({}, {"top_p": 0.5}))
    assert torch.isfinite(log_p[0]).all()
    assert not torch.isfinite(log_p[1]).all()


def test_a_token_without_probability_is_never_drawn() -> None:
    """Not at either end of the random numbers."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for uniform in (0.0, 1 - 2**-53):
        assert sample(logits, distribution({}), np.array([uniform])).tokens_B.tolist() == [1]


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


def test_penalties_change_logits_after_the_bias() -> None:
    """Logits 2, -2, 0.5: the bias makes 3; doubled penalties make 1.5 and -4; then 1 is subtracted from the last."""

    def entries(tokens: list[int], values: list[float]) -> Any:
        return np.zeros(len(tokens), np.int64), np.array(tokens), np.array(values, np.float32)

    given = distribution(
        {"temperature": 0.5},
        bias=entries([0], [1.0]),
        repetition=entries([0, 1], [2.0, 2.0]),
        penalties=entries([2], [1.0]),
    )
    found = processed_logprobs(torch.tensor([[2.0, -2.0, 0.5]]), given)[0]
    expected = (torch.tensor([1.5, -4.0, -0.5]) / 0.5).log_softmax(-1)
    assert found.tolist() == pytest.approx(expected.tolist())
