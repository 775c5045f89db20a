"""Scoring of groups with environments, by hand: rewards of the environment and of turns, failures, discounts."""

from typing import Any

import numpy as np
import pytest

from actors.algorithms.advantages.shaping import RewardColumns
from actors.algorithms.advantages.tokens import process
from actors.algorithms.scoring import GroupScore, ScoringRules, score_group
from actors.algorithms.turns import turn_steps
from schemas.config.actors import RewardConfig
from schemas.config.advantages import ProcessAdvantageConfig
from schemas.messages import RolloutGroup

GROUP: dict[str, Any] = {
    "run": "r",
    "sender": "rollout-0",
    "ordinal": 0,
    "attempt": 1,
    "purpose": "train",
    "environment": "game",
    "example_key": "k",
    "prompt": [],
    "columns": {},
    "completions": ["a", "b", "c"],
    "transcripts": ["[[], []]"] * 3,
    "stop_conditions": ["done", "done", "max_turns"],
    # completion 0: turn 0 (2 tokens), 3 of the environment, turn 1 (1 token), and a branch: turn 2 (2 tokens)
    # completion 1: turn 0 (4 tokens); completion 2: turn 0 (1 token)
    "prompt_ids": np.array([1, 2, 1, 9], np.int32),
    "prompt_offsets": np.array([0, 2, 4]),
    "sample_offsets": np.array([0, 6, 8, 12, 13]),
    "sample_completions": np.array([0, 0, 1, 2]),
    "sample_prompts": np.array([0, 1, 0, 0]),
    "token_ids": np.arange(13, dtype=np.int32),
    "loss_mask": np.array([1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], np.uint8),
    "logprobs": np.full(13, -1.0, np.float32),
    "segments": np.array(
        [[0, 1, 3, 0, 0], [2, -1, -1, 1, 1], [5, 1, 4, 0, 1], [6, 1, 5, 0, 2], [8, 1, 3, 0, 0], [12, 1, 3, 0, 0]]
    ),
    "segment_temperatures": np.ones(6, np.float32),
    "counts": np.array([[3, 1, 0], [1, 0, 0], [1, 0, 0]]),
    "environment_reward_names": ["won", "style"],
    "environment_rewards_EG": np.array([[1.0, 0.0, np.nan], [5.0, 5.0, 5.0]]),
    "turn_rewards": np.array([[0, 0, 0.5], [0, 2, 2.0], [1, 0, 1.0]]),
}


def group(**given: Any) -> RolloutGroup:
    """Three trajectories, the first with a tool's tokens and a branch."""
    return RolloutGroup(**GROUP | given)


def scored(taken: RolloutGroup, functions: list[list[float]], weights: dict[str, float], **reward: Any) -> GroupScore:
    """The score of a group with functions of weight 1 and an environment with these weights."""
    paths = [{"path": "exact_match"} for _ in functions]
    config = RewardConfig.model_validate({"functions": paths, "advantage": {"type": "mean"}} | reward)
    columns = RewardColumns.of_functions(config.functions, {"game": weights})
    values = np.concatenate([np.array(functions).reshape(-1, 3), taken.environment_rewards_EG])
    steps = turn_steps(taken) if config.steps is not None else None
    return score_group(taken, values, ScoringRules(config, columns), steps)


def test_rewards_of_the_environment_are_added_to_those_of_functions() -> None:
    """Without weights each counts 1; the third completion has no `won`, and is scored by what it has."""
    found = scored(group(), [[0.25, 0.5, 0.75]], {})
    assert found.rewards_G.tolist() == [6.25, 5.5, 5.75]
    # the mean is over trajectories, whatever their tokens and samples
    assert np.allclose(found.advantages_G, [6.25 - 35 / 6, 5.5 - 35 / 6, 5.75 - 35 / 6])


def test_rewards_that_have_no_weight_are_measured_only() -> None:
    """With `won` alone the third completion is unscorable, and left out of the mean."""
    found = scored(group(), [], {"won": 2.0})
    assert np.array_equal(found.rewards_G, [2.0, 0.0, np.nan], equal_nan=True)
    assert found.advantages_G.tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("none_as_zero", [False, True])
def test_a_failed_completion_has_no_reward_whatever_stands_in_for_none(none_as_zero: bool) -> None:
    """Not 0, and no part of the mean."""
    taken = group(failures=["", "", "env_step: broken"], environment_rewards_EG=np.array([[1.0, 0.0, 0.0], [0.0] * 3]))
    found = scored(taken, [], {}, none_as_zero=none_as_zero)
    assert np.array_equal(found.rewards_G, [1.0, 0.0, np.nan], equal_nan=True)
    assert found.advantages_G.tolist() == [0.5, -0.5, 0.0]


def test_lengths_are_sampled_tokens_and_the_oldest_version_is_that_of_the_model() -> None:
    """The environment's three tokens have neither length nor version."""
    taken = group()
    assert taken.lengths_G.tolist() == [5, 4, 1]
    assert taken.num_tokens_G.tolist() == [8, 4, 1]
    assert taken.completion_offsets.tolist() == [0, 8, 12, 13]
    assert (taken.oldest_version, taken.policies) == (3, {(1, 3), (1, 4), (1, 5)})
    assert taken.longest_sample == 2 + 6
    assert taken.truncated_G.tolist() == [False, False, False]


def test_rewards_of_turns_are_steps_behind_the_turns_last_token() -> None:
    """Turn 2 of the first completion is in its branch, tokens 6 and 7."""
    assert turn_steps(group()) == [[(2, 0.5), (8, 2.0)], [(4, 1.0)], []]


def test_the_reward_of_a_turn_without_tokens_counts_at_the_turn_before() -> None:
    """And a failed completion has no steps."""
    taken = group(turn_rewards=np.array([[0, 5, 1.0], [1, 0, 2.0]]), failures=["", "env_step: x", ""])
    assert turn_steps(taken) == [[(8, 1.0)], [], []]


def test_process_gives_turns_the_discounted_rewards_of_later_turns_and_the_environment_none() -> None:
    """Scores of 0.5, 2 and 1 with mean 7/6; the first turn has its own and half of the last."""
    config = {"type": "process", "std": "population", "eps": 0.0, "discount": 0.5}
    found = scored(group(), [], {}, advantage=config, steps={})
    rewards = np.array([0.5, 2.0, 1.0])
    z = (rewards - rewards.mean()) / rewards.std()
    first = [z[0] + 0.5 * z[1]] * 2 + [0.0] * 3 + [z[1]] * 3
    assert np.allclose(found.token_advantages_N, [*first, *[z[2]] * 4, 0.0])


def test_discount_of_one_is_the_plain_sum_and_of_zero_each_step_alone() -> None:
    """Two completions of 4 and 2 tokens, steps given in any order."""
    steps, lengths = [[(4, 3.0), (1, 1.0)], [(2, 2.0)]], np.array([4, 2])
    z = (np.array([3.0, 1.0, 2.0]) - 2.0) / np.std([3.0, 1.0, 2.0])
    plain = ProcessAdvantageConfig(std="population", eps=0.0)
    assert np.allclose(process(steps, lengths, plain, 1.0), [z[0] + z[1], *[z[0]] * 3, z[2], z[2]])
    nearly = process(steps, lengths, plain, 1.0 - 1e-12)
    assert np.allclose(nearly, process(steps, lengths, plain, 1.0), atol=1e-9)
    assert np.allclose(process(steps, lengths, plain, 0.0), [z[1], *[z[0]] * 3, z[2], z[2]])
