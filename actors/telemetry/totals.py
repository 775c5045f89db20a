"""What the summary and the screens need of all step lines, in memory that a long run does not fill."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

Line = Mapping[str, Any]

FIRST_AND_LAST = 5
"""Steps that `reward_first` and `reward_last` are means of."""
NUM_RECENT_LINES = 20
NUM_RECENT_VALUES = 1000
"""What a median is taken of: a run of more steps is told the median of its newest ones."""
SMALLEST_EXPONENT = 1074
"""Every float is a whole number of 2^-1074."""
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
    """Running figures of one number of each line; a line that has no number there does not count."""

    def __init__(self) -> None:
        self.maximum: float | None = None
        self._count, self._units = 0, 0
        """The sum in units of 2^-1074: exact, so that a mean is what `statistics.fmean` of all values would be."""
        self._recent: deque[float] = deque(maxlen=NUM_RECENT_VALUES)

    def add(self, value: object) -> None:
        """The next line's value."""
        if not is_number(value):
            return
        numerator, denominator = value.as_integer_ratio()
        self._count += 1
        self._units += numerator << (SMALLEST_EXPONENT + 1 - denominator.bit_length())
        self.maximum = value if self.maximum is None else max(value, self.maximum)
        self._recent.append(value)

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._units / (1 << SMALLEST_EXPONENT)

    @property
    def mean(self) -> float | None:
        """Of all values, None where there are none."""
        return self.sum / self._count if self._count else None

    @property
    def recent_median(self) -> float | None:
        """Of the newest NUM_RECENT_VALUES, None where there are none."""
        return median_of(self._recent)


class StepTotals:
    """Running totals over the lines of metrics.jsonl: the first, the newest, and figures of the columns above.

    Medians are those of the newest NUM_RECENT_VALUES steps; all else is exact over all steps.
    """

    def __init__(self) -> None:
        self.first: list[Line] = []
        self.recent: deque[Line] = deque(maxlen=NUM_RECENT_LINES)
        self.idle = Column()
        """Seconds waited for batches between the first step and the last, so without the first step's wait."""
        self._columns = {name: Column() for name in COLUMNS}

    def __getitem__(self, column: str) -> Column:
        return self._columns[column]

    def add(self, line: Line) -> None:
        """The next step's line."""
        if self.first:
            self.idle.add(line.get("seconds_wait_batch"))
        if len(self.first) < FIRST_AND_LAST:
            self.first.append(line)
        self.recent.append(line)
        for name, column in self._columns.items():
            column.add(line.get(name))

    @property
    def newest(self) -> Line:
        """The newest line, empty before the first."""
        return self.recent[-1] if self.recent else {}

    @property
    def reward_first(self) -> float | None:
        """Mean reward of the first five steps."""
        return mean_of(line.get("reward_mean") for line in self.first)

    @property
    def reward_last(self) -> float | None:
        """Mean reward of the last five steps."""
        return mean_of(line.get("reward_mean") for line in list(self.recent)[-FIRST_AND_LAST:])

    def per_second(self, column: str) -> float | None:
        """A column's sum over the time of the newest NUM_RECENT_LINES lines; None before the second."""
        lines = list(self.recent)
        span = lines[-1]["time"] - lines[0]["time"] if lines else 0.0
        return sum(line.get(column) or 0.0 for line in lines[1:]) / span if span else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is one; null and the digest of a version are in lines too, NaN is in none."""
    return isinstance(value, int | float) and math.isfinite(value)


def mean_of(values: Iterable[object]) -> float | None:
    """Of the numbers among them."""
    numbers = [value for value in values if is_number(value)]
    return statistics.fmean(numbers) if numbers else None


def median_of(values: Iterable[float]) -> float | None:
    """None where there are none."""
    numbers = list(values)
    return statistics.median(numbers) if numbers else None
