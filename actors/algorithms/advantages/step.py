"""Advantages that need all groups of a training step, since their deviation is over the batch (level `step`)."""

from collections.abc import Sequence

import numpy as np

from actors.algorithms.advantages.group import Floats, GroupRewards, deviation, group_advantages
from actors.algorithms.advantages.norm import normalised
from schemas.config import advantages as configs


def step_advantages(groups: Sequence[GroupRewards], config: configs.AdvantageConfig) -> list[Floats]:
    """Return the advantages of each group of a step, (G,) each; unscorable completions have 0.

    batch_std           (r − group mean)          ÷ std of all rewards
    rloo                r − mean of the others    ÷ std of all rewards, or of all these advantages
    reinforce_pp        (r − group mean)          ÷ std of all these differences
    gdpo                (sum of z-scores − mean)  ÷ std of all these sums
    norm                see `norm.py`

    "All" means the scored completions of the step; a divisor is std + eps. Types of other levels are returned as
    `group_advantages` computes them. If all values to be divided are equal, they are returned as they are.
    """
    if isinstance(config, configs.NormAdvantageConfig):
        sizes = [group.rewards_G.size for group in groups]
        # the empty array in front: a step may have no groups, and concatenate needs an array
        rewards = np.concatenate([np.zeros(0), *(group.rewards_G for group in groups)])
        scored, advantages = ~np.isnan(rewards), np.zeros(rewards.size)
        advantages[scored] = normalised(rewards[scored], np.repeat(np.arange(len(groups)), sizes)[scored], config)
        return np.split(advantages, np.cumsum(sizes)[:-1])
    parts = [group_advantages(group, config) for group in groups]
    pooled = _pooled(parts, groups)
    # ptp, not the std: the std of equal values may be a rounding error, and would make large numbers of it
    if config.level != "step" or pooled.size == 0 or np.ptp(pooled) == 0:
        return parts
    match config:
        case configs.BatchStdAdvantageConfig() | configs.RlooAdvantageConfig(std_of="rewards"):
            divisor = deviation(_pooled([group.rewards_G for group in groups], groups), config)
        case configs.RlooAdvantageConfig() | configs.ReinforcePPAdvantageConfig() | configs.GdpoAdvantageConfig():
            divisor = deviation(pooled, config)
        case _:
            raise AssertionError(config.type)
    # sums of z-scores of functions that did not apply everywhere need not have mean 0
    centre = pooled.mean() if isinstance(config, configs.GdpoAdvantageConfig) else 0.0
    return [np.where(group.scored_G, (part - centre) / divisor, 0.0) for part, group in zip(parts, groups, strict=True)]


def _pooled(values: Sequence[Floats], groups: Sequence[GroupRewards]) -> Floats:
    """Concatenate the values of all scored completions of the step."""
    return np.concatenate([np.zeros(0), *(v[group.scored_G] for v, group in zip(values, groups, strict=True))])
