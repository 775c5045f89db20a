"""Rewards to advantages, by hand (ALGORITHMS 2)."""

import numpy as np
import pytest

from actors.algorithms.advantages import combine_rewards, compute_advantages
from schemas.config.advantages import MeanAdvantageConfig, ZScoreAdvantageConfig

NAN = float("nan")
MEAN = MeanAdvantageConfig()


def advantages(rewards: list[float], config: MeanAdvantageConfig | ZScoreAdvantageConfig = MEAN) -> list[float]:
    """As plain numbers."""
    return compute_advantages(np.array(rewards), config).tolist()


def test_mean_centres_the_rewards_of_a_group() -> None:
    """One of four is right."""
    assert advantages([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    ("std", "eps", "expected"),
    [
        ("unbiased", 0.0, [1.5, -0.5, -0.5, -0.5]),
        ("unbiased", 0.5, [0.75, -0.25, -0.25, -0.25]),
        ("unbiased", 1e-4, [1.49970006, -0.49990002, -0.49990002, -0.49990002]),
        ("population", 0.0, [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ("population", 1e-8, [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
    ],
)
def test_zscore_divides_by_the_named_deviation(std: str, eps: float, expected: list[float]) -> None:
    """Variance of [1, 0, 0, 0]: 1/4 unbiased, 3/16 population."""
    assert advantages([1, 0, 0, 0], ZScoreAdvantageConfig(std=std, eps=eps)) == pytest.approx(expected, abs=1e-6)


def test_zscore_defaults_are_those_of_trl_and_ms_swift() -> None:
    """Unbiased, 1e-4."""
    assert (ZScoreAdvantageConfig().std, ZScoreAdvantageConfig().eps) == ("unbiased", 1e-4)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("std", ["unbiased", "population"])
def test_equal_rewards_give_exactly_zero_however_small_eps_is(std: str, eps: float) -> None:
    """0.1 has no exact mean in floating point; the rounding must not be blown up by 1 ÷ eps."""
    assert advantages([0.1] * 3, ZScoreAdvantageConfig(std=std, eps=eps)) == [0.0] * 3


@pytest.mark.parametrize("config", [MEAN, ZScoreAdvantageConfig(eps=0.0)])
def test_unscorable_completions_get_zero_and_stay_out_of_mean_and_deviation(
    config: MeanAdvantageConfig | ZScoreAdvantageConfig,
) -> None:
    """[2, –, 0] is centred like [2, 0]; with the – as 0 it would be [4/3, −2/3, −2/3]."""
    scale = 1.0 if config is MEAN else 1 / np.sqrt(2)
    assert advantages([2, NAN, 0], config) == pytest.approx([scale, 0.0, -scale])


@pytest.mark.parametrize("config", [MEAN, ZScoreAdvantageConfig(eps=0.0)])
@pytest.mark.parametrize("rewards", [[5.0], [NAN, NAN], [NAN, 3.0, NAN]])
def test_fewer_than_two_scored_completions_give_zeros(
    rewards: list[float], config: MeanAdvantageConfig | ZScoreAdvantageConfig
) -> None:
    """There is nothing to compare with, and nothing to divide by."""
    assert advantages(rewards, config) == [0.0] * len(rewards)


def test_advantages_travel_as_float32() -> None:
    """The type of the wire."""
    assert compute_advantages(np.array([1.0, 0.0]), MEAN).dtype == np.float32


def test_rewards_add_up_with_their_weights() -> None:
    """2 · 1 − 1 · 0.5 and 2 · 0 − 1 · 1."""
    combined = combine_rewards(np.array([[1.0, 0.0], [0.5, 1.0]]), np.array([2.0, -1.0]))
    assert combined.tolist() == [1.5, -1.0]


def test_a_function_that_returned_none_is_left_out_of_the_sum() -> None:
    """It counts as nothing, not as 0 times its weight taken off a mean; where none applied, there is no reward."""
    rewards_FG = np.array([[1.0, NAN, NAN], [NAN, 0.25, NAN]])
    combined = combine_rewards(rewards_FG, np.array([1.0, 2.0]))
    assert combined[:2].tolist() == [1.0, 0.5]
    assert np.isnan(combined[2])


def test_a_function_of_weight_zero_only_measures_but_makes_a_completion_scorable() -> None:
    """Its value adds nothing."""
    assert combine_rewards(np.array([[7.0]]), np.array([0.0])).tolist() == [0.0]
