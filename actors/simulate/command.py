"""The command `actors simulate`: options to plans, plans to text."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from actors.simulate.calibration import calibrated, observe
from actors.simulate.changes import parse_change
from actors.simulate.costs import parse_price, splits
from actors.simulate.defaults import times_of
from actors.simulate.failures import parse_death, parse_rate
from actors.simulate.limit import advice, experiments
from actors.simulate.models import Times, parse_setting
from actors.simulate.options import DEFAULT_STEPS, SIZES
from actors.simulate.picture import picture
from actors.simulate.plan import Plan, Size
from actors.simulate.report import describe, table
from actors.simulate.result import simulate
from actors.simulate.sweep import parse_axis, points, rows_of
from schemas.config import RunConfig, load_config
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Given:
    """Plan of the options, with notes on what is guessed."""

    plan: Plan
    notes: Sequence[str]


def run(arguments: argparse.Namespace) -> str:
    """Carry the command out; return its output.

    Raises:
        ConfigError: options or configuration can't be used, or the simulated run fails.
    """

    def load(overrides: list[str]) -> RunConfig:
        config = load_config(arguments.config, [*arguments.overrides, *overrides])
        # epochs need the data; a simulation has as many steps as asked for
        return config if config.trainer.max_steps else config.with_steps(DEFAULT_STEPS)

    if len(arguments.sweep) > 2:
        raise ConfigError("--sweep: give one or two keys")
    if arguments.picture is not None and not arguments.sweep:
        raise ConfigError("--picture: draws a sweep; give --sweep KEY=VALUE,VALUE too")
    given = plan_of(arguments, load)
    text = _sweep(arguments, given.plan, load) if arguments.sweep else _report(arguments, given.plan)
    if arguments.json or not given.notes:
        return text
    return "\n".join([text, "", *(f"note: {note}" for note in given.notes)])


def plan_of(arguments: argparse.Namespace, load: Callable[[list[str]], RunConfig]) -> Given:
    """Return the plan of the options."""
    config = load([])
    times, notes = _times(arguments, config)
    times = times.with_values(**dict(map(parse_setting, arguments.set)))
    own = Size.of(config)
    size = replace(own, **{name: value for name in SIZES if (value := getattr(arguments, name)) is not None})
    steps = min(config.trainer.max_steps, arguments.steps or DEFAULT_STEPS)
    deaths = tuple(map(parse_death, arguments.kill))
    rates, changes = tuple(map(parse_rate, arguments.mtbf)), tuple(map(parse_change, arguments.change))
    return Given(Plan(config, size, times, steps, arguments.seed, deaths, rates, changes), notes)


def _times(arguments: argparse.Namespace, config: RunConfig) -> tuple[Times, list[str]]:
    if arguments.like is None:
        return times_of(config), ["all times are defaults; --like RUN takes them from a run, --set changes one"]
    return calibrated(observe(arguments.like), arguments.seed)


def _sweep(arguments: argparse.Namespace, plan: Plan, load: Callable[[list[str]], RunConfig]) -> str:
    axes = [parse_axis(text) for text in arguments.sweep]
    found = points(plan, axes, load)
    if arguments.picture is not None:
        arguments.picture.write_text(picture(axes, found), encoding="utf-8")
    if arguments.json:
        keys = [axis.key for axis in axes]
        return json.dumps([dict(zip(keys, point.values, strict=True)) | asdict(point.result) for point in found])
    return "\n".join(table(rows_of(axes, found)))


def _report(arguments: argparse.Namespace, plan: Plan) -> str:
    result = simulate(plan)
    prices = dict(map(parse_price, arguments.price))
    found = [] if arguments.brief else experiments(plan)
    more = advice(plan, found[0].name) if found else None
    divided = splits(plan, arguments.gpus, prices) if arguments.gpus else []
    if arguments.json:
        limits = {one.name: one.gain for one in found}
        values = asdict(result) | {"gains": limits, "times": asdict(plan.times)}
        values["splits"] = [{**one.gpus, "cost": one.cost, **asdict(one.result)} for one in divided]
        return json.dumps(values)
    return describe(plan, result, None if arguments.brief else found, more, prices, divided)
