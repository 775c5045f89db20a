"""Which completions and which groups are not fit to learn from, and what becomes of them."""

from typing import Any

import numpy as np
import pytest

from actors.algorithms.filters import (
    filter_completions,
    is_gibberish,
    is_repetition,
    mask_completions,
    rejected_as,
)
from schemas.config.actors import PackerConfig, RewardConfig
from schemas.config.filters import GibberishFilterConfig, RepetitionFilterConfig
from schemas.messages import RolloutGroup, single_turn

SURE, UNSURE = -0.001, -1.0
"""Probabilities 0.999 and 0.37."""


def reward_config(**given: Any) -> RewardConfig:
    """With filters as said."""
    return RewardConfig.model_validate({"functions": [{"path": "exact_match"}], **given})


def group(logprobs: list[list[float]], masks: list[list[int]] | None = None, **given: Any) -> RolloutGroup:
    """Of completions with these logprobs and rare tokens, all of them sampled unless said otherwise."""
    offsets = np.cumsum([0, *map(len, logprobs)])
    num_tokens = int(offsets[-1])
    values: dict[str, Any] = {
        "run": "r", "sender": "rollout-0", "ordinal": 0, "attempt": 1, "purpose": "train", "environment": "words",
        "example_key": "k", "prompt": "p", "columns": {}, "completions": [""] * len(logprobs),
        "stop_conditions": ["stop"] * len(logprobs),
        "token_ids": np.arange(200_000, 200_000 + num_tokens, dtype=np.int32),
        "loss_mask": np.concatenate(masks or [[1] * num_tokens]).astype(np.uint8),
        "logprobs": np.concatenate(logprobs).astype(np.float32),
        **single_turn(np.zeros(1, np.int32), offsets, np.array([[start, 1, 0] for start in offsets[:-1]], np.int64)),
        "segment_temperatures": np.ones(len(logprobs), np.float32),
    }  # fmt: skip
    return RolloutGroup(**values | given)


@pytest.mark.parametrize(
    ("token", "logprob", "found"),
    [(100_001, -13.94, True), (100_000, -13.94, False), (100_001, -13.92, False), (5, -50.0, False)],
)
def test_gibberish_is_a_rare_token_less_likely_than_chance(token: int, logprob: float, found: bool) -> None:
    """152 000 tokens: chance is −11.932 and the bound −13.932; the id must be above 100 000."""
    tokens, logprobs = np.array([7, token], np.int32), np.array([-0.1, logprob], np.float32)
    assert is_gibberish(tokens, logprobs, GibberishFilterConfig(), 152_000) is found


@pytest.mark.parametrize(
    ("logprobs", "found"),
    [
        ([SURE] * 3000, True),
        ([SURE] * 2999, False),
        ([SURE] * 2999 + [UNSURE] + [SURE] * 2999, False),
        ([UNSURE] + [SURE] * 3000 + [UNSURE], True),
        ([], False),
    ],
)
def test_repetition_is_a_window_of_sure_tokens_in_a_row(logprobs: list[float], found: bool) -> None:
    """3 000 by default, wherever they begin; one token in between begins anew."""
    assert is_repetition(np.array(logprobs, np.float32), RepetitionFilterConfig()) is found


def test_exactly_the_threshold_is_not_sure() -> None:
    """Probability > 0.99, not ≥."""
    logprobs = np.full(5, np.log(0.99))
    assert not is_repetition(logprobs, RepetitionFilterConfig(window=1))
    assert is_repetition(logprobs + 1e-6, RepetitionFilterConfig(window=5))


def test_a_row_goes_on_across_turns_and_not_across_completions() -> None:
    """Three sampled, two of a tool, two sampled: five in a row. The next completion's two do not count on top."""
    sampled = group(
        [[SURE] * 3 + [UNSURE] * 2 + [SURE] * 2, [SURE] * 2],
        [[1, 1, 1, 0, 0, 1, 1], [1, 1]],
        segments=np.array([[0, 1, 0, 0, 0], [3, -1, -1, 1, 1], [5, 1, 0, 0, 1], [7, 1, 0, 0, 0]]),
        segment_temperatures=np.ones(4, np.float32),
    )
    for window, expected in ((5, [True, False]), (6, [False, False])):
        config = reward_config(filters=[{"type": "repetition", "window": window}])
        assert filter_completions(sampled, config, 0)[0]["repetition"].tolist() == expected


@pytest.mark.parametrize("enforce", [False, True])
def test_only_an_enforced_filter_masks_what_it_finds(enforce: bool) -> None:
    """It counts in any case; the second completion is gibberish, the first one is not."""
    sampled = group([[-1.0, -1.0], [-20.0]])
    config = reward_config(filters=[{"type": "gibberish", "enforce": enforce}])
    found, masked = filter_completions(sampled, config, 152_000)
    assert found["gibberish"].tolist() == [False, True]
    assert masked.tolist() == [False, enforce]


@pytest.mark.parametrize(("mask_truncated", "masked"), [(False, [False, False]), (True, [False, True])])
def test_truncated_completions_are_counted_and_masked_when_asked_for(mask_truncated: bool, masked: list[bool]) -> None:
    """Finish reason length; no filter is configured."""
    sampled = group([[-1.0], [-1.0]], stop_conditions=["stop", "length"])
    found, masked_G = filter_completions(sampled, reward_config(mask_truncated_completions=mask_truncated), 0)
    assert found["truncated"].tolist() == [False, True]
    assert masked_G.tolist() == masked


def test_a_masked_completion_has_no_token_left_in_the_loss() -> None:
    """Those of the others, masked tokens of a tool included, stay as they are."""
    mask = mask_completions(np.array([1, 1, 0, 1], np.uint8), np.array([0, 2, 4]), np.array([True, False]))
    assert (mask.tolist(), mask.dtype) == ([0, 0, 0, 1], np.uint8)


NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "dynamic", "difficulty", "both"),
    [
        ([1.0, 1.0], "zero_variance", "too_easy", "too_easy"),
        ([0.0, 0.0], "zero_variance", "too_hard", "too_hard"),
        ([0.5, 0.5], "zero_variance", "", "zero_variance"),
        ([1.0, 0.0], "", "", ""),
        ([2.0, 0.0], "", "too_easy", "too_easy"),
        ([-1.0, 1.0], "", "too_hard", "too_hard"),
        ([1.0, NAN], "zero_variance", "too_easy", "too_easy"),
        ([NAN, NAN], "zero_variance", "", "zero_variance"),
    ],
)
def test_a_group_is_rejected_in_the_words_of_its_filter(
    rewards: list[float], dynamic: str, difficulty: str, both: str
) -> None:
    """Equal rewards; a mean of exactly 0 or 1, which tells more. What could not be scored is left out."""
    settings = [(True, False, dynamic), (False, True, difficulty), (True, True, both), (False, False, "")]
    for dynamic_sampling, filtering, expected in settings:
        config = PackerConfig(dynamic_sampling=dynamic_sampling, online_difficulty_filtering=filtering)
        assert rejected_as(np.array(rewards), config) == expected
