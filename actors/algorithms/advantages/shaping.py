"""Rewards of several functions shaped and combined to one reward per completion. Axes: F functions, G completions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.config.data import ShapingConfig

Floats = NDArray[np.float64]


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
