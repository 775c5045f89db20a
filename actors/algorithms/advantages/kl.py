"""Advantages of rewards that contain a reference KL, subtracted before the baseline (`reference.place: group_reward`).

Such advantages need the KLs of all completions of the step. Each trainer rank measures the KLs of its own completions,
sends them to all other ranks, and computes the same advantages from all messages (docs/internals/decisions, 0025).
Source: ms-swift 4.6, `swift/rl_core/advantage.py` (compute_advantages, kl_in_reward); TRL 1.16, RLOOTrainer.
"""

import json
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages.group import Floats, GroupRewards
from actors.algorithms.advantages.norm import Sums, merged, normalised_over_ranks
from actors.algorithms.advantages.step import step_advantages
from schemas.config.advantages import AdvantageConfig, NormConfig
from schemas.messages import StepBatch


def kl_message(batch: StepBatch, kls: Sequence[float]) -> bytes:
    """Return a rank's message to the others: rows (completion, ordinal, reward or null, KL) in JSON, one per sample.

    Args:
        batch: the rank's batch.
        kls: KL of each sample, summed over its completion, (B,).
    """
    rewards = [None if np.isnan(reward) else reward for reward in batch.rewards.tolist()]  # JSON has no NaN
    rows = list(zip(batch.completions.tolist(), batch.sample_ordinals.tolist(), rewards, kls, strict=True))
    return json.dumps(rows).encode()


def advantages_with_kl(messages: Sequence[bytes], config: AdvantageConfig, beta: float) -> Floats:
    """Return the advantages of the step's completions, computed from reward − beta × KL of the completion.

    With type `mean`, rewards 1 and 0, KLs 2 and 4, beta .25: ½ and −1 have mean −¼, so the advantages are ¾ and −¾.

    Args:
        messages: `kl_message` of every rank, in any order; each sample is in exactly one message.
        config: an advantage of rewards alone, of level `group` or `step`.
        beta: factor of the KL.
    """
    # every rank sorts the same rows, so all have the same bits; JSON gives back each float64 unchanged
    samples = sorted(row for message in messages for row in json.loads(message))
    # the KL of a completion with branches is the sum over its samples
    rows = [
        (completion, ordinal, reward, sum(row[3] for row in of_one))
        for (completion, ordinal, reward), of_one in groupby(samples, key=lambda row: tuple(row[:3]))
    ]
    assert [row[0] for row in rows] == list(range(len(rows))), "a completion is on no rank"
    groups = []
    for _, members in groupby(rows, key=lambda row: row[1]):  # completions are numbered group by group
        _, _, rewards, kls = zip(*members, strict=True)
        scored = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
        # lengths of 1: the configuration allows only advantages that do not read lengths here
        groups.append(GroupRewards(scored - beta * np.array(kls), np.ones(scored.size, np.int64)))
    return np.concatenate([np.zeros(0), *step_advantages(groups, config)])


def with_advantages(batch: StepBatch, advantages: Floats) -> StepBatch:
    """Return a rank's batch with an advantage per completion of the step, spread over its tokens; prompts have 0."""
    of_tokens = np.repeat(advantages[batch.completions], np.diff(batch.sample_offsets))
    return with_token_advantages(batch, of_tokens[_in_completion(batch)])


def with_token_advantages(batch: StepBatch, advantages: Floats) -> StepBatch:
    """Return a rank's batch with an advantage per completion token, in the order of its samples; prompts have 0."""
    values = np.zeros(batch.token_ids.size, np.float32)
    values[_in_completion(batch)] = advantages
    return batch.model_copy(update={"advantages": values})


def with_adv_norm_over_ranks(
    batches: Sequence[StepBatch], config: NormConfig, has_no_rewards: bool, exchange: Callable[[bytes], list[bytes]]
) -> list[StepBatch]:
    """Return the batches with advantages normalised over the loss tokens of the step, as `with_adv_norm` does.

    Args:
        batches: batches of the ranks that this process computes for, its own last.
        config: range of mean and deviation.
        has_no_rewards: the advantage is not computed from rewards (`process`), so NaN rewards exclude no completion.
        exchange: sends this rank's message and returns the messages of all ranks that are processes.
    """
    active = [
        np.repeat(~np.isnan(batch.rewards) | has_no_rewards, np.diff(batch.sample_offsets)) & (batch.loss_mask > 0)
        for batch in batches
    ]
    parts = [
        (
            batch.advantages[mask].astype(np.float64),
            np.repeat(batch.sample_ordinals, np.diff(batch.sample_offsets))[mask],
        )
        for batch, mask in zip(batches, active, strict=True)
    ]

    def share(sums: list[Sums]) -> Sums:
        rows = [json.dumps(list(of_one.items())).encode() for of_one in sums]
        everybody = [*rows[:-1], *exchange(rows[-1])]  # the own message comes back with the exchange
        return merged([{label: tuple(pair) for label, pair in json.loads(message)} for message in everybody])

    found = []
    for batch, mask, values in zip(batches, active, normalised_over_ranks(parts, config, share), strict=True):
        advantages = np.zeros(batch.token_ids.size, np.float32)
        advantages[mask] = values
        found.append(batch.model_copy(update={"advantages": advantages}))
    return found


def _in_completion(batch: StepBatch) -> NDArray[np.bool_]:
    """Return a mask, (N,), of the tokens that belong to a completion, not to a prompt."""
    lengths = np.diff(batch.sample_offsets)
    place = np.arange(batch.token_ids.size) - np.repeat(batch.sample_offsets[:-1], lengths)
    return np.asarray(place >= np.repeat(batch.prompt_lengths, lengths))
