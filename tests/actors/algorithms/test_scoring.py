"""Scoring of a group as one function of arrays, with numbers one can check by hand, at three group sizes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.algorithms.advantages import StepRewards
from actors.algorithms.advantages.shaping import RewardColumns
from actors.algorithms.scoring import GroupScore, ScoringRules, custom_arguments, score_group
from schemas.config.actors import RewardConfig
from schemas.config.data import ShapingConfig
from schemas.messages import RolloutGroup
from tests.actors.algorithms.test_filters import UNSURE, group, reward_config

NAN = float("nan")
MEAN: dict[str, Any] = {"advantage": {"type": "mean"}}
OWN = {"path": "mine:f"}
"""Stand-in for the path of a function whose values the test gives."""


def rules(weights: Sequence[float] = (1.0,), shapings: Sequence[ShapingConfig] = (), **reward: Any) -> ScoringRules:
    """Rules of a run with these weights; functions are unshaped unless said otherwise."""
    config: RewardConfig = reward_config(**MEAN | reward)
    return ScoringRules(config, RewardColumns(np.array(weights), shapings or [ShapingConfig()] * len(weights)))


def sampled(*lengths: int, **given: Any) -> RolloutGroup:
    """A group of completions with these numbers of tokens."""
    return group([[UNSURE] * length for length in lengths], **given)


def score(
    taken: RolloutGroup,
    rewards: Sequence[Sequence[float]],
    by: ScoringRules,
    steps: Sequence[StepRewards] | None = None,
    custom: Sequence[float] | None = None,
) -> GroupScore:
    """The group's score from the values of functions, a row each."""
    return score_group(taken, np.array(rewards), by, steps, None if custom is None else np.array([custom]))


def test_group_of_one_has_its_reward_and_nothing_to_compare_it_with() -> None:
    """Reward 2 · 3 + 1 · ½ = 6.5, advantage 0, its two tokens stay in the loss."""
    found = score(sampled(2), [[3.0], [0.5]], rules([2.0, 1.0]))
    assert found.rewards_G.tolist() == [6.5]
    assert found.advantages_G.tolist() == [0.0]
    assert found.loss_mask_N.tolist() == [1, 1]
    assert found.token_advantages_N.size == 0


def test_group_of_two_is_shaped_by_function_weighed_and_shaped_as_a_sum() -> None:
    """(1 − 1) · 10 and (2 − 1) · 10, weight 2: 0 and 20; the other adds 1 and 3; clipped to 5: 1 and 5, mean 3."""
    by = rules([2.0, 1.0], [ShapingConfig(bias=-1.0, scale=10.0), ShapingConfig()], shaping={"clip": 5.0})
    found = score(sampled(1, 2), [[1.0, 2.0], [1.0, 3.0]], by)
    assert found.shaped_FG.tolist() == [[0.0, 10.0], [1.0, 3.0]]
    assert found.rewards_G.tolist() == [1.0, 5.0]
    assert found.advantages_G.tolist() == [-2.0, 2.0]
    assert found.advantages_G.dtype == np.float32


@pytest.mark.parametrize(
    ("none_as_zero", "rewards", "advantages"),
    [(False, [1.0, NAN, 3.0, 2.0], [-1.0, 0.0, 1.0, 0.0]), (True, [1.0, 0.0, 3.0, 2.0], [-0.5, -1.5, 1.5, 0.5])],
)
def test_group_of_four_with_a_completion_that_no_function_scores(
    none_as_zero: bool, rewards: list[float], advantages: list[float]
) -> None:
    """1, –, 3, 2: left out, the mean is 2; as a zero, the mean is 1.5. A row with a single NaN adds the other's."""
    found = score(
        sampled(1, 1, 1, 1),
        [[1.0, NAN, 3.0, NAN], [0.0, NAN, NAN, 2.0]],
        rules([1.0, 1.0], none_as_zero=none_as_zero),
    )
    np.testing.assert_array_equal(found.rewards_G, rewards)
    assert found.advantages_G.tolist() == advantages
    assert found.scored_G.tolist() == [True, none_as_zero, True, True]


@pytest.mark.parametrize(
    ("size", "cut", "mask", "advantages"),
    [
        (1, {0}, [0], [0.0]),
        (2, {1}, [1, 0, 0], [-0.5, 0.5]),
        (4, {0, 2}, [0, 1, 1, 0, 0, 0, 1, 1, 1, 1], [-1.5, -0.5, 0.5, 1.5]),
    ],
)
def test_truncated_completions_leave_the_loss_and_stay_in_the_baseline(
    size: int, cut: set[int], mask: list[int], advantages: list[float]
) -> None:
    """Completions of 1, 2, … tokens with rewards 0, 1, …: the mean is that of all, cut off or not."""
    reasons = ["length" if g in cut else "stop" for g in range(size)]
    taken = sampled(*range(1, size + 1), stop_conditions=reasons)
    found = score(taken, [[float(g) for g in range(size)]], rules(mask_truncated_completions=True))
    assert found.loss_mask_N.tolist() == mask
    assert found.masked_G.tolist() == found.found["truncated"].tolist() == [g in cut for g in range(size)]
    assert found.advantages_G.tolist() == advantages


