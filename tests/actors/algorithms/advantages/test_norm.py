"""AReaL's normalisation: of rewards over groups, and of advantages over the loss tokens of a step, by hand."""

from math import sqrt
from typing import Any

import numpy as np
import pytest

from actors.algorithms.advantages import compute_advantages, with_step_advantages
from actors.algorithms.advantages.norm import merged, normalised, normalised_over_ranks
from actors.algorithms.batches import build_batches
from schemas.config.actors import RewardConfig
from schemas.config.advantages import NormConfig
from schemas.messages import ScoredGroup, StepBatch
from tests.actors.algorithms.advantages.test_group import config
from tests.actors.algorithms.test_batches import HEADER, a_group, samples

NAN = float("nan")


def reward_config(**adv_norm: Any) -> RewardConfig:
    """A reward section with `adv_norm`."""
    return RewardConfig.model_validate({"functions": [{"path": "exact_match"}], "adv_norm": {"eps": 0.0} | adv_norm})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # mean 2, squares 1 + 4 + 9 + 0 = 14, unbiased variance 14 / 3
        ({}, [[-1 / sqrt(14 / 3), -2 / sqrt(14 / 3)], [3 / sqrt(14 / 3), 0.0]]),
        ({"std_unbiased": False}, [[-1 / sqrt(3.5), -2 / sqrt(3.5)], [3 / sqrt(3.5), 0.0]]),
        ({"std_level": "none"}, [[-1.0, -2.0], [3.0, 0.0]]),
        # no mean: 1 + 0 + 25 + 4 = 30
        ({"mean_level": "none"}, [[1 / sqrt(10), 0.0], [5 / sqrt(10), 2 / sqrt(10)]]),
        ({"mean_level": "none", "std_level": "none"}, [[1.0, 0.0], [5.0, 2.0]]),
        ({"mean_level": "none", "std_level": "group"}, [[1.0, 0.0], [5 / sqrt(29), 2 / sqrt(29)]]),
        ({"mean_level": "group", "std_level": "none"}, [[0.5, -0.5], [1.5, -1.5]]),
        # ±½ and ±1.5: squares ½ and 4.5
        ({"mean_level": "group", "std_level": "group"}, [[sqrt(0.5), -sqrt(0.5)], [sqrt(0.5), -sqrt(0.5)]]),
        ({"mean_level": "group"}, [[0.5 / sqrt(5 / 3), -0.5 / sqrt(5 / 3)], [1.5 / sqrt(5 / 3), -1.5 / sqrt(5 / 3)]]),
        # the mean of the other three: 7/3, 8/3, 1, 2
        ({"mean_leave1out": True, "std_level": "none"}, [[-4 / 3, -8 / 3], [4.0, 0.0]]),
        ({"mean_level": "group", "mean_leave1out": True, "std_level": "none"}, [[1.0, -1.0], [3.0, -3.0]]),
    ],
)
def test_rewards_are_normalised_with_mean_and_deviation_of_their_levels(
    keys: dict[str, Any], expected: list[list[float]]
) -> None:
    """[1, 0] and [5, 2], eps 0."""
    found = compute_advantages(np.array([[1.0, 0.0], [5.0, 2.0]]), config("norm", **{"eps": 0.0} | keys))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_the_defaults_are_those_of_the_origin() -> None:
    """Mean and unbiased deviation over the batch, 1e-5."""
    assert NormConfig().model_dump() == {
        "mean_level": "batch", "mean_leave1out": False, "std_level": "batch", "std_unbiased": True, "eps": 1e-5
    }  # fmt: skip
    found = compute_advantages(np.array([[3.0, 1.0]]), config("norm"))
    np.testing.assert_allclose(found, [[1 / (sqrt(2) + 1e-5), -1 / (sqrt(2) + 1e-5)]], rtol=1e-12)


