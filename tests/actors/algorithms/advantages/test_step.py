"""Advantages over all groups of a step, by hand and against the origins' formulas written down independently."""

from typing import Any

import numpy as np
import pytest

from actors.algorithms.advantages import GroupRewards, compute_advantages, step_advantages, with_step_advantages
from schemas.config.actors import RewardConfig
from tests.actors.algorithms.advantages.test_group import config
from tests.actors.algorithms.test_batches import a_group

NAN = float("nan")
REWARDS = np.array([[1.0, 0.0, 0.5, NAN], [0.0, 0.0, 1.0, 1.0], [2.0, NAN, -1.0, 0.25]])
SCORED = ~np.isnan(REWARDS)


def computed(type_: str, **keys: Any) -> np.ndarray:
    """Of REWARDS."""
    return compute_advantages(REWARDS, config(type_, **keys))


def test_batch_std_keeps_the_group_mean() -> None:
    """[1, 0] and [4, 0]: means ½ and 2; all four have mean 1.25 and unbiased variance 10.75 ÷ 3."""
    found = compute_advantages(np.array([[1.0, 0.0], [4.0, 0.0]]), config("batch_std", eps=0.0))
    std = np.sqrt(10.75 / 3)
    np.testing.assert_allclose(found, np.array([[0.5, -0.5], [2.0, -2.0]]) / std, rtol=1e-12)


def test_reinforce_pp_divides_by_the_deviation_of_the_differences() -> None:
    """±½ and ±2: their mean is 0 and their unbiased variance (2 · ¼ + 2 · 4) ÷ 3."""
    found = compute_advantages(np.array([[1.0, 0.0], [4.0, 0.0]]), config("reinforce_pp", eps=0.0))
    np.testing.assert_allclose(found, np.array([[0.5, -0.5], [2.0, -2.0]]) / np.sqrt(8.5 / 3), rtol=1e-12)


@pytest.mark.parametrize("std_of", ["rewards", "advantages"])
def test_rloo_divides_by_the_deviation_over_the_batch_of_what_is_named(std_of: str) -> None:
    """ms-swift: of the raw rewards; TRL's normalize_advantages: of the advantages, whose mean is 0."""
    rewards = np.array([[1.0, 0.0, 0.5], [4.0, 0.0, 1.0]])
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / 2
    expected = (rewards - others) / ((rewards if std_of == "rewards" else rewards - others).std(ddof=1) + 1e-4)
    found = compute_advantages(rewards, config("rloo", scale="batch", std_of=std_of))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(("std", "ddof"), [("unbiased", 1), ("population", 0)])
def test_unscorable_completions_are_in_no_mean_and_no_deviation_of_the_batch(std: str, ddof: int) -> None:
    """As TRL has it with nanmean and nanstd; they themselves get 0."""
    differences = REWARDS - np.nanmean(REWARDS, axis=1, keepdims=True)
    for type_, of in (("batch_std", REWARDS), ("reinforce_pp", differences)):
        expected = differences / (np.nanstd(of, ddof=ddof) + 1e-4)
        np.testing.assert_allclose(computed(type_, std=std), np.where(SCORED, expected, 0.0), rtol=1e-12)


def gdpo(rewards_PFG: np.ndarray, weights_F: np.ndarray, eps: float) -> np.ndarray:
    """TRL's normalize_then_sum, (P, G): NaN where no function applied."""
    centred = rewards_PFG - np.nanmean(rewards_PFG, axis=2, keepdims=True)
    normalised = centred / (np.nanstd(rewards_PFG, axis=2, ddof=1, keepdims=True) + eps)
    sums = np.nansum(normalised * weights_F[:, None], axis=1)
    sums[np.isnan(rewards_PFG).all(axis=1)] = NAN
    return (sums - np.nanmean(sums)) / (np.nanstd(sums, ddof=1) + eps)


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_gdpo_normalises_each_function_then_the_weighted_sum(eps: float) -> None:
    """Against the formula above; one value of one function is None, and one completion is unscorable."""
    rewards_PFG = np.random.default_rng(3).normal(size=(3, 2, 5)) * np.array([1.0, 50.0])[:, None]
    rewards_PFG[0, 1, 2] = rewards_PFG[1, :, 3] = NAN
    weights_F = np.array([1.0, 0.5])
    found = compute_advantages(None, config("gdpo", eps=eps), rewards_PFG=rewards_PFG, weights_F=weights_F)
    expected = gdpo(rewards_PFG, weights_F, eps)
    np.testing.assert_allclose(found, np.nan_to_num(expected), rtol=1e-9)
    assert found[1, 3] == 0.0
    assert np.isnan(expected[1, 3])


