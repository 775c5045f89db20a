"""Advantages computed from rewards, in numpy. Axes: P groups, G completions, F reward functions, N or T tokens.

The reward actor computes advantages of level `group` and `token`. The packer computes those of level `step` when it
builds the batches of a step (`with_step_advantages`), so that batches stay a pure function of groups and settings
(P18). `compute_advantages` and `compute_token_advantages` do the same on plain arrays.

A new advantage needs a config class in `schemas/config/advantages.py` and a function in `group.py`, `step.py` or
`tokens.py`.
"""

from collections.abc import Sequence

import numpy as np

from actors.algorithms.advantages.group import (
    Custom,
    Floats,
    GroupRewards,
    Ints,
    check_advantages,
    group_advantages,
)
from actors.algorithms.advantages.norm import with_adv_norm
from actors.algorithms.advantages.shaping import (
    EnvironmentWeights,
    RewardColumns,
    combine_rewards,
    shape_functions,
)
from actors.algorithms.advantages.step import step_advantages
from actors.algorithms.advantages.tokens import StepRewards, Turn, gae_of_group, process
from schemas.config.actors import RewardConfig
from schemas.config.advantages import AdvantageConfig, GaeAdvantageConfig, ProcessAdvantageConfig
from schemas.messages import RolloutGroup, ScoredGroup

NEEDS = {
    "length_weighted_mean": ("lengths_PG",),
    "gdpo": ("rewards_PFG",),
    "custom": ("lengths_PG", "function"),
}
"""Arguments of `compute_advantages` that an advantage type requires besides the rewards."""


def compute_advantages(
    rewards_PG: Floats | None,
    config: AdvantageConfig,
    *,
    lengths_PG: Ints | None = None,
    rewards_PFG: Floats | None = None,
    weights_F: Floats | None = None,
    function: Custom | None = None,
) -> Floats:
    """Return the advantages of one training step, (P, G) in float64, as reward actor and packer compute them.

        compute_advantages([[1, 0, 0, 0]], MaxRLAdvantageConfig())         # [[3, −1, −1, −1]]

    Args:
        rewards_PG: rewards, a row per group. NaN marks an unscorable completion: advantage 0, left out of all means
            and deviations. Pad groups with fewer completions with NaN. None: the weighted sum of rewards_PFG.
        config: any type except `process` and `gae`; these have an advantage per token (`compute_token_advantages`).
        lengths_PG: tokens of each completion, for `length_weighted_mean` and `custom`.
        rewards_PFG: rewards of each function after shaping, for `gdpo`; NaN where a function does not apply.
        weights_F: weights of the functions. None: 1 each.
        function: the user's function for `custom`, with its kwargs bound; called with P = 1, a group at a time.

    Raises:
        ValueError: an argument that the type needs is missing, or the type has an advantage per token.
    """
    if config.level == "token":
        raise ValueError(f"{config.type} has an advantage per token: use compute_token_advantages")
    given = {"lengths_PG": lengths_PG, "rewards_PFG": rewards_PFG, "function": function}
    missing = [name for name in NEEDS.get(config.type, ()) if given[name] is None]
    if missing or (rewards_PG is None and rewards_PFG is None):
        raise ValueError(f"{config.type} needs {' and '.join(missing) or 'rewards_PG or rewards_PFG'}")
    groups = _groups(rewards_PG, lengths_PG, rewards_PFG, weights_F)
    if function is not None:
        # group by group, as the reward actor calls a custom function
        return np.array([group_advantages(group, config, function) for group in groups])
    return np.array(step_advantages(groups, config))


def compute_token_advantages(
    rewards_PG: Floats,
    config: AdvantageConfig,
    lengths_PG: Ints,
    steps_PG: Sequence[Sequence[StepRewards]] | None = None,
) -> Floats:
    """Return the advantages per token of `process` or `gae`, (P, G, T) in float64, 0 after a completion's end.

    Args:
        rewards_PG: terminal rewards; NaN marks an unscorable completion. `process` does not read the rewards.
        config: `process` or `gae`.
        lengths_PG: tokens of each completion, at least 1, all in the loss; T is the greatest length.
        steps_PG: steps (end, reward) of each completion; `end` is the index after the last token of the step.

    Raises:
        ValueError: `process` without steps, or a type with an advantage per completion.
    """
    rewards_PG, lengths_PG = np.asarray(rewards_PG, np.float64), np.asarray(lengths_PG, np.int64)
    advantages_PGT = np.zeros((*lengths_PG.shape, int(lengths_PG.max(initial=0))))
    for p, (rewards_G, lengths_G) in enumerate(zip(rewards_PG, lengths_PG, strict=True)):
        offsets = np.append(0, np.cumsum(lengths_G))
        mask_N = np.ones(int(offsets[-1]), np.uint8)  # plain arrays have no tool output, so all tokens are in the loss
        advantages_N = token_advantages(rewards_G, offsets, mask_N, config, None if steps_PG is None else steps_PG[p])
        for g, part in enumerate(np.split(advantages_N, offsets[1:-1])):
            advantages_PGT[p, g, : part.size] = part
    return advantages_PGT