def test_filter_that_only_counts_leaves_the_loss_mask() -> None:
    """Two tokens in a row with probability 1: found by the window of two, in the first completion alone."""
    filters = [{"type": "repetition", "window": 2, "enforce": False}]
    taken = group([[0.0, 0.0], [0.0, UNSURE]])
    found = score(taken, [[0.0, 1.0]], rules(filters=filters))
    assert found.found["repetition"].tolist() == [True, False]
    assert found.masked_G.tolist() == [False, False]
    assert found.loss_mask_N.tolist() == [1, 1, 1, 1]


def test_gae_gives_each_token_its_own_advantage_and_each_completion_their_mean() -> None:
    """γ = ½, a reward 1 at the end of 2 tokens: ½, 1; reward 4 of 1 token; none; 2 over 3 tokens: ½, 1, 2."""
    by = rules(advantage={"type": "gae", "discount": 0.5})
    found = score(sampled(2, 1, 1, 3), [[1.0, 4.0, NAN, 2.0]], by)
    assert found.token_advantages_N.tolist() == [0.5, 1.0, 4.0, 0.0, 0.5, 1.0, 2.0]
    assert found.advantages_G.tolist() == pytest.approx([0.75, 4.0, 0.0, 3.5 / 3])


@pytest.mark.parametrize(
    ("steps", "tokens"),
    [([[(1, 1.0)], [(2, 1.0)]], [0.0, 0.0, 0.0]), ([[(1, 1.0)], [(1, 0.0), (2, 0.5)]], [1.0, -1.0, 0.0])],
)
def test_process_supervision_reads_steps_and_no_rewards(steps: list[StepRewards], tokens: list[float]) -> None:
    """Two equal steps have z-scores of 0; rewards 1, 0 and ½ of three steps have 1, −1, 0."""
    by = rules(steps=OWN, advantage={"type": "process", "eps": 0.0})
    assert score(sampled(1, 2), [[NAN, NAN]], by, steps).token_advantages_N.tolist() == tokens


def test_reward_of_a_truncated_completion_is_zero_after_the_mean() -> None:
    """Rewards 1 and 3: advantages −1 and 1, then 0 for the second; its tokens stay in the loss."""
    taken = sampled(1, 2, stop_conditions=["stop", "length"])
    found = score(taken, [[1.0, 3.0]], rules(mask_no_eos_with_zero=True))
    assert found.advantages_G.tolist() == [-1.0, 0.0]
    assert found.loss_mask_N.tolist() == [1, 1, 1]


def test_custom_function_gets_the_rewards_and_lengths_of_scored_completions() -> None:
    """Of four completions three are scored; the values 7, 8, 9 go to them, and 0 to the fourth."""
    by = rules([2.0], advantage={"type": "custom"} | OWN)
    taken, rewards = sampled(1, 2, 3, 4), np.array([[1.0, NAN, 3.0, 4.0]])
    arguments = custom_arguments(taken, rewards, by)
    assert arguments is not None
    assert [array.tolist() for array in arguments] == [[[2.0, 6.0, 8.0]], [[1, 3, 4]]]
    assert score_group(taken, rewards, by, None, np.array([[7.0, 8.0, 9.0]])).advantages_G.tolist() == [7, 0, 8, 9]


@pytest.mark.parametrize(
    ("lengths", "rewards", "purpose"),
    [([1], [1.0], "train"), ([1, 1], [1.0, NAN], "train"), ([1, 1], [1.0, 2.0], "eval")],
)
def test_custom_function_is_not_needed_for_a_single_reward_or_an_evaluation(
    lengths: list[int], rewards: list[float], purpose: str
) -> None:
    """All advantages are 0 without a call."""
    by, taken = rules(advantage={"type": "custom"} | OWN), sampled(*lengths, purpose=purpose)
    assert custom_arguments(taken, np.array([rewards]), by) is None
    assert score(taken, [rewards], by).advantages_G.tolist() == [0.0] * len(lengths)


def test_evaluation_is_measured_and_neither_filtered_nor_given_advantages() -> None:
    """The second row has no weight: it is exact_match, which is measured alone."""
    taken = sampled(1, 1, purpose="eval", stop_conditions=["length", "length"])
    found = score(taken, [[1.0, 2.0], [9.0, 9.0]], rules(mask_truncated_completions=True))
    assert found.shaped_FG.tolist() == [[1.0, 2.0]]
    assert found.rewards_G.tolist() == [1.0, 2.0]
    assert found.advantages_G.tolist() == [0.0, 0.0]
    assert found.loss_mask_N.tolist() == [1, 1]
    assert found.found == {}


def test_scoring_changes_none_of_its_arguments() -> None:
    """The message's own arrays go on to be sent, and a second call finds the same."""
    taken = sampled(2, 1, 1, 3, stop_conditions=["stop", "length", "stop", "stop"])
    rewards = np.array([[1.0, 4.0, NAN, 2.0]])
    by = rules(advantage={"type": "gae", "discount": 0.5}, mask_truncated_completions=True, none_as_zero=True)
    for array in (rewards, taken.loss_mask, taken.token_ids, taken.completion_offsets):
        array.setflags(write=False)
    first, second = (score_group(taken, rewards, by) for _ in range(2))
    for name in ("shaped_FG", "rewards_G", "advantages_G", "token_advantages_N", "loss_mask_N", "masked_G"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
