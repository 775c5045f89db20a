"""Staleness, decided in one place: what lag is, what may be issued, what is too old (P4, P10, P15, P17).

Step k turns version k−1 into version k. A group whose oldest token was sampled by version v has lag k − 1 − v in step
k: 0 when it was sampled by exactly the weights that the step starts from.

    groups_per_step 8, max_async_level 1, engines serve version 0:  16 ordinals may be issued (steps 1 and 2)
    engines switch to version 1:                                    24 (step 3), whose tickets need version ≥ 1

With packer.order arrival and oversampling_factor 1.5 each step asks for 12 groups, of which the first 8 win. The
surplus of 4 is issued once and stays: what one step leaves over, the next one takes first.

    engines serve version 0:  20 ordinals may be issued; 4 of them train in step 3 at the earliest, with lag 2
    engines switch to 1:      28, whose tickets need version ≥ 1 from ordinal 20 on
"""

import math


def lag_of(step: int, oldest_version: int) -> int:
    """Versions between the weights that `step` starts from and the oldest token it trains on."""
    return step - 1 - oldest_version


def step_of(position: int, groups_per_step: int) -> int:
    """The step that takes the group at `position` (0, 1, …) among the undropped ordinals."""
    return position // groups_per_step + 1


def surplus_groups(groups_per_step: int, factor: float, max_async_level: int, max_off_policy_steps: int) -> int:
    """Groups that are asked for beyond those that a step needs: ceil(groups × factor) − groups.

    No more than could be trained if each came at its turn: the last one asked for while version v is served is in step
    v + (max_off_policy_steps + 1) at most. 8 groups, factor 1.5: 4; factor 4 with level 1 and limit 2: 8, not 24.
    """
    wanted = math.ceil(groups_per_step * factor - 1e-9) - groups_per_step  # 10 × 1.1 is a little more than 11
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
    """How many train tickets may be issued now (P15).

    AReaL's staleness control is the same rule: η is max_async_level, a batch is groups_per_step, accepted + running is
    issued − dropped (what was rejected does not count).

    Args:
        num_issued: train ordinals handed out so far.
        num_dropped: those of them that will never be trained.
        served_version: newest version of an engine that takes new work; None when there is none.
        surplus: groups asked for beyond a step's (`surplus_groups`).
    """
    if served_version is None:
        return 0
    ahead = (served_version + max_async_level + 1) * groups_per_step + surplus
    return max(0, min(ahead, max_steps * groups_per_step) - (num_issued - num_dropped))


def min_version(position: int, groups_per_step: int, max_async_level: int, surplus: int = 0) -> int:
    """The oldest version that may sample the group at `position`, so that its lag stays within the level (P10).

    It is the version at whose service the position is first allowed, so no ticket ever waits for weights.
    """
    return max(0, step_of(position - surplus, groups_per_step) - 1 - max_async_level)


def is_stale(step: int, oldest_version: int, max_off_policy_steps: int) -> bool:
    """Whether a group is too old for `step` and must be dropped (P17)."""
    return lag_of(step, oldest_version) > max_off_policy_steps
