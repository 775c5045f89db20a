"""Advantages per token: process supervision and generalised advantage estimation (GAE).

A step of a completion is a pair (end, reward). `end` is the index after the step's last token: (3, 1.0) ends with
token 2.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages.group import Floats, Ints, mean, zscore
from schemas.config import advantages as configs

StepRewards = Sequence[tuple[int, float]]
"""Steps (end, reward) of one completion."""

AREAL_NORM = configs.ZScoreAdvantageConfig(eps=1e-5)
"""z-score of AReaL's reward_norm: unbiased deviation, eps 1e-5."""


class Turn(NamedTuple):
    """Sampled tokens of a turn, [start, end) in the tokens of its completion."""

    start: int
    end: int
    parent: int | None
    """Place of the turn that it continues, in the list of the completion's turns; None: it continues none."""


def process(
    steps: Sequence[StepRewards],
    lengths_G: Ints,
    config: configs.DeviationConfig,
    discount: float = 1.0,
    trees: Sequence[Sequence[Turn]] | None = None,
) -> Floats:
    """Return at each token the sum of normalised rewards of the steps that end there or later, (N,) (DeepSeekMath).

    Rewards are z-scores over all steps of the group. Steps [(2, 1), (3, 0)] and [(2, 0), (3, 1)] have z-scores ±1
    (population, eps 0), so tokens have [0, 0, −1 | 0, 0, 1].

    Args:
        steps: steps of each completion; a completion without steps has advantage 0.
        lengths_G: tokens of each completion.
        config: kind of deviation, and eps.
        discount: factor of a step's reward for each step before it. With ½, the first steps above have ½ and the
            second −½ on the tokens of the first step.
        trees: turns of each completion whose conversation has branches, no turns for any other. The steps later than
            a turn are then those of the turns that continue it. None: no completion has branches.
    """
    rewards = np.array([reward for of_one in steps for _, reward in of_one], np.float64)
    scores = iter(zscore(rewards, config).tolist())
    parts = [np.zeros(0)]
    for number, (of_one, length) in enumerate(zip(steps, lengths_G.tolist(), strict=True)):
        mine = [(end, next(scores)) for end, _ in of_one]
        if trees is not None and trees[number]:
            parts.append(_along(trees[number], mine, length, discount))
        elif discount != 1.0:
            parts.append(_discounted(sorted(mine), length, discount))
        else:
            rewards_T = np.zeros(length)
            # `+=` would keep one of two steps with equal ends
            np.add.at(rewards_T, [end - 1 for end, _ in mine], [score for _, score in mine])
            parts.append(rewards_T[::-1].cumsum()[::-1])
    return np.concatenate(parts)


def _discounted(steps: StepRewards, length: int, discount: float) -> Floats:
    """Return at each token the discounted sum of the scores of its own step and of later ones, (T,)."""
    part, latest = np.zeros(length), 0.0
    for number in range(len(steps) - 1, -1, -1):  # backwards: a sum needs that of the next step
        latest = steps[number][1] + discount * latest
        start = steps[number - 1][0] if number else 0
        part[start : steps[number][0]] = latest
    return part


def _along(turns: Sequence[Turn], steps: StepRewards, length: int, discount: float) -> Floats:
    """Return the same where conversations branch: later steps are those of the turns that continue a turn, (T,)."""
    part, scores = np.zeros(length), dict[int, list[float]]()
    for end, score in steps:
        scores.setdefault(end, []).append(score)
    later = [0.0] * len(turns)
    for place in range(len(turns) - 1, -1, -1):  # backwards: a turn is sampled before those that continue it
        turn = turns[place]
        total = later[place]
        for score in reversed(scores.get(turn.end, [])):
            total = score + discount * total
        part[turn.start : turn.end] = total
        if turn.parent is not None:
            later[turn.parent] += total
    return part


def gae(rewards_T: Floats, discount: float, gae_lambda: float, values_T: Floats | None = None) -> Floats:
    """Return A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γ·V_{t+1} − V_t, (T,) (GAE, Schulman et al. 2016).

    A and V are 0 after the last token. Without values, a reward of 1 at the last of three tokens and γλ = ½:
    [¼, ½, 1].

    Args:
        rewards_T: reward at each token.
        discount, gae_lambda: γ and λ, per token.
        values_T: value estimates. None: 0, as without a critic.
    """
    values_T = np.zeros(rewards_T.size) if values_T is None else values_T
    deltas_T = rewards_T + discount * np.append(values_T[1:], 0.0)[: rewards_T.size] - values_T
    advantages, latest = [], 0.0
    for delta in deltas_T[::-1].tolist():  # backwards: A_t needs A_{t+1}
        latest = delta + discount * gae_lambda * latest
        advantages.append(latest)
    return np.array(advantages[::-1], np.float64)


def gae_of_group(
    rewards_G: Floats,
    offsets: Ints,
    loss_mask_N: NDArray[np.uint8],
    config: configs.GaeAdvantageConfig,
    steps: Sequence[StepRewards] | None = None,
    zeroed_G: NDArray[np.bool_] | None = None,
) -> Floats:
    """Return GAE over the loss tokens of one group, (N,), without a critic.

    Tokens outside the loss are skipped (no discount is applied for them) and have 0, as have unscorable completions.

    Args:
        rewards_G: rewards, placed at the last loss token of each completion; NaN marks an unscorable completion.
        offsets: bounds of the completions in the tokens, (G + 1,).
        loss_mask_N: 1 for tokens in the loss.
        config: γ, λ, and the normalisation of rewards within the group.
        steps: further rewards (end, reward), placed at the last loss token before each end.
        zeroed_G: mask of completions with the reward set to 0 after normalisation. None: no completion.
    """
    advantages_N = np.zeros(loss_mask_N.size)
    scored_G, terminal_G = ~np.isnan(rewards_G), rewards_G.copy()
    if config.reward_norm == "mean" and scored_G.any():  # the mean of nothing would be a warning and NaN
        terminal_G[scored_G] = mean(rewards_G[scored_G])
    if config.reward_norm == "zscore":
        terminal_G[scored_G] = zscore(rewards_G[scored_G], AREAL_NORM)
    if zeroed_G is not None:
        # NaN must stay: the loop below skips unscorable completions by it
        terminal_G = np.where(zeroed_G & ~np.isnan(terminal_G), 0.0, terminal_G)
    for g, (start, end) in enumerate(pairwise(offsets.tolist())):
        places = np.flatnonzero(loss_mask_N[start:end])
        if np.isnan(terminal_G[g]) or places.size == 0:
            continue
        rewards_T = np.zeros(places.size)
        rewards_T[-1] = terminal_G[g]
        for step_end, reward in steps[g] if steps is not None else ():
            before = np.searchsorted(places, step_end)
            rewards_T[before - 1] += reward if before else 0.0  # no loss token precedes that could have earned it
        advantages_N[start + places] = gae(rewards_T, config.discount, config.gae_lambda)
    return advantages_N


def reward_discount(config: configs.AdvantageConfig) -> float:
    """Return γλ, the factor of a reward for each loss token between; 1 for advantages other than `gae`."""
    return config.discount * config.gae_lambda if isinstance(config, configs.GaeAdvantageConfig) else 1.0
