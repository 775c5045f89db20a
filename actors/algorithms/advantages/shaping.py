"""Rewards of several functions shaped and combined to one reward per completion. Axes: F functions, G completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from schemas.config.data import RewardFunctionConfig, ShapingConfig
from schemas.config.environments import EnvironmentBase, EnvironmentConfig
from schemas.messages import RolloutGroup

Floats = NDArray[np.float64]


EnvironmentWeights = Mapping[str, Mapping[str, float]]
"""Weights of the rewards of environments, by label and name. An empty inner map: 1 for each."""


@dataclass(frozen=True)
class RewardColumns:
    """Weights and shapings of the columns of a group's rewards: those of the functions, then of the environment."""

    weights_F: Floats
    shapings: Sequence[ShapingConfig]
    environments: EnvironmentWeights = field(default_factory=dict)

    @classmethod
    def of_functions(cls, functions: Sequence[RewardFunctionConfig], environments: EnvironmentWeights) -> Self:
        """Return the columns of configured functions."""
        return cls(np.array([one.weight for one in functions]), functions, environments)

    def of(self, group: RolloutGroup) -> "RewardColumns":
        """Return the columns of a group: rewards of its environment have weight 1, or the weights given, else 0."""
        if not (names := group.environment_reward_names):
            return self
        given = self.environments.get(group.environment)
        weights = [given.get(name, 0.0) if given else 1.0 for name in names]
        shapings = [*self.shapings, *[ShapingConfig()] * len(names)]
        return RewardColumns(np.concatenate([self.weights_F, weights]), shapings, self.environments)


def environment_weights(environments: Sequence[EnvironmentConfig]) -> EnvironmentWeights:
    """Return the weights of the rewards of a run's environments."""
    return {one.label: one.reward_weights for one in environments if isinstance(one, EnvironmentBase)}


def shape(rewards: Floats, config: ShapingConfig) -> Floats:
    """Return (reward + bias) · scale, then clipped to ±clip (AReaL's order); NaN stays NaN, any shape."""
    shaped = (rewards + config.bias) * config.scale
    return shaped if config.clip is None else np.clip(shaped, -config.clip, config.clip)


def shape_functions(rewards_FG: Floats, configs: Sequence[ShapingConfig]) -> Floats:
    """Apply each function's own shaping to its rewards, (F, G) → (F, G)."""
    rows = [shape(rewards_G, config) for rewards_G, config in zip(rewards_FG, configs, strict=True)]
    return np.array(rows, np.float64).reshape(rewards_FG.shape)  # without functions an empty list would lose the axis G


def combine_rewards(rewards_FG: Floats, weights_F: Floats, *, none_as_zero: bool = False) -> Floats:
    """Sum the rewards of all functions with their weights; a function that returned None (NaN) is left out.

    Returns:
        (G,). A completion to which no function applied is unscorable, NaN (TRL), or 0 with none_as_zero (ms-swift).
    """
    applies_FG = ~np.isnan(rewards_FG)
    total_G = np.nansum(rewards_FG * weights_F[:, None], axis=0)
    return np.where(applies_FG.any(axis=0), total_G, 0.0 if none_as_zero else np.nan)
