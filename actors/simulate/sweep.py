"""Sweeps: the same run with other values of one or two keys."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actors.simulate.models import NAMES, parse_setting
from actors.simulate.plan import Plan, Size
from actors.simulate.report import share
from actors.simulate.result import Result, simulate
from schemas.config import RunConfig
from schemas.errors import ConfigError

ROLES = ("rollouts", "rewards", "trainers", "engines")
"""Fields of `Size` that can be swept."""
MOST_POINTS = 256
"""Greatest number of simulations in a sweep."""


@dataclass(frozen=True)
class Axis:
    """Values of a key: a role, a figure of `--set`, or a key of run.yaml."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """Simulation of a sweep."""

    values: tuple[str, ...]
    """Value of each axis."""
    result: Result


def parse_axis(text: str) -> Axis:
    """Return the axis described by a word of `--sweep`, such as `engines=1,2,4`.

    Raises:
        ConfigError: the word has another form.
    """
    key, _, values = text.partition("=")
    found = tuple(value for value in values.split(",") if value)
    if not key or not found:
        raise ConfigError(f"--sweep {text}: write KEY=VALUE,VALUE,…, as in engines=1,2,4")
    if key in ROLES and not all(value.isdecimal() and int(value) for value in found):
        raise ConfigError(f"--sweep {text}: numbers of processes are 1 or more")
    if "." not in key and key not in (*ROLES, *NAMES):
        raise ConfigError(
            f"--sweep {text}: no such key; keys are {', '.join(ROLES)}, the figures of --set, and keys of run.yaml "
            "with a dot"
        )
    return Axis(key, found)


def points(plan: Plan, axes: Sequence[Axis], load: Callable[[list[str]], RunConfig]) -> list[Point]:
    """Simulate all combinations of values, in order.

    Args:
        plan: the plan to be varied.
        axes: one or two axes.
        load: loads the configuration with further overrides.

    Raises:
        ConfigError: too many combinations, or a value that does not fit.
    """
    combinations = list(itertools.product(*(axis.values for axis in axes)))
    if len(combinations) > MOST_POINTS:
        raise ConfigError(f"--sweep: {len(combinations)} simulations; {MOST_POINTS} are the most, so give fewer values")
    return [Point(values, simulate(varied(plan, axes, values, load))) for values in combinations]


def varied(plan: Plan, axes: Sequence[Axis], values: Sequence[str], load: Callable[[list[str]], RunConfig]) -> Plan:
    """Return the plan with these values."""
    pairs = [(axis.key, value) for axis, value in zip(axes, values, strict=True)]
    overrides = [f"{key}={value}" for key, value in pairs if "." in key]
    if overrides:
        plan = replace(plan, config=load(overrides))
        # keys of `up` and of the trainer decide how many processes there are
        sizes = {"up.rollout": "rollouts", "up.reward": "rewards", "up.inference": "engines"}
        sizes["trainer.num_ranks"] = "trainers"
        taken = Size.of(plan.config)
        changed = {sizes[key]: getattr(taken, sizes[key]) for key, _ in pairs if key in sizes}
        plan = replace(plan, size=replace(plan.size, **changed))
    for key, value in pairs:
        if key in ROLES:
            plan = replace(plan, size=replace(plan.size, **{key: int(value)}))
        elif key in NAMES:
            plan = replace(plan, times=plan.times.with_values(**dict([parse_setting(f"{key}={value}")])))
    return plan


HEAD = ("steps/s", "trainer waits", "engines idle", "slots idle", "lag", "lag max", "wasted")


def rows_of(axes: Sequence[Axis], found: Sequence[Point]) -> list[tuple[str, ...]]:
    """Return the table of a sweep, with its head."""
    head = (*(axis.key for axis in axes), *HEAD)
    return [
        head,
        *(
            (
                *point.values,
                f"{point.result.steps_per_second:.4g}",
                share(point.result.trainer_idle),
                share(point.result.engine_idle),
                share(point.result.rollout_idle),
                f"{point.result.lag_mean:.2f}",
                str(point.result.lag_max),
                share(point.result.wasted_share),
            )
            for point in found
        ),
    ]
