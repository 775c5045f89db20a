"""Advantages per token, by hand."""

import numpy as np
import pytest

from actors.algorithms.advantages import compute_token_advantages, token_advantages
from actors.algorithms.advantages.tokens import StepRewards, gae
from tests.actors.algorithms.advantages.test_group import config

NAN = float("nan")
EXACT = {"std": "population", "eps": 0.0}


def process(steps: list[StepRewards], lengths: list[int], **keys: object) -> list[float]:
    """Of one group."""
    offsets = np.cumsum([0, *lengths])
    mask_N = np.ones(offsets[-1], np.uint8)
    none = np.full(len(lengths), NAN)
    return token_advantages(none, offsets, mask_N, config("process", **keys), steps).tolist()


def test_a_token_has_the_sum_of_the_steps_that_end_at_it_or_later() -> None:
    """Step rewards 1, 0 and 0, 1 have z-scores 1, −1 and −1, 1: the first step's tokens have both, the last's one."""
    assert process([[(2, 1.0), (3, 0.0)], [(1, 0.0), (3, 1.0)]], [3, 3], **EXACT) == [0, 0, -1, 0, 1, 1]


def test_tokens_behind_the_last_step_and_completions_without_steps_have_zero() -> None:
    """The second has no step: it is unscorable and in no mean."""
    assert process([[(1, 1.0), (2, -1.0)], [], [(2, 3.0), (2, 1.0)]], [3, 2, 2], **EXACT) == pytest.approx(
        [-2 / 2**0.5, -2 / 2**0.5, 0, 0, 0, 2 / 2**0.5, 2 / 2**0.5]
    )


def test_step_rewards_are_normalised_over_all_steps_of_the_group() -> None:
    """Unbiased with eps, as configured: rewards 1, 2, 6 have mean 3 and variance 14 ÷ 2."""
    std = np.sqrt(7.0) + 1e-4
    found = process([[(1, 1.0), (2, 2.0)], [(1, 6.0)]], [2, 1])
    assert found == pytest.approx([-3 / std, -1 / std, 3 / std], rel=1e-12)


@pytest.mark.parametrize("steps", [[[], []], [[(1, 5.0)], []], [[(1, 0.1), (2, 0.1)], [(1, 0.1)]]])
def test_fewer_than_two_steps_or_equal_ones_give_zeros(steps: list[StepRewards]) -> None:
    """There is nothing to compare."""
    assert process(steps, [2, 2], std="unbiased", eps=0.0) == [0.0] * 4


def test_gae_without_values_is_the_discounted_sum_of_what_comes() -> None:
    """γλ = ½: ¼, ½, 1; with a reward of 4 at the first token besides, 4¼."""
    assert gae(np.array([0.0, 0.0, 1.0]), 0.5, 1.0).tolist() == [0.25, 0.5, 1.0]
    assert gae(np.array([4.0, 0.0, 1.0]), 1.0, 0.5).tolist() == [4.25, 0.5, 1.0]
    assert gae(np.zeros(0), 1.0, 1.0).tolist() == []


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.5), (0.99, 0.0)])
def test_gae_with_values_is_the_weighted_sum_of_temporal_differences(discount: float, gae_lambda: float) -> None:
    """A_t = Σ (γλ)^k δ_{t+k}, written down as a matrix."""
    generator = np.random.default_rng(1)
    rewards, values = generator.normal(size=6), generator.normal(size=6)
    deltas = rewards + discount * np.append(values[1:], 0.0) - values
    powers = np.subtract.outer(np.arange(6), np.arange(6)) * -1
    weights = np.where(powers >= 0, (discount * gae_lambda) ** np.maximum(powers, 0.0), 0.0)
    np.testing.assert_allclose(gae(rewards, discount, gae_lambda, values), weights @ deltas, rtol=1e-12)


def test_gae_steps_over_tokens_that_are_not_in_the_loss() -> None:
    """Mask 1 0 1 0: two tokens in the loss, the reward at the second; a step that ends with token 2 counts for it."""
    arguments = np.array([2.0]), np.array([0, 4]), np.array([1, 0, 1, 0], np.uint8), config("gae", discount=0.5)
    assert token_advantages(*arguments, None).tolist() == [1.0, 0.0, 2.0, 0.0]
    assert token_advantages(*arguments, [[(2, 8.0), (3, 4.0)]]).tolist() == [11.0, 0.0, 6.0, 0.0]


def test_gae_of_unscorable_and_masked_completions_is_zero() -> None:
    """The first has no reward, the second no token in the loss, the third both."""
    mask_N = np.array([1, 0, 1], np.uint8)
    found = token_advantages(np.array([NAN, 5.0, 7.0]), np.array([0, 1, 2, 3]), mask_N, config("gae"), None)
    assert found.tolist() == [0.0, 0.0, 7.0]


@pytest.mark.parametrize(
    ("reward_norm", "expected"),
    [("none", [3.0, 1.0]), ("mean", [1.0, -1.0]), ("zscore", [1 / (2**0.5 + 1e-5), -1 / (2**0.5 + 1e-5)])],
)
def test_gae_takes_rewards_relative_to_the_group_when_told_to(reward_norm: str, expected: list[float]) -> None:
    """3 and 1, and one that is unscorable: mean 2, unbiased deviation √2."""
    found = compute_token_advantages(
        np.array([[3.0, NAN, 1.0]]), config("gae", reward_norm=reward_norm), np.array([[2, 1, 1]])
    )
    np.testing.assert_allclose(found, [[[expected[0]] * 2, [0, 0], [expected[1], 0]]], rtol=1e-12)


def test_the_door_for_plain_arrays_fills_up_with_zeros() -> None:
    """Two groups of two completions; T is that of the longest."""
    steps = [[[(1, 1.0)], [(2, 0.0)]], [[(3, 2.0)], []]]
    lengths = np.array([[1, 2], [3, 1]])
    found = compute_token_advantages(np.zeros((2, 2)), config("process", **EXACT), lengths, steps)
    assert found.tolist() == [[[1, 0, 0], [-1, -1, 0]], [[0, 0, 0], [0, 0, 0]]]


def test_the_door_for_tokens_says_what_is_missing() -> None:
    """And which door a type belongs to."""
    arrays = np.zeros((1, 2)), np.ones((1, 2), np.int64)
    with pytest.raises(ValueError, match="process needs steps"):
        compute_token_advantages(arrays[0], config("process"), arrays[1])
    with pytest.raises(ValueError, match="mean has an advantage per completion: use compute_advantages"):
        compute_token_advantages(arrays[0], config("mean"), arrays[1])
