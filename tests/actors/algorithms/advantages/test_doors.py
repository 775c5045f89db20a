"""The door for plain arrays does what reward actor and packer do."""

from typing import Any

import numpy as np
import pytest

from actors.algorithms.advantages import compute_advantages
from tests.actors.algorithms.advantages.test_group import SIMPLE, config

NAN = float("nan")


@pytest.mark.parametrize("type_", [*SIMPLE, "gdpo"])
def test_rows_are_groups_and_missing_completions_are_filled_up_with_nan(type_: str) -> None:
    """A group of two with a NaN behind it has the advantages of the two, and 0."""
    filled, lengths = np.array([[1.0, 0.0, NAN], [0.0, 3.0, 1.0]]), np.array([[1, 2, 9], [3, 4, 5]])
    found = compute_advantages(filled, config(type_), lengths_PG=lengths, rewards_PFG=filled[:, None])
    assert found.dtype == np.float64
    assert found.shape == (2, 3)
    assert found[0, 2] == 0.0
    assert found[0, 0] > 0 > found[0, 1]


def test_rewards_of_functions_are_summed_with_their_weights() -> None:
    """1 + 2 · ½ = 2 and 0 + 2 · 1 = 2: equal, so nothing; with weight 1 they are 1.5 and 1."""
    rewards_PFG = np.array([[[1.0, 0.0], [0.5, 1.0]]])
    two = compute_advantages(None, config("mean"), rewards_PFG=rewards_PFG, weights_F=np.array([1.0, 2.0]))
    assert two.tolist() == [[0.0, 0.0]]
    assert compute_advantages(None, config("mean"), rewards_PFG=rewards_PFG).tolist() == [[0.25, -0.25]]


def test_a_custom_function_is_called_for_one_group_at_a_time() -> None:
    """P = 1, as the reward actor calls it."""
    shapes = []

    def function(rewards_PG: Any, lengths_PG: Any) -> Any:
        shapes.append(rewards_PG.shape)
        return rewards_PG + lengths_PG

    rewards, lengths = np.array([[1.0, 2.0, 3.0], [4.0, NAN, 6.0]]), np.full((2, 3), 10)
    found = compute_advantages(rewards, config("custom", path="mine:f"), lengths_PG=lengths, function=function)
    assert found.tolist() == [[11.0, 12.0, 13.0], [14.0, 0.0, 16.0]]
    assert shapes == [(1, 3), (1, 2)]


@pytest.mark.parametrize(
    ("type_", "keys", "words"),
    [
        ("gae", {}, "gae has an advantage per token: use compute_token_advantages"),
        ("length_weighted_mean", {}, "length_weighted_mean needs lengths_PG"),
        ("custom", {"path": "mine:f"}, "custom needs lengths_PG and function"),
        ("gdpo", {}, "gdpo needs rewards_PFG"),
    ],
)
def test_what_a_type_needs_is_named(type_: str, keys: dict[str, Any], words: str) -> None:
    """Rewards alone are not enough for it."""
    with pytest.raises(ValueError, match=words):
        compute_advantages(np.zeros((1, 2)), config(type_, **keys))


def test_without_any_rewards_there_is_nothing_to_compute() -> None:
    """Either of the two will do."""
    with pytest.raises(ValueError, match="mean needs rewards_PG or rewards_PFG"):
        compute_advantages(None, config("mean"))
