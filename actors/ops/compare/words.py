"""Runs side by side in words: a table of results, a table of differing keys, sentences on the best. Pure functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from actors.ops.compare.differences import differing
from actors.ops.compare.figures import Figures
from actors.ops.screens.render import printable

NONE = "-"
"""Text for a figure that is not known."""
LONGEST_VALUE = 32
"""Most characters of a value of the configuration in a table."""
MOST_KEYS = 40
"""Most differing keys shown."""


def compared(runs: Sequence[Figures]) -> str:
    """Return the whole comparison: differing keys, results, sentences."""
    keys = differing([run.config for run in runs if run.config])
    return "\n".join([*configurations(runs, keys), "", *results(runs)])


def configurations(runs: Sequence[Figures], keys: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the differing keys as a table, a column per run that has a configuration.

    Args:
        runs: the runs.
        keys: values by key, in the order of the runs with a configuration.
    """
    if not keys:
        return ["no key of the configuration differs but names and folders"]
    names = [name for name, run in zip(labels(runs), runs, strict=True) if run.config]
    rows = [(key, *map(_value, values)) for key, values in list(keys.items())[:MOST_KEYS]]
    more = [f"and {len(keys) - MOST_KEYS} more keys"] if len(keys) > MOST_KEYS else []
    return [*table([("differing key", *names), *rows]), *more]


def results(runs: Sequence[Figures]) -> list[str]:
    """Return the results as a table, a row per run, then a sentence per evaluation and one on speed."""
    evaluations = list(dict.fromkeys(label for run in runs for label in run.evaluations))
    heads = [f"{label} final, best" for label in evaluations]
    head = ("run", "outcome", "steps", *heads, "reward", "steps/s", "tokens", "wasted", "trainer waits", "limit")
    rows = [
        (
            label,
            run.outcome.partition(":")[0],
            str(run.steps),
            *(_evaluated(run, name) for name in evaluations),
            _number(run.reward, "{:.3f}"),
            _number(run.steps_per_second, "{:.3g}"),
            _number(run.tokens, "{}"),
            _number(run.wasted, "{:.1%}"),
            _number(run.idle, "{:.0%}"),
            NONE if run.limit == "unknown" else run.limit,
        )
        for label, run in zip(labels(runs), runs, strict=True)
    ]
    return [*table([head, *rows]), *sentences(runs, evaluations)]


def sentences(runs: Sequence[Figures], evaluations: Sequence[str]) -> list[str]:
    """Return what a reader looks for first: the best run of each evaluation, the fastest, and reasons of failures."""
    named = list(zip(labels(runs), runs, strict=True))
    found = []
    for evaluation in evaluations:
        measured = [(name, run.evaluations[evaluation]) for name, run in named if evaluation in run.evaluations]
        if len(measured) > 1 and len({one.measure for _, one in measured}) == 1:
            name, best = max(measured, key=lambda one: one[1].best[1])
            version, value = best.best
            found.append(f"best of {evaluation}: {name}, {best.measure} {value:.3f} at version {version}")
    rates = [(run.steps_per_second, name) for name, run in named if run.steps_per_second is not None]
    if len(rates) > 1:
        rate, name = max(rates)
        found.append(f"most steps per second: {name}, {rate:.3g}")
    found += [f"{name}: {printable(run.outcome)}" for name, run in named if ":" in run.outcome]
    return ["", *found] if found else []


def labels(runs: Sequence[Figures]) -> list[str]:
    """Return a name for each run: its `name` if no other run has the same, else its folder."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.output) for run in runs]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, with columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _evaluated(run: Figures, label: str) -> str:
    if label not in run.evaluations:
        return NONE
    version, best = run.evaluations[label].best
    return f"{run.evaluations[label].final:.3f}, {best:.3f} at {version}"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def _value(value: Any) -> str:
    text = NONE if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = printable(text)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
