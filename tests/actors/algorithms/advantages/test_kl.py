"""A KL in the rewards, before the baseline, by hand (ms-swift's kl_in_reward, TRL's RLOOTrainer)."""

import json
from typing import Any

import numpy as np
import pytest

from actors.algorithms.advantages.kl import (
    advantages_with_kl,
    kl_message,
    with_adv_norm_over_ranks,
    with_advantages,
    with_token_advantages,
)
from actors.algorithms.batches import build_batches
from schemas.config.advantages import NormConfig
from tests.actors.algorithms.advantages.test_group import config
from tests.actors.algorithms.test_batches import HEADER, a_group, samples

ROWS = [[0, 7, 1.0, 2.0], [1, 7, 0.0, 4.0], [2, 9, 1.0, 0.0], [3, 9, 3.0, 4.0]]
"""Completion, group, reward, KL; with beta .25 the rewards are ½, −1 and 1, 2."""


def message(*rows: list[Any]) -> bytes:
    """Of one rank."""
    return json.dumps(rows).encode()


@pytest.mark.parametrize(
    ("type_", "keys", "expected"),
    [
        ("mean", {}, [0.75, -0.75, -0.5, 0.5]),
        ("rloo", {}, [1.5, -1.5, -1.0, 1.0]),
        # unbiased deviations 1.5 ÷ √2 and 1 ÷ √2, of which the reward alone would give other ones
        ("zscore", {"eps": 0.0}, [0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5]),
        ("reinforce_pp", {"eps": 0.0}, (np.array([0.75, -0.75, -0.5, 0.5]) / (1.625 / 3) ** 0.5).tolist()),
        ("norm", {"std_level": "none"}, [-0.125, -1.625, 0.375, 1.375]),
    ],
)
def test_the_kl_is_in_mean_and_deviation(type_: str, keys: dict[str, Any], expected: list[float]) -> None:
    """Rewards less .25 × KL: ½ and −1, 1 and 2."""
    found = advantages_with_kl([message(*ROWS)], config(type_, **keys), 0.25)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_advantages_do_not_depend_on_who_tells_what() -> None:
    """One rank, two, or four with one that has nothing: the same bits."""
    whole = advantages_with_kl([message(*ROWS)], config("zscore"), 0.25)
    halves = advantages_with_kl([message(*ROWS[::2]), message(*ROWS[1::2])], config("zscore"), 0.25)
    parts = [message(ROWS[3]), message(), message(ROWS[0]), message(ROWS[2], ROWS[1])]
    assert whole.tolist() == halves.tolist() == advantages_with_kl(parts, config("zscore"), 0.25).tolist()


def test_unscorable_completions_stay_without_an_advantage() -> None:
    """Rewards ½ and −1 of the other two."""
    rows = [ROWS[0], ROWS[1], [2, 7, None, 9.0]]
    assert advantages_with_kl([message(*rows)], config("mean"), 0.25).tolist() == [0.75, -0.75, 0.0]
    assert advantages_with_kl([message()], config("mean"), 0.25).tolist() == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_tells_its_samples_and_gets_their_advantages(num_ranks: int) -> None:
    """Rewards 0, 1, 2 in each of two groups, KL 10 of the first: −10, 1, 2 and 0, 1, 2 less their means."""
    groups = [a_group(0, [3, 1, 2]), a_group(1, [2, 2, 4])]
    groups[1] = groups[1].model_copy(update={"rewards_G": np.array([0.0, 1.0, np.nan])})
    batches = build_batches(groups, num_ranks, 16, **HEADER | {"digests": ["d"] * 2})
    messages = [kl_message(b, [10.0 * (completion == 0) for completion in b.completions]) for b in batches]
    advantages = advantages_with_kl(messages, config("mean"), 1.0)
    np.testing.assert_allclose(advantages, [-10 + 7 / 3, 1 + 7 / 3, 2 + 7 / 3, -0.5, 0.5, 0.0], rtol=1e-12)
    found = samples([with_advantages(batch, advantages) for batch in batches])
    by_token = {sample["token_ids"][0]: sample for sample in found}
    assert by_token[1000]["advantages"] == [np.float32(-10 + 7 / 3)] * 3
    assert by_token[2002]["advantages"] == [0.5, 0.5]
    assert all(sample["prompt_advantages"] == [0.0, 0.0] for sample in found)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_adv_norm_after_a_kl_is_over_the_loss_tokens_of_all_ranks(num_ranks: int) -> None:
    """Tokens −2, 4 and 1 of one completion, 3 of another, one unscorable: mean 1.5, sum of squares 21."""
    (group,) = (a_group(0, [3, 1, 2], masked=0),)
    group = group.model_copy(update={"rewards_G": np.array([0.0, 1.0, np.nan])})
    batches = build_batches([group], num_ranks, 8, **HEADER | {"digests": ["d"]})
    values = {0: [-2.0, 4.0, 1.0], 1: [3.0], 2: [9.0, 9.0]}
    given = [
        with_token_advantages(b, np.concatenate([np.zeros(0), *(values[c] for c in b.completions.tolist())]))
        for b in batches
    ]
    found = with_adv_norm_over_ranks(given, NormConfig(eps=0.0), False, lambda own: [own])
    by_token = {sample["token_ids"][0]: sample["advantages"] for sample in samples(found)}
    std = (21 / 3) ** 0.5
    np.testing.assert_allclose(by_token[1000], np.array([-3.5, 2.5, -0.5]) / std, rtol=1e-6)
    np.testing.assert_allclose(by_token[1003], [1.5 / std], rtol=1e-6)
    assert by_token[1004] == [0.0, 0.0]
