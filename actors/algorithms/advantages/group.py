"""Advantages of the G completions of one group, and the per-group part of step-level advantages.

Public formulas take the scored completions of one group and return an array of the same shape, in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages.norm import normalised
from schemas.config import advantages as configs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Custom = Callable[[Floats, Ints], Any]
"""User function from rewards and lengths, both (P, G), to advantages (P, G)."""


@dataclass(frozen=True)
class GroupRewards:
    """Rewards and lengths of one group's completions, the input of every advantage."""

    rewards_G: Floats
    """Rewards, (G,); NaN marks an unscorable completion."""
    lengths_G: Ints
    """Tokens of each completion, (G,)."""
    rewards_FG: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """Rewards per function after shaping, (F, G); NaN where a function did not apply. Read by `gdpo` only."""
    weights_F: Floats = field(default_factory=lambda: np.zeros(0))
    """Weights of the functions, (F,). Read by `gdpo` only."""

    @property
    def scored_G(self) -> NDArray[np.bool_]:
        """Mask of the completions with a reward, (G,)."""
        return ~np.isnan(self.rewards_G)


def group_advantages(group: GroupRewards, config: configs.AdvantageConfig, custom: Custom | None = None) -> Floats:
    """Return the advantages of one group, (G,); 0 for unscorable completions, and for all if fewer than two are scored.

    For a type of level `step`, the result is the part before the division by the step's deviation (`step.py`).

    Args:
        group: rewards and lengths.
        config: type of the advantage and its keys.
        custom: the user's function of a `CustomAdvantageConfig`.

    Raises:
        ValueError: the user's function did not return a finite number for each scored completion.
    """
    scored_G = group.scored_G
    advantages_G = np.zeros(scored_G.size)
    # a single reward has nothing to be compared with
    if scored_G.sum() < 2:
        return advantages_G
    scores, lengths = group.rewards_G[scored_G], group.lengths_G[scored_G]
    if isinstance(config, configs.GdpoAdvantageConfig):
        # rewards per function have their own NaN, so all completions are passed
        advantages_G[scored_G] = sum_of_zscores(group, config)[scored_G]
    elif isinstance(config, configs.CustomAdvantageConfig):
        assert custom is not None
        # [None]: the user's function takes (P, G), here P = 1
        advantages_G[scored_G] = check_advantages(custom(scores[None], lengths[None]), (1, scores.size))[0]
    elif np.ptp(scores) > 0:  # equal rewards give exactly 0, however the mean is rounded
        advantages_G[scored_G] = _FORMULAS[type(config)](scores, lengths, config)
    return advantages_G


def mean(rewards_G: Floats) -> Floats:
    """Return r − mean, (G,) (Surogate's default, Dr. GRPO). [1, 0, 0, 0] → [.75, −.25, −.25, −.25]."""
    return np.asarray(rewards_G - rewards_G.mean(), np.float64)


def length_weighted_mean(rewards_G: Floats, lengths_G: Ints) -> Floats:
    """Return r − Σ(r·L) ÷ ΣL, (G,) (Surogate, prime-rl). [1, .5, .8] with lengths [10, 20, 10] → [.3, −.2, .1]."""
    return np.asarray(rewards_G - (rewards_G * lengths_G).sum() / lengths_G.sum(), np.float64)


def zscore(rewards: Floats, config: configs.DeviationConfig) -> Floats:
    """Return (r − mean) ÷ (std + eps) (GRPO); zeros if all rewards are equal or fewer than two are given."""
    if rewards.size < 2 or np.ptp(rewards) == 0:  # exact test: a std of rounding errors plus a tiny eps would blow up
        return np.zeros(rewards.shape)
    return mean(rewards) / deviation(rewards, config)


def deviation(values: Floats, config: configs.DeviationConfig) -> float:
    """Return std + eps, with `config.std` (unbiased or population) and `config.eps`; the std of a single value is 0."""
    # ddof 1 divides by n − 1 (torch's default), ddof 0 by n (numpy's)
    std = values.std(ddof=1 if config.std == "unbiased" else 0) if values.size > 1 else 0.0
    return float(std) + config.eps


def leave_one_out(rewards_G: Floats) -> Floats:
    """Return r − mean of the other rewards, (G,) (RLOO). [1, 0, 0, 0] → [1, −1/3, −1/3, −1/3]."""
    return mean(rewards_G) * rewards_G.size / (rewards_G.size - 1)  # r − (Σ − r)/(G − 1) = (r − Σ/G) · G/(G − 1)


def max_rl(rewards_G: Floats, eps: float) -> Floats:
    """Return (r − mean) ÷ (mean + eps), (G,), zeros if the mean is ≤ 0 (MaxRL). [1, 0, 0, 0], eps 0 → [3, −1, −1, −1].

    MaxRL is defined for rewards ≥ 0.
    """
    middle = rewards_G.mean()
    # a mean of 0 is a group that failed throughout: nothing to learn, and nothing to divide by
    return mean(rewards_G) / (middle + eps) if middle > 0 else np.zeros(rewards_G.size)


def sum_of_zscores(group: GroupRewards, config: configs.DeviationConfig) -> Floats:
    """Return the weighted sum of each function's z-scores, (G,), GDPO's first half (the second: `step_advantages`).

    A function adds 0 to completions where it did not apply (NaN), and its z-scores leave them out.
    """
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
    """Return the result of a user's function as an array in float64, checked for its shape and finite values.

    Raises:
        ValueError: the shape differs, a value is not finite, or a text is no number.
        TypeError: a value has no conversion to a number.
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
    # types of level step: the part within the group, `step_advantages` divides
    configs.BatchStdAdvantageConfig: lambda rewards_G, _, __: mean(rewards_G),
    # the group alone stands for the step; `step_advantages` replaces the values
    configs.NormAdvantageConfig: lambda rewards_G, _, config: normalised(
        rewards_G, np.zeros(rewards_G.size, np.int64), config
    ),
    configs.RlooAdvantageConfig: _rloo,
    configs.ReinforcePPAdvantageConfig: _reinforce_pp,
    configs.MaxRLAdvantageConfig: lambda rewards_G, _, config: max_rl(rewards_G, config.eps),
}
