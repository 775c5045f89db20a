"""Staleness, decided in one place: what lag is, what may be issued, what is too old (P4, P10, P15, P17).

Step k turns version k−1 into version k. A group whose oldest token was sampled by version v has lag k − 1 − v in step
k: 0 when it was sampled by exactly the weights that the step starts from.

    groups_per_step 8, max_async_level 1, engines serve version 0:  16 ordinals may be issued (steps 1 and 2)
    engines switch to version 1:                                    24 (step 3), whose tickets need version ≥ 1
"""


def lag_of(step: int, oldest_version: int) -> int:
    """Versions between the weights that `step` starts from and the oldest token it trains on."""
    return step - 1 - oldest_version


def step_of(position: int, groups_per_step: int) -> int:
    """The step that takes the group at `position` (0, 1, …) among the undropped ordinals."""
    return position // groups_per_step + 1


def tickets_allowed(
    num_issued: int,
    num_dropped: int,
    served_version: int | None,
    groups_per_step: int,
    max_async_level: int,
    max_steps: int,
) -> int:
    """How many train tickets may be issued now (P15).

    Args:
        num_issued: train ordinals handed out so far.
        num_dropped: those of them that will never be trained.
        served_version: newest version of an engine that takes new work; None when there is none.
    """
    if served_version is None:
        return 0
    ahead = (served_version + max_async_level + 1) * groups_per_step
    return max(0, min(ahead, max_steps * groups_per_step) - (num_issued - num_dropped))


def min_version(position: int, groups_per_step: int, max_async_level: int) -> int:
    """The oldest version that may sample the group at `position`, so that its lag stays within the level (P10)."""
    return max(0, step_of(position, groups_per_step) - 1 - max_async_level)


def is_stale(step: int, oldest_version: int, max_off_policy_steps: int) -> bool:
    """Whether a group is too old for `step` and must be dropped (P17)."""
    return lag_of(step, oldest_version) > max_off_policy_steps
