"""Advantages inside one group, by hand (ALGORITHMS 2)."""

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from actors.algorithms.advantages import GroupRewards, group_advantages
from schemas.config.advantages import AdvantageConfig, ZScoreAdvantageConfig

NAN = float("nan")
SIMPLE = ["mean", "length_weighted_mean", "zscore", "batch_std", "rloo", "reinforce_pp", "max_rl"]


def config(type_: str, **keys: Any) -> AdvantageConfig:
    """One of the union."""
    return TypeAdapter(AdvantageConfig).validate_python({"type": type_, **keys})


def advantages(rewards: list[float], type_: str = "mean", lengths: list[int] | None = None, **keys: Any) -> list[float]:
    """Of one group, as plain numbers."""
    group = GroupRewards(np.array(rewards, np.float64), np.array(lengths or [1] * len(rewards)))
    return group_advantages(group, config(type_, **keys)).tolist()


@pytest.mark.parametrize(
    ("type_", "keys", "expected"),
    [
        ("mean", {}, [0.75, -0.25, -0.25, -0.25]),
        ("max_rl", {}, [3.0, -1.0, -1.0, -1.0]),
        ("max_rl", {"eps": 0.25}, [1.5, -0.5, -0.5, -0.5]),
        ("rloo", {}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo", {"scale": "group", "eps": 0.0}, [2.0, -2 / 3, -2 / 3, -2 / 3]),
        ("rloo", {"scale": "group", "std_of": "advantages", "eps": 0.0}, [1.5, -0.5, -0.5, -0.5]),
        ("reinforce_pp", {"scale": "none"}, [0.75, -0.25, -0.25, -0.25]),
        ("reinforce_pp", {"scale": "group", "eps": 0.0}, [1.5, -0.5, -0.5, -0.5]),
        ("zscore", {"eps": 0.0}, [1.5, -0.5, -0.5, -0.5]),
        ("zscore", {"eps": 0.5}, [0.75, -0.25, -0.25, -0.25]),
        ("zscore", {}, [1.4997000600, -0.4999000200, -0.4999000200, -0.4999000200]),
        ("zscore", {"std": "population", "eps": 1e-8}, [1.7320507, -0.5773502, -0.5773502, -0.5773502]),
    ],
)
def test_one_right_answer_of_four(type_: str, keys: dict[str, Any], expected: list[float]) -> None:
    """Variance of [1, 0, 0, 0]: 1/4 unbiased, 3/16 population; mean of the others of the first: 0, else 1/3."""
    assert advantages([1, 0, 0, 0], type_, **keys) == pytest.approx(expected, abs=1e-7)


def test_length_weighted_mean_is_that_of_all_tokens() -> None:
    """(1·10 + 0.5·20 + 0.8·10) ÷ 40 = 0.7."""
    assert advantages([1, 0.5, 0.8], "length_weighted_mean", [10, 20, 10]) == pytest.approx([0.3, -0.2, 0.1])


def test_max_rl_is_zero_where_the_mean_is_not_positive() -> None:
    """[1, −3] has mean −1: dividing by it would turn the signs."""
    assert advantages([1, -3], "max_rl") == [0.0, 0.0]
    assert advantages([1, -1], "max_rl") == [0.0, 0.0]


def test_zscore_defaults_are_those_of_trl_and_ms_swift() -> None:
    """Unbiased, 1e-4."""
    assert (ZScoreAdvantageConfig().std, ZScoreAdvantageConfig().eps) == ("unbiased", 1e-4)


@pytest.mark.parametrize("type_", SIMPLE)
def test_equal_rewards_give_exactly_zero_however_small_eps_is(type_: str) -> None:
    """0.1 has no exact mean in floating point; the rounding must not be blown up by 1 ÷ eps."""
    keys = {"eps": 0.0} if type_ in ("zscore", "rloo", "reinforce_pp") else {}
    scale = {"scale": "group"} if type_ in ("rloo", "reinforce_pp") else {}
    assert advantages([0.1] * 3, type_, [1, 2, 3], **keys, **scale) == [0.0] * 3


@pytest.mark.parametrize("type_", SIMPLE)
def test_unscorable_completions_get_zero_and_stay_out_of_mean_and_deviation(type_: str) -> None:
    """[2, –, 0] is treated like [2, 0], and the – has 0."""
    with_none, without = advantages([2, NAN, 0], type_, [1, 5, 2]), advantages([2, 0], type_, [1, 2])
    assert with_none == [without[0], 0.0, without[1]]
    assert without[0] > 0 > without[1]


@pytest.mark.parametrize("type_", SIMPLE)
@pytest.mark.parametrize("rewards", [[5.0], [NAN, NAN], [NAN, 3.0, NAN]])
def test_fewer_than_two_scored_completions_give_zeros(rewards: list[float], type_: str) -> None:
    """There is nothing to compare with, and nothing to divide by."""
    assert advantages(rewards, type_) == [0.0] * len(rewards)


def custom(values: Any, rewards: list[float]) -> list[float]:
    """With a function that returns `values`, or what they make of the arrays."""
    function = values if callable(values) else lambda rewards_PG, lengths_PG: values
    group = GroupRewards(np.array(rewards, np.float64), np.arange(len(rewards)) + 1)
    return group_advantages(group, config("custom", path="mine:f"), function).tolist()


def test_a_custom_function_gets_the_scored_completions_of_one_group() -> None:
    """Rewards (1, 2) and lengths (1, 2), of which it makes reward × length."""
    seen = []

    def function(rewards_PG: Any, lengths_PG: Any) -> Any:
        seen.append((rewards_PG.tolist(), lengths_PG.tolist()))
        return rewards_PG * lengths_PG

    assert custom(function, [4.0, NAN, 5.0]) == [4.0, 0.0, 15.0]
    assert seen == [([[4.0, 5.0]], [[1, 3]])]
    assert custom(function, [1.0, 1.0]) == [1.0, 2.0]  # equal rewards may differ in what it makes of them


@pytest.mark.parametrize(
    ("values", "words"),
    [([1.0, 2.0], r"returned an array \(2,\), expected \(1, 2\)"), ([[1.0, NAN]], "returned nan, expected finite")],
)
def test_a_custom_function_that_returns_something_else_is_refused(values: Any, words: str) -> None:
    """Nothing is trained on a shape that was guessed."""
    with pytest.raises(ValueError, match=words):
        custom(values, [0.0, 1.0])