def token_advantages(
    rewards_G: Floats,
    offsets: Ints,
    loss_mask_N: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]",
    config: AdvantageConfig,
    steps: Sequence[StepRewards] | None,
    zeroed_G: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None" = None,
    trees: Sequence[Sequence[Turn]] | None = None,
) -> Floats:
    """Return the advantages of one group's tokens, (N,), for types of level `token`; arguments as in `tokens.py`.

    Raises:
        ValueError: `process` without steps, or a type with an advantage per completion.
    """
    if isinstance(config, GaeAdvantageConfig):
        return gae_of_group(rewards_G, offsets, loss_mask_N, config, steps, zeroed_G)
    if not isinstance(config, ProcessAdvantageConfig):
        raise ValueError(f"{config.type} has an advantage per completion: use compute_advantages")
    if steps is None:
        raise ValueError("process needs steps")
    return process(steps, np.diff(offsets), config, config.discount, trees)


def with_step_advantages(
    groups: Sequence[ScoredGroup], reward: RewardConfig, weights: EnvironmentWeights | None = None
) -> list[ScoredGroup]:
    """Return the groups of a step with step-level advantages and `reward.adv_norm` applied.

    The result is a pure function of groups and settings (P18), so a batch can be rebuilt at any time.

    Args:
        groups: groups of the step.
        reward: functions and advantage.
        weights: weights of the rewards of environments, by label and name.
    """
    found = list(groups)
    # advantages of the other levels came with the groups
    if reward.advantage.level == "step":
        # shaped again from the raw values: a scored group does not carry the shaped ones
        columns = RewardColumns.of_functions(reward.functions, weights or {})
        rewards = [
            GroupRewards(g.rewards_G, g.lengths_G, shape_functions(g.rewards_FG, of_one.shapings), of_one.weights_F)
            for g, of_one in ((g, columns.of(g)) for g in groups)
        ]
        found = [
            group.model_copy(update={"advantages_G": without_ended(group, advantages_G, reward).astype(np.float32)})
            for group, advantages_G in zip(groups, step_advantages(rewards, reward.advantage), strict=True)
        ]
    if reward.adv_norm is None:
        return found
    # `process` takes its rewards from steps, so a NaN reward of the functions does not make a completion unscorable
    process_has_all = isinstance(reward.advantage, ProcessAdvantageConfig)
    return with_adv_norm(found, [~np.isnan(g.rewards_G) | process_has_all for g in groups], reward.adv_norm)


def without_ended(group: RolloutGroup, advantages_G: Floats, reward: RewardConfig) -> Floats:
    """Return the advantages, (G,), set to 0 for truncated completions if `reward.mask_no_eos_with_zero` is set.

    Source: AReaL 1.0.4, `areal/trainer/ppo/actor.py` (PPOActor), which sets the already normalised reward to 0.
    """
    return np.where(group.truncated_G, 0.0, advantages_G) if reward.mask_no_eos_with_zero else advantages_G


def _groups(
    rewards_PG: Floats | None, lengths_PG: Ints | None, rewards_PFG: Floats | None, weights_F: Floats | None
) -> list[GroupRewards]:
    # without rewards per function, the reward counts as the only function: (P, G) → (P, 1, G)
    rewards_PFG = np.asarray(rewards_PG)[:, None] if rewards_PFG is None else np.asarray(rewards_PFG)
    rewards_PFG = rewards_PFG.astype(np.float64)
    weights_F = np.ones(rewards_PFG.shape[1]) if weights_F is None else np.asarray(weights_F, np.float64)
    if rewards_PG is None:
        rewards_PG = np.array([combine_rewards(rewards_FG, weights_F) for rewards_FG in rewards_PFG])
    rewards_PG = np.asarray(rewards_PG, np.float64)
    lengths_PG = np.ones(rewards_PG.shape, np.int64) if lengths_PG is None else np.asarray(lengths_PG, np.int64)
    return [
        GroupRewards(rewards_G, lengths_G, rewards_FG, weights_F)
        for rewards_G, lengths_G, rewards_FG in zip(rewards_PG, lengths_PG, rewards_PFG, strict=True)
    ]


__all__ = [
    "GroupRewards",
    "StepRewards",
    "Turn",
    "check_advantages",
    "compute_advantages",
    "compute_token_advantages",
    "group_advantages",
    "step_advantages",
    "token_advantages",
    "with_step_advantages",
    "without_ended",
]
