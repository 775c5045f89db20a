"""Staleness rules: lag (P4), the oldest version that may sample (P10), admission of tickets (P15), stale groups (P17).

The ledger drops a stale group when it composes a step (`ComposedSteps.compose_next`).

Step k turns version k−1 into version k. A group with its oldest token sampled by version v has lag k − 1 − v in step k:
0 if sampled by exactly the weights that the step starts from.

    groups_per_step 8, max_async_level 1, engines serve version 0:  16 ordinals may be issued (steps 1 and 2)
    engines switch to version 1:                                    24 (step 3); the new tickets need version ≥ 1

With packer.order arrival and oversampling_factor 1.5 a step asks for 12 groups and takes the first 8 that arrive. The
surplus of 4 is issued once: groups left over by a step are taken first by the next step.

    engines serve version 0:  20 ordinals may be issued; 4 of them train in step 3 at the earliest, with lag 2
    engines switch to 1:      28; tickets from ordinal 20 on need version ≥ 1
"""

import math
from collections.abc import Iterable


def lag_of(step: int, oldest_version: int) -> int:
    """Return the lag of a group in `step`: versions from its oldest token to the weights that the step starts from."""
    return step - 1 - oldest_version


def step_of(position: int, groups_per_step: int) -> int:
    """Return the step (1, 2, …) that takes the group at `position` (0, 1, …) among the undropped ordinals."""
    return position // groups_per_step + 1


def surplus_groups(groups_per_step: int, factor: float, max_async_level: int, max_off_policy_steps: int) -> int:
    """Return the groups asked for beyond the need of a step: ceil(groups × factor) − groups, with an upper bound.

    Bound: the last group asked for while version v is served must be trainable in its turn, so in step
    v + max_off_policy_steps + 1 at the latest. 8 groups, factor 1.5: 4. Factor 4, level 1, limit 2: 8, not 24.
    """
    wanted = math.ceil(groups_per_step * factor - 1e-9) - groups_per_step  # 10 × 1.1 is a little above 11 in binary
    return min(wanted, (max_off_policy_steps - max_async_level) * groups_per_step)


def tickets_allowed(
    num_issued: int,
    num_dropped: int,
    served_version: int | None,
    groups_per_step: int,
    max_async_level: int,
    max_steps: int,
    surplus: int = 0,
) -> int:
    """Return the number of train tickets that may be issued now (P15).

    The rule equals AReaL's staleness control: η is max_async_level, a batch is groups_per_step, accepted + running is
    issued − dropped (rejected rollouts do not count).

    Args:
        num_issued: train ordinals issued so far.
        num_dropped: issued train ordinals that will never be trained.
        served_version: newest version of an engine that takes new work. None: no engine does, so 0 tickets.
        groups_per_step, max_async_level, max_steps: as in the configuration.
        surplus: groups asked for beyond the need of a step (`surplus_groups`).
    """
    if served_version is None:
        return 0
    # all groups of the steps up to served_version + max_async_level + 1
    ahead = (served_version + max_async_level + 1) * groups_per_step + surplus
    return max(0, min(ahead, max_steps * groups_per_step) - (num_issued - num_dropped))


def min_version(position: int, groups_per_step: int, max_async_level: int, surplus: int = 0) -> int:
    """Return the oldest version that may sample the group at `position`, so that its lag stays ≤ max_async_level (P10).

    `tickets_allowed` admits the position as soon as this version is served, so no ticket waits for weights.
    """
    return max(0, step_of(position - surplus, groups_per_step) - 1 - max_async_level)


def newest_allowed(
    under_way: Iterable[int], next_position: int, groups_per_step: int, max_async_level: int, max_steps: int
) -> int | None:
    """Return the newest version that engines may serve with `strict_async_level` (P22); None: any.

    Engines stay at the version of the oldest group under way, then go on to that of the next group to issue. So the
    groups of step k are sampled by version k − 1 − max_async_level, or 0 in the first steps.

    Args:
        under_way: `min_version` of each train group that is neither settled nor dropped.
        next_position: position of the next group to issue.
        groups_per_step, max_async_level, max_steps: as in the configuration.
    """
    needed = list(under_way)
    if next_position < max_steps * groups_per_step:
        needed.append(min_version(next_position, groups_per_step, max_async_level))
    return min(needed, default=None)


def is_stale(step: int, oldest_version: int, max_off_policy_steps: int) -> bool:
    """Return whether a group is too old for `step` and must be dropped as `stale` (P17)."""
    return lag_of(step, oldest_version) > max_off_policy_steps
