"""Curves of a run: the columns of metrics.jsonl, read as the file grows and thinned for a picture."""

import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.telemetry.tail import Tail
from actors.telemetry.totals import is_number
from actors.view.plain import numbers

POINTS = 400
"""Points of a curve, unless the reader asks for another number."""
MAX_POINTS = 2000
"""Largest number of points of a curve."""


class Curves:
    """Columns of metrics.jsonl, in memory as 8 bytes per step and column. For one thread at a time.

    Args:
        path: metrics.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._weights: dict[int, str] = {}
        """Digest of the weights made by each step."""

    @property
    def names(self) -> list[str]:
        """Names of the columns that have a number, in the order of the alphabet."""
        return sorted(self._columns)

    @property
    def last(self) -> int:
        """Newest step; 0: none."""
        return self._steps[-1] if self._steps else 0

    def update(self) -> None:
        """Read the lines that were written since the last call; all of them if lines were cut off."""
        if self._tail.was_cut():
            self._tail.restart()
            self._steps, self._columns, self._weights = array("q"), {}, {}
        for line in self._tail.new():
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if not is_number(line.get("step")):
            return
        row = len(self._steps)
        self._steps.append(int(line["step"]))
        if isinstance(line.get("weights"), str):
            self._weights[self._steps[-1]] = line["weights"]
        for name, value in line.items():
            if name != "step" and is_number(value):
                column = self._columns.setdefault(name, array("d"))
                column.extend([math.nan] * (row - len(column)))
                column.append(float(value))

    def table(self, names: Iterable[str], points: int = POINTS) -> dict[str, Any]:
        """Return `steps` and `columns`, each column with `mean`, and `low` and `high` where a point is of many steps.

        Args:
            names: wanted columns; an unknown one is left out.
            points: most points of a column.
        """
        steps = np.array(self._steps, np.int64)
        bounds = _bounds(len(steps), min(points, MAX_POINTS))
        columns = {name: _thinned(self._whole(name), bounds) for name in names if name in self._columns}
        return {"steps": steps[bounds[1:] - 1].tolist(), "columns": columns, "last": self.last}

    def line(self, step: int) -> dict[str, Any]:
        """Return the values of a step by name; empty if there is no line of the step."""
        steps = np.array(self._steps, np.int64)
        rows = np.flatnonzero(steps == step)
        if not rows.size:
            return {}
        values = {name: self._whole(name)[rows[-1]] for name in self.names}
        found: dict[str, Any] = {name: float(value) for name, value in values.items() if not math.isnan(value)}
        return found | ({"weights": self._weights[step]} if step in self._weights else {})

    def newest(self, name: str, steps: int) -> float | None:
        """Return the mean of a column over the newest steps; None where none of them has a value."""
        if name not in self._columns:
            return None
        values = self._whole(name)[-steps:]
        known = values[~np.isnan(values)]
        return float(known.mean()) if known.size else None

    def _whole(self, name: str) -> Any:
        """Return a column with a value for each step, NaN where a line has none."""
        column = self._columns[name]
        return np.concatenate([np.array(column, np.float64), np.full(len(self._steps) - len(column), np.nan)])


def _bounds(count: int, points: int) -> Any:
    """Return the bounds of at most so many buckets of rows, all of nearly equal size: 5 rows in 2 are [0, 2, 5]."""
    return (
        np.unique(np.linspace(0, count, min(count, max(points, 1)) + 1).astype(np.int64))
        if count
        else np.zeros(1, np.int64)
    )


def _thinned(values: Any, bounds: Any) -> dict[str, Sequence[float | None]]:
    """Return mean, and with several rows per bucket the smallest and largest value, without NaN."""
    if not len(values) or len(bounds) == len(values) + 1:
        return {"mean": numbers(values.tolist())}
    starts = bounds[:-1]
    known = ~np.isnan(values)
    counts = np.add.reduceat(known, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    mean = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    low = np.where(counts > 0, np.minimum.reduceat(np.where(known, values, np.inf), starts), np.nan)
    high = np.where(counts > 0, np.maximum.reduceat(np.where(known, values, -np.inf), starts), np.nan)
    return {"mean": numbers(mean.tolist()), "low": numbers(low.tolist()), "high": numbers(high.tolist())}
