"""Advantages of the G completions of one group, and what step-level ones take from each group."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.config import advantages as configs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Custom = Callable[[Floats, Ints], Any]
"""Rewards and lengths (P, G) to advantages (P, G)."""


@dataclass(frozen=True)
class GroupRewards:
    """What the advantages of one group are made from."""

    rewards_G: Floats
    """NaN: unscorable."""
    lengths_G: Ints
    rewards_FG: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """Per function, shaped; NaN where it did not apply. Only gdpo looks at these, and at the weights."""
    weights_F: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def scored_G(self) -> NDArray[np.bool_]:
        """Which completions have a reward."""
        return ~np.isnan(self.rewards_G)


def group_advantages(group: GroupRewards, config: configs.AdvantageConfig, custom: Custom | None = None) -> Floats:
    """(G,); those of unscorable completions are 0, as are all where fewer than two are scored.

    For a `level` of step: what the group by itself knows, before the step's deviation (`step.py`).

    Args:
        custom: the function of a `CustomAdvantageConfig`.

    Raises:
        ValueError: it returned something else than a finite number for each.
    """
    scored_G = group.scored_G
    advantages_G = np.zeros(scored_G.size)
    if scored_G.sum() > 1:
        advantages_G[scored_G] = _of_scored(group, config, custom)[scored_G]
    return advantages_G


def _of_scored(group: GroupRewards, config: configs.AdvantageConfig, custom: Custom | None) -> Floats:
    if isinstance(config, configs.GdpoAdvantageConfig):
        return sum_of_zscores(group, config)
    scored_G, advantages_G = group.scored_G, np.zeros(group.rewards_G.size)
    scores, lengths = group.rewards_G[scored_G], group.lengths_G[scored_G]
    if isinstance(config, configs.CustomAdvantageConfig):
        assert custom is not None
        advantages_G[scored_G] = check_advantages(custom(scores[None], lengths[None]), (1, scores.size))[0]
    elif np.ptp(scores) > 0:  # equal rewards give exactly 0, however the mean is rounded
        advantages_G[scored_G] = _FORMULAS[type(config)](scores, lengths, config)
    return advantages_G


def mean(rewards_G: Floats) -> Floats:
    """Reward − mean (Surogate's default, Dr. GRPO). [1, 0, 0, 0] → [.75, −.25, −.25, −.25]."""
    return np.asarray(rewards_G - rewards_G.mean(), np.float64)


def length_weighted_mean(rewards_G: Floats, lengths_G: Ints) -> Floats:
    """Reward − Σ(r·L) ÷ ΣL (Surogate, prime-rl). [1, .5, .8] with lengths [10, 20, 10] → [.3, −.2, .1]."""
    return np.asarray(rewards_G - (rewards_G * lengths_G).sum() / lengths_G.sum(), np.float64)


def zscore(rewards: Floats, config: configs.DeviationConfig) -> Floats:
    """(r − mean) / (std + eps) (GRPO); zeros for rewards that are all equal, and for fewer than two."""
    if rewards.size < 2 or np.ptp(rewards) == 0:
        return np.zeros(rewards.shape)
    return mean(rewards) / deviation(rewards, config)


def deviation(values: Floats, config: configs.DeviationConfig) -> float:
    """The std + eps, kind of std and eps as configured; of a single value the std is 0."""
    std = values.std(ddof=1 if config.std == "unbiased" else 0) if values.size > 1 else 0.0
    return float(std) + config.eps


def leave_one_out(rewards_G: Floats) -> Floats:
    """Reward − mean of the others (RLOO). [1, 0, 0, 0] → [1, −1/3, −1/3, −1/3]."""
    return mean(rewards_G) * rewards_G.size / (rewards_G.size - 1)


def max_rl(rewards_G: Floats) -> Floats:
    """(r − mean) ÷ mean, 0 where the mean is not positive (MaxRL). [1, 0, 0, 0] → [3, −1, −1, −1]."""
    middle = rewards_G.mean()
    return mean(rewards_G) / middle if middle > 0 else np.zeros(rewards_G.size)


def sum_of_zscores(group: GroupRewards, config: configs.DeviationConfig) -> Floats:
    """Weighted sum of each function's z-scores (GDPO's first half); a function adds 0 where it did not apply."""
    total_G = np.zeros(group.rewards_G.size)
    for rewards_G, weight in zip(group.rewards_FG, group.weights_F, strict=True):
        applies_G = ~np.isnan(rewards_G)
        total_G[applies_G] += weight * zscore(rewards_G[applies_G], config)
    return total_G


def _rloo(rewards_G: Floats, _: Ints, config: configs.RlooAdvantageConfig) -> Floats:
    advantages_G = leave_one_out(rewards_G)
    if config.scale != "group":
        return advantages_G
    return advantages_G / deviation(rewards_G if config.std_of == "rewards" else advantages_G, config)


def _reinforce_pp(rewards_G: Floats, _: Ints, config: configs.ReinforcePPAdvantageConfig) -> Floats:
    return zscore(rewards_G, config) if config.scale == "group" else mean(rewards_G)


def check_advantages(values: Any, shape: tuple[int, ...]) -> Floats:
    """What a function of a user returned, (P, G).

    Raises:
        ValueError, TypeError: another shape, or something that is no finite number.
    """
    advantages_PG = np.asarray(values, np.float64)
    if advantages_PG.shape != shape:
        raise ValueError(f"returned an array {advantages_PG.shape}, expected {shape}")
    if not np.isfinite(advantages_PG).all():
        raise ValueError(f"returned {advantages_PG[~np.isfinite(advantages_PG)][0]}, expected finite numbers")
    return advantages_PG


_FORMULAS: dict[type, Callable[[Floats, Ints, Any], Floats]] = {
    configs.MeanAdvantageConfig: lambda rewards_G, _, __: mean(rewards_G),
    configs.LengthWeightedMeanAdvantageConfig: lambda rewards_G, lengths_G, _: length_weighted_mean(
        rewards_G, lengths_G
    ),
    configs.ZScoreAdvantageConfig: lambda rewards_G, _, config: zscore(rewards_G, config),
    configs.BatchStdAdvantageConfig: lambda rewards_G, _, __: mean(rewards_G),
    configs.RlooAdvantageConfig: _rloo,
    configs.ReinforcePPAdvantageConfig: _reinforce_pp,
    configs.MaxRLAdvantageConfig: lambda rewards_G, _, __: max_rl(rewards_G),
}