def test_unscorable_completions_are_in_no_norm() -> None:
    """[1, –, 3] and [–, –]: mean 2, deviation √2; the others have 0."""
    rewards = np.array([[1.0, NAN, 3.0], [NAN, NAN, NAN]])
    found = compute_advantages(rewards, config("norm", eps=0.0))
    np.testing.assert_allclose(found, [[-sqrt(0.5), 0.0, sqrt(0.5)], [0.0, 0.0, 0.0]], rtol=1e-12)


def test_a_single_value_is_divided_by_one_and_equal_ones_are_exactly_zero() -> None:
    """As in the origin, where the deviation of one value is 1; 0.1 has no exact mean."""
    groups = np.array([0, 1, 1, 1])
    found = normalised(np.array([5.0, 0.1, 0.1, 0.1]), groups, NormConfig(mean_level="group", std_level="group"))
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0]
    alone = normalised(np.array([5.0]), np.array([0]), NormConfig(mean_level="none", eps=0.0))
    assert alone.tolist() == [5.0]
    assert normalised(np.zeros(0), np.zeros(0, np.int64), NormConfig()).size == 0


def two_groups(*rewards: list[float]) -> list[ScoredGroup]:
    """Completions of 3 and 1 tokens, then of 2 and 2, the first of them outside the loss."""
    groups = [a_group(0, [3, 1]), a_group(1, [2, 2], masked=1)]
    return [
        group.model_copy(update={"advantages_G": np.array(values, np.float32), "rewards_G": np.array(values)})
        for group, values in zip(groups, rewards, strict=True)
    ]


def test_adv_norm_is_over_the_loss_tokens_of_the_step() -> None:
    """1 three times, −1 once, then 2 once (its other token is outside the loss) and −2 twice: 7 tokens, mean 0."""
    found = with_step_advantages(two_groups([1.0, -1.0], [2.0, -2.0]), reward_config())
    mean = (3 * 1 - 1 + 2 - 2 * 2) / 7
    squares = 3 * (1 - mean) ** 2 + (-1 - mean) ** 2 + (2 - mean) ** 2 + 2 * (-2 - mean) ** 2
    std = sqrt(squares / 6)
    np.testing.assert_allclose(found[0].token_advantages, np.array([1, 1, 1, -1]) / std, rtol=1e-6)
    np.testing.assert_allclose(found[1].token_advantages, np.array([0, 2, -2, -2]) / std, rtol=1e-6)
    assert found[0].token_advantages.dtype == np.float32


def test_adv_norm_takes_advantages_of_tokens_as_they_are() -> None:
    """Of the group's loss tokens 2, 3 and 4 the mean is 3 and the deviation 1."""
    (group,) = (a_group(0, [2, 2], masked=1),)
    group = group.model_copy(update={"token_advantages": np.array([9, 2, 3, 4], np.float32)})
    (found,) = with_step_advantages([group], reward_config(mean_level="group", std_level="group"))
    assert found.token_advantages.tolist() == [0.0, -1.0, 0.0, 1.0]


def test_adv_norm_leaves_unscorable_completions_at_zero() -> None:
    """Three tokens of 1 and one of −1 in the first group; the second has no reward, whatever its tokens."""
    groups = two_groups([1.0, -1.0], [NAN, NAN])
    groups[1] = groups[1].model_copy(update={"advantages_G": np.zeros(2, np.float32)})
    found = with_step_advantages(groups, reward_config())
    std = sqrt((3 * 0.5**2 + 1.5**2) / 3)
    np.testing.assert_allclose(found[0].token_advantages, np.array([0.5, 0.5, 0.5, -1.5]) / std, rtol=1e-6)
    assert found[1].token_advantages.tolist() == [0.0] * 4


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_adv_norm_is_the_same_on_any_number_of_ranks(num_minibatches: int) -> None:
    """The norm is of the step, not of a rank or a minibatch: every sample has the same bits on 1, 2 and 4 ranks."""
    groups = [a_group(ordinal, [3, 1, 4, 2]) for ordinal in range(4)]
    normed = with_step_advantages(groups, reward_config())

    def found(num_ranks: int) -> list[tuple[int, list[float]]]:
        header = HEADER | {"digests": ["d"] * 4}
        batches: list[StepBatch] = build_batches(normed, num_ranks, 16, num_minibatches, **header)
        return sorted((int(s["token_ids"][0]), s["advantages"]) for s in samples(batches))

    assert found(1) == found(2) == found(4)
    values = np.concatenate([advantages for _, advantages in found(1)])
    np.testing.assert_allclose([values.mean(), values.std(ddof=1)], [0.0, 1.0], atol=1e-5)