def test_gdpo_with_none_as_zero_counts_an_unscorable_completion_with_sum_zero() -> None:
    """As ms-swift does: its reward is 0, so it is in mean and deviation of the sums and has an advantage of its own."""
    rewards_PFG = np.array([[[1.0, 0.0, NAN]], [[3.0, 3.0, 0.0]]])
    sums = np.array([np.sqrt(0.5), -np.sqrt(0.5), 0.0, 1 / np.sqrt(3), 1 / np.sqrt(3), -2 / np.sqrt(3)])
    expected = (sums - sums.mean()) / sums.std(ddof=1)
    found = compute_advantages(np.nan_to_num(rewards_PFG[:, 0]), config("gdpo"), rewards_PFG=rewards_PFG)
    np.testing.assert_allclose(found.ravel(), expected, atol=1e-6)


def test_a_function_that_is_the_same_for_the_whole_group_adds_nothing() -> None:
    """0.1 three times has a rounding error as its deviation; with eps 0 it must not become a signal."""
    rewards_PFG = np.array([[[0.1, 0.1, 0.1], [1.0, 0.0, 0.5]]])
    found = compute_advantages(None, config("gdpo", eps=0.0), rewards_PFG=rewards_PFG)
    np.testing.assert_allclose(found, [[1.0, -1.0, 0.0]], atol=1e-12)


@pytest.mark.parametrize("type_", ["batch_std", "rloo", "reinforce_pp", "gdpo"])
def test_a_group_is_what_came_as_one_wherever_it_stands(type_: str) -> None:
    """Groups of different sizes in another order have the same advantages, each its own."""
    keys = {"scale": "batch"} if type_ == "rloo" else {}
    rewards = [np.array([1.0, 0.0]), np.array([0.5, 0.25, 2.0]), np.array([3.0])]
    groups = [GroupRewards(r, np.ones(r.size, np.int64), r[None], np.ones(1)) for r in rewards]
    forwards = step_advantages(groups, config(type_, **keys))
    backwards = step_advantages(groups[::-1], config(type_, **keys))[::-1]
    for there, back, one in zip(forwards, backwards, rewards, strict=True):
        np.testing.assert_allclose(there, back, rtol=1e-12)
        assert there.size == one.size
    assert forwards[2].tolist() == pytest.approx([0.0])  # a group of one


@pytest.mark.parametrize("type_", ["batch_std", "rloo", "reinforce_pp", "gdpo"])
@pytest.mark.parametrize("rewards", [[[0.1, 0.1, 0.1]], [[NAN, NAN]], [[5.0]], [[2.0], [1.0]]])
def test_a_step_without_a_difference_inside_a_group_has_zeros(type_: str, rewards: list[list[float]]) -> None:
    """Whatever it is divided by, eps 0 included."""
    keys = {"scale": "batch", "eps": 0.0} if type_ != "batch_std" and type_ != "gdpo" else {"eps": 0.0}
    rewards_PG = np.array(rewards)
    found = compute_advantages(rewards_PG, config(type_, **keys), rewards_PFG=rewards_PG[:, None])
    np.testing.assert_array_equal(found, np.zeros_like(rewards_PG))


def test_groups_of_a_step_get_the_advantages_of_their_shaped_and_weighted_rewards() -> None:
    """What the packer does: gdpo over two groups, the second function clipped and of weight 2."""
    functions = [{"path": "exact_match"}, {"path": "exact_match", "weight": 2.0, "clip": 1.0}]
    reward = RewardConfig.model_validate({"functions": functions, "advantage": {"type": "gdpo"}})
    rewards_PFG = np.array([[[1.0, 0.0, 0.5], [9.0, 0.5, 0.0]], [[0.0, 0.0, 1.0], [0.0, -8.0, 1.0]]])
    groups = [
        a_group(ordinal, [1, 2, 1]).model_copy(
            update={"reward_names": ["f", "g"], "rewards_FG": rewards_FG, "rewards_G": np.arange(3.0)}
        )
        for ordinal, rewards_FG in enumerate(rewards_PFG)
    ]
    clipped = rewards_PFG.clip([[-9.0], [-1.0]], [[9.0], [1.0]])
    expected = gdpo(clipped, np.array([1.0, 2.0]), 1e-8).astype(np.float32)
    found = with_step_advantages(groups, reward)
    np.testing.assert_allclose([group.advantages_G for group in found], expected, rtol=1e-6)
    assert found[0].advantages_G.dtype == np.float32
    assert not np.array_equal(groups[0].advantages_G, found[0].advantages_G)


def test_groups_of_other_levels_are_left_as_they_are() -> None:
    """Their advantages came with them."""
    reward = RewardConfig.model_validate({"functions": [{"path": "exact_match"}]})
    groups = [a_group(0, [1, 2])]
    assert with_step_advantages(groups, reward)[0] is groups[0]
