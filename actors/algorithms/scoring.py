"""Scoring of one group: a pure function from the values of reward functions to rewards, advantages and loss mask.

    rewards_FG ─ shape each ─ weigh and sum ─ shape the sum ─▶ rewards_G ─ advantage ─▶ advantages_G, token_advantages_N
    finish reasons, token ids, logprobs ─ filters ─▶ found, masked_G ─▶ loss_mask_N

No user code and no I/O: the reward actor calls the user's functions before, and passes the values. Axes: F functions, G
completions, N tokens of all completions, S completions with a reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages import GroupRewards, StepRewards, group_advantages, token_advantages, without_ended
from actors.algorithms.advantages.group import Floats, Ints
from actors.algorithms.advantages.shaping import RewardColumns, combine_rewards, shape, shape_functions
from actors.algorithms.filters import filter_completions, mask_completions
from actors.algorithms.turns import turn_trees
from schemas.config.actors import RewardConfig
from schemas.messages import TURNS_REWARD, RolloutGroup


@dataclass(frozen=True)
class ScoringRules:
    """Settings of scoring, equal for all groups of a run."""

    config: RewardConfig
    columns: RewardColumns
    """Weights and shapings of the reward functions and of the rewards of environments."""
    vocab_size: int = 0
    """Size of the policy's vocabulary, for the gibberish filter; 0 without the filter."""


@dataclass(frozen=True)
class GroupScore:
    """Result of scoring one group."""

    shaped_FG: Floats
    """Values of the reward functions after shaping, (F, G). Functions that are only measured are left out."""
    rewards_G: Floats
    """Reward of each completion, (G,); NaN marks an unscorable completion."""
    advantages_G: NDArray[np.float32]
    """Advantage of each completion, (G,), or the mean over its tokens for a type of level `token`."""
    token_advantages_N: NDArray[np.float32]
    """Advantage of each token, (N,), for a type of level `token`; else empty."""
    loss_mask_N: NDArray[np.uint8]
    """Loss mask without the tokens of masked completions, (N,)."""
    found: Mapping[str, NDArray[np.bool_]]
    """Completions found by each filter, name → (G,). Empty for an evaluation."""
    masked_G: NDArray[np.bool_]
    """Completions masked out of the loss, (G,)."""

    @property
    def scored_G(self) -> NDArray[np.bool_]:
        """Mask of the completions with a reward, (G,)."""
        return ~np.isnan(self.rewards_G)


def score_group(
    group: RolloutGroup,
    rewards_FG: Floats,
    rules: ScoringRules,
    steps: Sequence[StepRewards] | None = None,
    custom_1S: Floats | None = None,
) -> GroupScore:
    """Score a group from the values of the user's functions. Equal arguments give equal bits.

    Two functions of weights 1 and 2 return [1, 0] and [½, ½]: rewards [2, 1], advantages of type `mean` [½, −½].

    Args:
        group: completions as sampled.
        rewards_FG: values of the reward functions, then of the environment; NaN for None. Rows after these are measured
            and not rewarded.
        rules: settings of the run.
        steps: steps (end, reward) of each completion, for `process` and `gae`. None: no function of `reward.steps`.
        custom_1S: values of the user's advantage function on `custom_arguments`; None for built-in advantages.
    """
    rewards = _rewards(group, rewards_FG, rules)
    # for an evaluation, which is not trained on: no filter, no advantage
    found: dict[str, NDArray[np.bool_]] = {}
    masked_G = np.zeros(group.num_completions, np.bool_)
    advantages_G, token_advantages_N = np.zeros(group.num_completions), np.zeros(0)
    if group.purpose != "eval":
        found, masked_G = filter_completions(group, rules.config, rules.vocab_size)
        at_end = _rewards(group, rewards_FG, rules, with_turns=False) if rules.config.steps_are_turns else rewards
        advantages_G, token_advantages_N = _advantages(group, rewards, at_end.rewards_G, rules.config, steps, custom_1S)
    return GroupScore(
        shaped_FG=rewards.rewards_FG,
        rewards_G=rewards.rewards_G,
        advantages_G=advantages_G.astype(np.float32),
        token_advantages_N=token_advantages_N.astype(np.float32),
        # masked here and not in the trainer: the packer digests and stores the payload that is trained, so a replay
        # gets the same mask, also with another filter configured by then
        loss_mask_N=mask_completions(group.loss_mask, group.completion_offsets, masked_G),
        found=found,
        masked_G=masked_G,
    )


