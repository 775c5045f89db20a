"""Fair shares: tickets of several environments of different speed, with `packer.order: arrival`.

A group is *overtaken* once a group of another environment with a later ordinal has settled. An environment is *slow*
while at least half of its groups under way are overtaken. Groups of slow environments need no place in the window of
tickets (P15): other groups are issued in their place, up to the allowance. Each environment has a limit of groups under
way, its share. A slow environment therefore fills neither the window nor the sampling slots.

    8 groups a step, level 1, max_off_policy_steps 8:  window 16, allowance 56
    two environments of equal weight, 16 sampling slots: at most 8 groups of each under way
    8 groups of the slow one are under way:            16 groups of the fast one may be under way or wait for a step

The price is lag, and the limit of lag stays: a step that would leave a group under way too old for every later step
waits for this group (`must_wait`).
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence


def allowance_of(groups_per_step: int, max_async_level: int, max_off_policy_steps: int, surplus: int) -> int:
    """Return how many groups of slow environments need no place in the window.

    Bound: a group that waits behind all of them is still trainable, as for `surplus_groups`.
    """
    return (max_off_policy_steps - max_async_level) * groups_per_step - surplus


def limits_of(shares: Mapping[str, float], window: int, allowance: int, slots: int) -> dict[str, int]:
    """Return the limit of groups under way of each environment, at least 1.

    Args:
        shares: share of the training examples of each environment; the sum is 1.
        window: groups that may be under way or wait for a step.
        allowance: groups of slow environments that need no place in the window.
        slots: groups that all rollout actors sample at the same time.
    """
    # 1e-9: a third of 3 is a little below 1 in binary
    return {
        label: max(1, int(min(share * (window + allowance), allowance, share * slots) + 1e-9))
        for label, share in shares.items()
    }


def overtaken_of(under_way: Mapping[str, Sequence[int]], newest_settled: Mapping[str, int]) -> dict[str, int]:
    """Return the number of overtaken groups of each environment.

    Args:
        under_way: ordinals of the groups under way, ascending.
        newest_settled: greatest settled ordinal.
    """
    return {
        label: bisect_left(ordinals, max((n for other, n in newest_settled.items() if other != label), default=-1))
        for label, ordinals in under_way.items()
    }


def is_slow(under_way: int, overtaken: int) -> bool:
    """Return whether an environment with these numbers of groups is slow."""
    return 0 < under_way <= 2 * overtaken


def slow_groups(under_way: Mapping[str, int], overtaken: Mapping[str, int]) -> int:
    """Return the number of groups under way of slow environments."""
    return sum(groups for label, groups in under_way.items() if is_slow(groups, overtaken[label]))


def drawable(limits: Mapping[str, int], under_way: Mapping[str, int], overtaken: Mapping[str, int]) -> list[str]:
    """Return the environments of which another group may be issued now.

    These are the environments with fewer groups under way than the limit. Of a slow one only as many are issued that it
    stays slow, since its groups would need places otherwise. If there is none, then the environments that are not slow:
    a fast one takes what the window has left.
    """
    groups = {label: (under_way.get(label, 0), overtaken.get(label, 0)) for label in limits}
    slow = {label for label, numbers in groups.items() if is_slow(*numbers)}
    found = [label for label, (mine, late) in groups.items() if mine < limits[label]
             and (label not in slow or is_slow(mine + 1, late))]  # fmt: skip
    return found or [label for label in limits if label not in slow]


def last_step_of(oldest_version: int, max_off_policy_steps: int) -> int:
    """Return the last step that may train a group with this oldest version."""
    return oldest_version + max_off_policy_steps + 1


def must_wait(
    step: int, groups_per_step: int, chosen: Sequence[int], settled: Collection[int], under_way: Collection[int]
) -> bool:
    """Return whether a step must wait for groups under way, since without it some would be too old for all later steps.

    The groups are given by their last step (`last_step_of`). Groups that are too old already are not waited for, and a
    step whose groups are all due as early as the groups under way does not wait, since waiting would save nothing.

    Args:
        step: the step to be composed.
        groups_per_step: groups of a step.
        chosen: groups of the step.
        settled: settled groups that are left for later steps.
        under_way: groups that are sampled or scored.
    """
    earliest = min((last for last in under_way if last >= step), default=None)
    if earliest is None or earliest >= max(chosen):
        return False
    due = sorted(last for last in (*settled, *under_way) if last >= step)
    # after this step there is room for (last − step) × groups_per_step groups up to a step `last`
    return any(number > (last - step) * groups_per_step for number, last in enumerate(due, 1))
