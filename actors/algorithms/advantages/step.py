"""Advantages that need all groups of a training step: their deviation is over the batch."""

from collections.abc import Sequence

import numpy as np

from actors.algorithms.advantages.group import Floats, GroupRewards, deviation, group_advantages
from schemas.config import advantages as configs


def step_advantages(groups: Sequence[GroupRewards], config: configs.AdvantageConfig) -> list[Floats]:
    """(G,) for each group of a step; a group is what came as one, wherever it stands.

    batch_std           (r − group mean)          ÷ std of all rewards
    rloo                r − mean of the others    ÷ std of all rewards, or of all these advantages
    reinforce_pp        (r − group mean)          ÷ std of all these differences
    gdpo                (sum of z-scores − mean)  ÷ std of all these sums
    """
    parts = [group_advantages(group, config) for group in groups]
    pooled = _pooled(parts, groups)
    if config.level != "step" or pooled.size == 0 or np.ptp(pooled) == 0:
        return parts
    rewards = _pooled([group.rewards_G for group in groups], groups)
    divisor = _deviation(rewards, pooled, config)
    centre = pooled.mean() if isinstance(config, configs.GdpoAdvantageConfig) else 0.0
    return [np.where(group.scored_G, (part - centre) / divisor, 0.0) for part, group in zip(parts, groups, strict=True)]


def _deviation(rewards: Floats, advantages: Floats, config: configs.AdvantageConfig) -> float:
    match config:
        case configs.BatchStdAdvantageConfig() | configs.RlooAdvantageConfig(std_of="rewards"):
            return deviation(rewards, config)
        case configs.RlooAdvantageConfig() | configs.ReinforcePPAdvantageConfig() | configs.GdpoAdvantageConfig():
            return deviation(advantages, config)
    raise AssertionError(config.type)


def _pooled(values: Sequence[Floats], groups: Sequence[GroupRewards]) -> Floats:
    """Those of all scored completions of the step."""
    return np.concatenate([np.zeros(0), *(v[group.scored_G] for v, group in zip(values, groups, strict=True))])