def custom_arguments(group: RolloutGroup, rewards_FG: Floats, rules: ScoringRules) -> tuple[Floats, Ints] | None:
    """Return rewards and lengths for the user's advantage function, (1, S) each; None if the function is not needed.

    Args:
        group, rewards_FG, rules: as for `score_group`.
    """
    rewards = _rewards(group, rewards_FG, rules)
    scored_G = rewards.scored_G
    # a single reward has nothing to be compared with, see `group_advantages`
    if group.purpose == "eval" or scored_G.sum() < 2:
        return None
    return rewards.rewards_G[scored_G][None], rewards.lengths_G[scored_G][None]


def _rewards(group: RolloutGroup, rewards_FG: Floats, rules: ScoringRules, *, with_turns: bool = True) -> GroupRewards:
    """Return a reward per completion: each function's values shaped and weighted, then the sum shaped.

    Args:
        group, rewards_FG, rules: as for `score_group`.
        with_turns: whether the sum of the rewards of turns counts. If not, it is 0 where there is one.
    """
    columns = rules.columns.of(group)
    shaped_FG = shape_functions(rewards_FG[: columns.weights_F.size], columns.shapings)
    # a figure of the environment that has no weight must not make a reward of 0 where nothing else was measured
    measured_F = (columns.weights_F == 0) & (np.arange(columns.weights_F.size) >= rules.columns.weights_F.size)
    counted_FG = np.where(measured_F[:, None], np.nan, shaped_FG)
    if not with_turns and TURNS_REWARD in group.environment_reward_names:
        turns_G = counted_FG[rules.columns.weights_F.size + group.environment_reward_names.index(TURNS_REWARD)]
        turns_G[~np.isnan(turns_G)] = 0.0
    total_G = combine_rewards(counted_FG, columns.weights_F, none_as_zero=rules.config.none_as_zero)
    # also with none_as_zero: a failure of the environment is never a reward
    total_G = np.where(group.failed_G, np.nan, total_G)
    return GroupRewards(shape(total_G, rules.config.shaping), group.lengths_G, shaped_FG, columns.weights_F)


def _advantages(
    group: RolloutGroup,
    rewards: GroupRewards,
    at_end_G: Floats,
    config: RewardConfig,
    steps: Sequence[StepRewards] | None,
    custom_1S: Floats | None,
) -> tuple[Floats, Floats]:
    """Return the advantages per completion, (G,), and per token, (N,) or empty.

    Args:
        at_end_G: rewards at the end of each completion, for `gae`: without those of turns that are steps.
        group, rewards, config, steps, custom_1S: as for `score_group`.
    """
    if config.advantage.level != "token":
        # the user's function has been called on these very arguments, so its values stand for a call
        custom = None if custom_1S is None else lambda rewards_1S, lengths_1S: custom_1S
        advantages_G = group_advantages(rewards, config.advantage, custom)
        return without_ended(group, advantages_G, config), np.zeros(0)
    offsets = group.completion_offsets
    zeroed_G = group.truncated_G if config.mask_no_eos_with_zero else None
    trees = None
    if config.advantage.type == "process" and config.steps_are_turns:
        trees = turn_trees(group, config.advantage.discount_along)
    # the mask as sampled: GAE places rewards on the tokens that the policy wrote, whatever the filters say
    advantages_N = token_advantages(at_end_G, offsets, group.loss_mask, config.advantage, steps, zeroed_G, trees)
    if not group.is_sampled_whole:
        advantages_N = np.where(group.sampled_N, advantages_N, 0.0)
    # metrics and packing order want a single number: the mean over all tokens. reduceat would give an empty completion
    # the next one's value, but no completion is empty
    return np.add.reduceat(advantages_N, offsets[:-1]) / group.lengths_G, advantages_N