@pytest.mark.parametrize("mean_level", ["batch", "group", "none"])
@pytest.mark.parametrize("std_level", ["batch", "group", "none"])
@pytest.mark.parametrize(("leave_one_out", "unbiased"), [(True, True), (False, True), (False, False)])
def test_a_norm_over_ranks_is_that_of_all_their_values(
    mean_level: str, std_level: str, leave_one_out: bool, unbiased: bool
) -> None:
    """Nine values of three groups on four ranks, one of which has none, against the norm of one rank."""
    values, groups = np.random.default_rng(1).normal(size=9), np.array([0, 4, 4, 0, 7, 4, 0, 4, 0])
    norm = NormConfig(mean_level=mean_level, std_level=std_level, mean_leave1out=leave_one_out, std_unbiased=unbiased)
    parts = [(values[part], groups[part]) for part in (slice(0, 2), slice(2, 2), slice(2, 7), slice(7, 9))]
    found = normalised_over_ranks(parts, norm, merged)
    assert [part.size for part in found] == [2, 0, 5, 2]
    np.testing.assert_allclose(np.concatenate(found), normalised(values, groups, norm), rtol=1e-12)


def test_a_norm_over_the_batch_compares_groups_of_one() -> None:
    """Rewards 1, 2 and 6 of three groups with one completion each: mean 3."""
    found = compute_advantages(np.array([[1.0], [2.0], [6.0]]), config("norm", std_level="none"))
    assert found.tolist() == [[-2.0], [-1.0], [3.0]]


def test_mask_no_eos_with_zero_comes_between_the_rewards_norm_and_that_of_the_advantages() -> None:
    """Rewards 1 and 5 less their mean: −2 and 2, the latter cut off and so 0; three tokens of −2 and one of 0."""
    group = a_group(0, [3, 1]).model_copy(
        update={"rewards_G": np.array([1.0, 5.0]), "stop_conditions": ["stop", "length"]}
    )
    reward = reward_config(std_level="none").model_copy(
        update={"advantage": config("norm", std_level="none"), "mask_no_eos_with_zero": True}
    )
    (found,) = with_step_advantages([group], reward)
    assert found.advantages_G.tolist() == [-2.0, 0.0]
    assert found.token_advantages.tolist() == [-0.5, -0.5, -0.5, 1.5]


@pytest.mark.parametrize("levels", ["batch", "group"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_values_teach_nothing_without_eps(levels: str, leave_one_out: bool) -> None:
    """With eps 0 too, in one process and over ranks, where the mean of many equal values is rounded."""
    norm = NormConfig.model_validate(
        {"mean_level": levels, "std_level": levels, "mean_leave1out": leave_one_out, "eps": 0}
    )
    values_N, group_of_N = np.full(10_001, 0.1), np.zeros(10_001, np.int64)
    assert not normalised(values_N, group_of_N, norm).any()
    parts = [(values_N[:5000], group_of_N[:5000]), (values_N[5000:], group_of_N[5000:])]
    for part in normalised_over_ranks(parts, norm, merged):
        assert not part.any()
    zeros = normalised(np.zeros(3), np.zeros(3, np.int64), NormConfig.model_validate({"mean_level": "none", "eps": 0}))
    assert not zeros.any()
