"""From the rewards of one group to advantages. numpy in, numpy out; the axes are F functions and G completions."""

import numpy as np
from numpy.typing import NDArray

from schemas.config.advantages import AdvantageConfig, ZScoreAdvantageConfig

Floats = NDArray[np.float64]


def combine_rewards(rewards_FG: Floats, weights_F: Floats) -> Floats:
    """Weighted sum over reward functions; a function that returned None (NaN) is left out of the sum.

    Returns:
        (G,), NaN where no function applied: the completion is unscorable.
    """
    applies_FG = ~np.isnan(rewards_FG)
    total_G = np.nansum(rewards_FG * weights_F[:, None], axis=0)
    return np.where(applies_FG.any(axis=0), total_G, np.nan)


def compute_advantages(rewards_G: Floats, config: AdvantageConfig) -> NDArray[np.float32]:
    """Advantages of one group; unscorable completions (NaN) get 0 and stay out of mean and deviation."""
    scored_G = ~np.isnan(rewards_G)
    advantages_G = np.zeros(rewards_G.shape, np.float64)
    scores = rewards_G[scored_G]
    if scores.size > 1 and np.ptp(scores) > 0:  # equal rewards give exactly 0, however the mean is rounded
        advantages_G[scored_G] = zscore(scores, config) if isinstance(config, ZScoreAdvantageConfig) else mean(scores)
    return advantages_G.astype(np.float32)


def mean(rewards_G: Floats) -> Floats:
    """Reward − mean (Surogate's default, Dr. GRPO). [1, 0, 0, 0] → [.75, −.25, −.25, −.25]."""
    return np.asarray(rewards_G - rewards_G.mean(), np.float64)


def zscore(rewards_G: Floats, config: ZScoreAdvantageConfig) -> Floats:
    """(r − mean) / (std + eps) (GRPO), kind of std and eps as configured; not for rewards that are all equal."""
    std = rewards_G.std(ddof=1 if config.std == "unbiased" else 0)
    return np.asarray((rewards_G - rewards_G.mean()) / (std + config.eps), np.float64)
