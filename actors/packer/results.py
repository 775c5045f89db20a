"""Figures of groups: a step's line in metrics.jsonl, and an evaluation's in evals.jsonl. Pure functions."""

import math
from collections.abc import Sequence

import numpy as np

from actors.algorithms.lag import lag_of
from actors.packer.gauges import REWARD_COLUMN
from schemas.messages import ScoredGroup
from schemas.messages.groups import TOOL_CALLS, TURNS

LOGGED_COLUMN = "logged/"
"""Prefix of a number in metrics.jsonl that a reward function has logged."""
EvalResults = dict[str, dict[str, float | None]]
"""Results by environment and measure; None: nothing could be scored."""


def step_values(step: int, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the packer's values of a step: rewards, advantages (per token, if they are), lengths in tokens, lag.

    A step with trajectories also has those of `trajectory_values`.
    """
    rewards = np.concatenate([group.rewards_G for group in groups])
    lengths = np.concatenate([group.lengths_G for group in groups])
    advantages = np.concatenate([group.advantages for group in groups]).astype(np.float64)
    lags = [lag_of(step, group.oldest_version) for group in groups]
    # NaN: no function applied to the completion, which is not the same as a reward of 0
    scored = rewards[~np.isnan(rewards)]
    values = {
        "reward_mean": float(scored.mean()) if scored.size else math.nan,
        "reward_std": float(scored.std()) if scored.size else math.nan,
        "reward_unscorable": float(np.isnan(rewards).mean()),
        "groups_without_variance": float(np.mean([np.ptp(group.advantages) == 0 for group in groups])),
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std()),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated_fraction": float(np.mean(np.concatenate([group.truncated_G for group in groups]))),
        "lag_mean": float(np.mean(lags)),
        "lag_max": float(max(lags)),
        "num_completions": float(rewards.size),
    }
    # environments have different rewards; each is averaged over the groups that have it
    for name in dict.fromkeys(name for group in groups for name in group.reward_names):
        having = [group for group in groups if name in group.reward_names]
        scores = np.concatenate([group.rewards_FG[group.reward_names.index(name)] for group in having])
        values[REWARD_COLUMN + name] = float(np.nanmean(scores)) if not np.isnan(scores).all() else math.nan
    return values | logged_values(groups) | trajectory_values(groups)


def logged_values(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the means of the numbers that reward functions have logged, over the groups that have them."""
    names = dict.fromkeys(name for group in groups for name in group.logged_metrics)
    return {
        LOGGED_COLUMN + name: float(np.mean([g.logged_metrics[name] for g in groups if name in g.logged_metrics]))
        for name in names
    }


def trajectory_values(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return means over the trajectories of a step: turns, tool calls, samples, failures; empty if there are none.

    Completions of a single turn do not count. Example: trajectories of 2 and 4 turns, the second with a branch and so
    with two samples: `turns_mean` 3, `samples_per_completion` 1.5.
    """
    played = [group for group in groups if group.transcripts]
    if not played:
        return {}
    counts = np.concatenate([group.counts for group in played])
    return {
        "turns_mean": float(counts[:, TURNS].mean()),
        "tool_calls_mean": float(counts[:, TOOL_CALLS].mean()),
        "samples_per_completion": sum(len(group.sample_completions) for group in played) / len(counts),
        "failed_fraction": float(np.concatenate([group.failed_G for group in played]).mean()),
    }


def pass_at(k: int, num_completions: int, num_correct: int) -> float:
    """Return the probability that k of a prompt's completions, drawn without replacement, include a correct one.

    Unbiased: 1 − C(n − c, k) ÷ C(n, k) (Chen et al. 2021). Example: with 1 correct of 4, pass@2 = 1 − 3/6.
    """
    return 1.0 - math.comb(num_completions - num_correct, k) / math.comb(num_completions, k)


def evaluate(groups: Sequence[ScoredGroup]) -> EvalResults:
    """Return the results of an evaluation by environment.

    An unscorable completion counts as no match, and is left out of the mean reward. A value is None, not 0, if no
    completion could be scored. The last function of each group is `eval.exact_match`.
    """
    results: EvalResults = {}
    for label in dict.fromkeys(group.environment for group in groups):
        mine = [group for group in groups if group.environment == label]
        matches = np.concatenate([group.rewards_FG[-1] for group in mine])
        rewards = np.concatenate([group.rewards_G for group in mine])
        scored = rewards[~np.isnan(rewards)]
        results[label] = {
            "exact_match": None if np.isnan(matches).all() else float((matches == 1.0).mean()),
            "mean_reward": float(scored.mean()) if scored.size else None,
            "reward_std": float(scored.std()) if scored.size else None,
            "num_prompts": len(mine),
            "num_completions": len(rewards),
        }
        # the last one is exact_match, set above; a group whose environment gave no reward lacks that reward's row
        rows = [dict(zip(group.reward_names[:-1], group.rewards_FG, strict=False)) for group in mine]
        for name in dict.fromkeys(name for row in rows for name in row):
            scores = np.concatenate([row[name] for row in rows if name in row])
            results[label][REWARD_COLUMN + name] = None if np.isnan(scores).all() else float(np.nanmean(scores))
        if not np.isnan(matches).all():
            size = min(group.num_completions for group in mine)
            counts = [(group.num_completions, int((group.rewards_FG[-1] == 1.0).sum())) for group in mine]
            # pass@k for the powers of two, and for the number of completions itself, as far as there are enough
            ks = {*(1 << i for i in range(1, size.bit_length()) if 1 << i <= size), *([size] if size > 1 else [])}
            results[label] |= {f"pass@{k}": float(np.mean([pass_at(k, n, c) for n, c in counts])) for k in sorted(ks)}
    return results
