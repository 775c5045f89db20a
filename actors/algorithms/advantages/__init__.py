"""From rewards to advantages. numpy in, numpy out; the axes are P groups, G completions, F functions, N or T tokens.

Group- and token-level ones are computed by the reward actor, step-level ones by the packer when it builds the batches
of a step: `with_step_advantages`, a pure function of its groups and the settings (P18). `compute_advantages` and
`compute_token_advantages` do the same on plain arrays.

To add one: a config class in `schemas/config/advantages.py`, a function in `group.py`, `step.py` or `tokens.py`.
"""

from collections.abc import Sequence

import numpy as np

from actors.algorithms.advantages.group import Custom, Floats, GroupRewards, Ints, check_advantages, group_advantages
from actors.algorithms.advantages.step import step_advantages
from actors.algorithms.advantages.tokens import Steps, gae_of_group, process
from actors.algorithms.shaping import combine_rewards, shape_functions
from schemas.config.actors import RewardConfig
from schemas.config.advantages import AdvantageConfig, GaeAdvantageConfig, ProcessAdvantageConfig
from schemas.messages import ScoredGroup

NEEDS = {
    "length_weighted_mean": ("lengths_PG",),
    "gdpo": ("rewards_PFG",),
    "custom": ("lengths_PG", "function"),
}
"""By type, what it looks at besides the rewards."""


def compute_advantages(
    rewards_PG: Floats | None,
    config: AdvantageConfig,
    *,
    lengths_PG: Ints | None = None,
    rewards_PFG: Floats | None = None,
    weights_F: Floats | None = None,
    function: Custom | None = None,
) -> Floats:
    """What reward actor and packer make of the rewards of one training step, (P, G) in float64.

        compute_advantages([[1, 0, 0, 0]], MaxRLAdvantageConfig())         # [[3, −1, −1, −1]]

    Args:
        rewards_PG: rewards of P groups, a row each; NaN: unscorable, advantage 0, in no mean and no deviation. So
            groups of fewer completions are filled up with NaN. None: the weighted sum of rewards_PFG.
        config: any but `process` and `gae`, which `compute_token_advantages` is for.
        lengths_PG: tokens of each completion, for `length_weighted_mean` and `custom`.
        rewards_PFG: rewards of each of F functions (shaped, if they are), for `gdpo`; NaN where one does not apply.
        weights_F: the functions' weights, 1 where not given.
        function: that of `custom`, with its kwargs bound; called for one group at a time, P = 1.

    Raises:
        ValueError: what the type needs is not given.
    """
    if config.level == "token":
        raise ValueError(f"{config.type} has an advantage per token: use compute_token_advantages")
    given = {"lengths_PG": lengths_PG, "rewards_PFG": rewards_PFG, "function": function}
    missing = [name for name in NEEDS.get(config.type, ()) if given[name] is None]
    if missing or (rewards_PG is None and rewards_PFG is None):
        raise ValueError(f"{config.type} needs {' and '.join(missing) or 'rewards_PG or rewards_PFG'}")
    groups = _groups(rewards_PG, lengths_PG, rewards_PFG, weights_F)
    if function is not None:
        return np.array([group_advantages(group, config, function) for group in groups])
    return np.array(step_advantages(groups, config))


def compute_token_advantages(
    rewards_PG: Floats, config: AdvantageConfig, lengths_PG: Ints, steps_PG: Sequence[Sequence[Steps]] | None = None
) -> Floats:
    """What the reward actor makes of rewards and steps by `process` and `gae`, (P, G, T), 0 behind a completion's end.

    Args:
        rewards_PG: terminal rewards; NaN: unscorable. `process` does not look at them.
        config: `process` or `gae`.
        lengths_PG: tokens of each completion, at least 1, all in the loss; the longest has T.
        steps_PG: for each completion its steps (end, reward), the end behind the last token of the step.

    Raises:
        ValueError: `process` without steps, or another type.
    """
    rewards_PG, lengths_PG = np.asarray(rewards_PG, np.float64), np.asarray(lengths_PG, np.int64)
    advantages_PGT = np.zeros((*lengths_PG.shape, int(lengths_PG.max(initial=0))))
    for p, (rewards_G, lengths_G) in enumerate(zip(rewards_PG, lengths_PG, strict=True)):
        offsets = np.append(0, np.cumsum(lengths_G))
        mask_N = np.ones(int(offsets[-1]), np.uint8)
        advantages_N = token_advantages(rewards_G, offsets, mask_N, config, None if steps_PG is None else steps_PG[p])
        for g, part in enumerate(np.split(advantages_N, offsets[1:-1])):
            advantages_PGT[p, g, : part.size] = part
    return advantages_PGT


def token_advantages(
    rewards_G: Floats,
    offsets: Ints,
    loss_mask_N: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]",
    config: AdvantageConfig,
    steps: Sequence[Steps] | None,
) -> Floats:
    """(N,), for the types of level `token`; see `tokens.py`."""
    if isinstance(config, GaeAdvantageConfig):
        return gae_of_group(rewards_G, offsets, loss_mask_N, config, steps)
    if not isinstance(config, ProcessAdvantageConfig):
        raise ValueError(f"{config.type} has an advantage per completion: use compute_advantages")
    if steps is None:
        raise ValueError("process needs steps")
    return process(steps, np.diff(offsets), config)


def with_step_advantages(groups: Sequence[ScoredGroup], reward: RewardConfig) -> list[ScoredGroup]:
    """The groups of a step with the advantages that they have in it: a pure function of them and the settings (P18)."""
    if reward.advantage.level != "step":
        return list(groups)
    weights_F = np.array([function.weight for function in reward.functions])
    rewards = [
        GroupRewards(group.rewards_G, group.lengths_G, shape_functions(group.rewards_FG, reward.functions), weights_F)
        for group in groups
    ]
    return [
        group.model_copy(update={"advantages_G": advantages_G.astype(np.float32)})
        for group, advantages_G in zip(groups, step_advantages(rewards, reward.advantage), strict=True)
    ]


def _groups(
    rewards_PG: Floats | None, lengths_PG: Ints | None, rewards_PFG: Floats | None, weights_F: Floats | None
) -> list[GroupRewards]:
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
    "Steps",
    "check_advantages",
    "compute_advantages",
    "compute_token_advantages",
    "group_advantages",
    "step_advantages",
    "token_advantages",
    "with_step_advantages",
]
