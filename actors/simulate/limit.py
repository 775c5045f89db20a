"""What limits a run, found by experiment: the same run with one thing twice as fast, or one more of it.

The limit is the change that brings most. A change that brings less than WORTH_SAYING limits nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from actors.simulate.plan import Plan
from actors.simulate.result import Result, simulate

WORTH_SAYING = 0.03
"""Gain of steps per second from which a change counts."""
EXPERIMENT_STEPS = 60
"""Steps of an experiment at most: enough for a mean, and few enough to do many."""
ENOUGH = 0.05
"""Share of waiting at which the trainer counts as supplied."""
MOST_TIMES = 16
"""Largest multiple of the processes of a role that is tried."""


@dataclass(frozen=True)
class Experiment:
    """A change of a plan with its gain."""

    name: str
    """Key of `CHANGES`."""
    gain: float
    """Steps per second ÷ those of the plan, less 1."""


@dataclass(frozen=True)
class Advice:
    """More processes of a role that supply the trainer, or the most that were tried."""

    role: str
    more: int
    result: Result


def _faster(*names: str) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        return replace(plan, times=plan.times.with_values(**{name: getattr(plan.times, name) / 2 for name in names}))

    return change


def _one_more_level(plan: Plan) -> Plan:
    packer = plan.config.packer
    level = packer.max_async_level + 1
    limit = max(level, packer.max_off_policy_steps)
    changed = packer.model_copy(update={"max_async_level": level, "max_off_policy_steps": limit})
    return replace(plan, config=plan.config.model_copy(update={"packer": changed}))


def _more_rollouts(plan: Plan) -> Plan:
    return replace(plan, size=replace(plan.size, rollouts=2 * plan.size.rollouts))


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "training": _faster("step_seconds", "micro_batch_seconds", "train_token_seconds", "publish_seconds"),
    "sampling": _faster("decode_seconds", "decode_sequence_seconds", "prefill_token_seconds"),
    "reward": _faster("reward_seconds"),
    "environment": _faster("environment_seconds"),
    "weights": _faster("wire_seconds", "update_pause_seconds"),
    "slots": _more_rollouts,
    "level": _one_more_level,
}
"""Changes by name."""
ROLES = {"sampling": "engines", "reward": "rewards", "slots": "rollouts"}
"""Field of `Size` whose processes lift a limit."""


def short(plan: Plan) -> Plan:
    """Return the plan with the steps of an experiment, and without deaths, which would decide over a short run."""
    steps = min(plan.steps, EXPERIMENT_STEPS)
    return replace(plan, steps=steps, deaths=(), mean_seconds_between_deaths=())


def experiments(plan: Plan) -> list[Experiment]:
    """Return all changes with their gains, the greatest gain first."""
    base = simulate(short(plan)).steps_per_second
    found = []
    for name, change in CHANGES.items():
        changed = change(plan)
        # nothing to change: an environment without time, for example
        if changed != plan:
            found.append(Experiment(name, simulate(short(changed)).steps_per_second / base - 1.0))
    return sorted(found, key=lambda one: -one.gain)


def advice(plan: Plan, limit: str) -> Advice | None:
    """Return how many more processes lift a limit; None if processes do not lift it, or the trainer waits little."""
    role = ROLES.get(limit)
    if role is None:
        return None
    before = getattr(plan.size, role)
    few, many, found = before, before, None
    while many < before * MOST_TIMES:
        few, many = many, many * 2
        found = _with(plan, role, many)
        if found.trainer_idle <= ENOUGH:
            break
    assert found is not None
    if found.trainer_idle > ENOUGH:
        # the smallest number that is as good as the most: more beyond it would stand idle
        return _smallest(plan, role, before, many, lambda one: one.steps_per_second >= 0.97 * found.steps_per_second)
    return _smallest(plan, role, few, many, lambda one: one.trainer_idle <= ENOUGH)


def _smallest(plan: Plan, role: str, few: int, many: int, is_enough: Callable[[Result], bool]) -> Advice:
    """Halve the span between a number that is too small and one that is enough."""
    best = _with(plan, role, many)
    while many - few > 1:
        middle = (few + many) // 2
        result = _with(plan, role, middle)
        if is_enough(result):
            many, best = middle, result
        else:
            few = middle
    return Advice(role, many - getattr(plan.size, role), best)


def _with(plan: Plan, role: str, number: int) -> Result:
    return simulate(short(replace(plan, size=replace(plan.size, **{role: number}))))
