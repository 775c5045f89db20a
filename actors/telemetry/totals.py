"""Totals over all step lines, for the summary and the screens; memory does not grow with the run."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

Line = Mapping[str, Any]

FIRST_AND_LAST = 5
"""Number of steps averaged in `reward_first` and `reward_last`."""
NUM_RECENT_LINES = 20
"""Number of newest lines kept for the screens."""
NUM_RECENT_VALUES = 1000
"""Number of newest values of which a median is taken."""
SMALLEST_EXPONENT = 1074
"""Exponent in which all floats are integers: every float is a multiple of 2^-1074."""
COLUMNS = (
    "num_completions",
    "tokens",
    "lag_mean",
    "lag_max",
    "mismatch_kl",
    "seconds_wait_batch",
    "seconds_gather",
    "seconds_publish",
)


class Column:
    """Running figures of a column. Lines without a number in the column do not count."""

    def __init__(self) -> None:
        self.maximum: float | None = None
        self._count, self._units = 0, 0
        """Sum in units of 2^-1074, which is exact: the mean equals `statistics.fmean` of all values."""
        self._recent: deque[float] = deque(maxlen=NUM_RECENT_VALUES)

    def add(self, value: object) -> None:
        """Add the next line's value."""
        if not is_number(value):
            return
        # a sum of floats would depend on the order; the denominator is a power of 2, so this is exact
        numerator, denominator = value.as_integer_ratio()
        self._count += 1
        # a denominator of 2^k has k + 1 bits
        self._units += numerator << (SMALLEST_EXPONENT + 1 - denominator.bit_length())
        self.maximum = value if self.maximum is None else max(value, self.maximum)
        self._recent.append(value)

    @property
    def sum(self) -> float:
        """Sum of all values; 0 without values."""
        return self._units / (1 << SMALLEST_EXPONENT)

    @property
    def mean(self) -> float | None:
        """Mean of all values; None without values."""
        return self.sum / self._count if self._count else None

    @property
    def recent_median(self) -> float | None:
        """Median of the newest NUM_RECENT_VALUES values; None without values."""
        return median_of(self._recent)


class StepTotals:
    """Running totals over the lines of metrics.jsonl: first lines, newest lines, and figures of COLUMNS.

    Medians are of the newest NUM_RECENT_VALUES steps. Everything else is exact over all steps.

    Args:
        rates_from: `time` of the oldest line that counts for rates; lines of an earlier process do not.
    """

    def __init__(self, rates_from: float = 0.0) -> None:
        self._rates_from = rates_from
        self.first: list[Line] = []
        self.recent: deque[Line] = deque(maxlen=NUM_RECENT_LINES)
        self.idle = Column()
        """Seconds waited for batches between the first step and the last; without the first step's wait."""
        self._columns = {name: Column() for name in COLUMNS}

    def __getitem__(self, column: str) -> Column:
        return self._columns[column]

    def add(self, line: Line) -> None:
        """Add the next step's line."""
        # the wait for the first batch is the start of the run, not idleness
        if self.first:
            self.idle.add(line.get("seconds_wait_batch"))
        if len(self.first) < FIRST_AND_LAST:
            self.first.append(line)
        self.recent.append(line)
        for name, column in self._columns.items():
            column.add(line.get(name))

    @property
    def newest(self) -> Line:
        """Newest line; empty before the first step."""
        return self.recent[-1] if self.recent else {}

    def newest_in_a_row(self, column: str, value: float) -> int:
        """Return how many of the newest steps in a row have this value in a column; NUM_RECENT_LINES at most."""
        lines = list(itertools.takewhile(lambda line: line.get(column) == value, reversed(self.recent)))
        return len(lines)

    @property
    def reward_first(self) -> float | None:
        """Mean reward of the first FIRST_AND_LAST steps; None without rewards."""
        return mean_of(line.get("reward_mean") for line in self.first)

    @property
    def reward_last(self) -> float | None:
        """Mean reward of the last FIRST_AND_LAST steps; None without rewards."""
        return mean_of(line.get("reward_mean") for line in list(self.recent)[-FIRST_AND_LAST:])

    @property
    def seconds_per_step(self) -> float | None:
        """Mean seconds per step over the newest NUM_RECENT_LINES steps; None before the second step."""
        lines = self._lines_of_rates()
        return (lines[-1]["time"] - lines[0]["time"]) / (len(lines) - 1) if len(lines) > 1 else None

    def per_second(self, column: str) -> float | None:
        """Return a column's sum per second, over the newest NUM_RECENT_LINES lines; None before the second line."""
        lines = self._lines_of_rates()
        span = lines[-1]["time"] - lines[0]["time"] if lines else 0.0
        # the first line's values belong to the time before the span
        return sum(line.get(column) or 0.0 for line in lines[1:]) / span if span > 0 else None

    def _lines_of_rates(self) -> list[Line]:
        return [line for line in self.recent if line["time"] >= self._rates_from]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number. Lines also have null and texts (digests), but never NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


def mean_of(values: Iterable[object]) -> float | None:
    """Return the mean of the numbers among some values; None without numbers."""
    numbers = [value for value in values if is_number(value)]
    return statistics.fmean(numbers) if numbers else None


def median_of(values: Iterable[float]) -> float | None:
    """Return the median of some values; None without values."""
    numbers = list(values)
    return statistics.median(numbers) if numbers else None
