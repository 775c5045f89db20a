"""Notation of splits, as in the library `datasets`: `train`, `train[:90%]`, `train[100:200]`, `train+validation`."""

import re
from typing import NamedTuple

_PART = re.compile(r"(?P<name>\w[\w.-]*)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


class SplitPart(NamedTuple):
    """Rows of one named split, from a start to a stop."""

    name: str
    """Name of the split."""
    start: str
    """Number of the first row, from 0, or a percentage; negative: from the end. Empty: the first row."""
    stop: str
    """Number of the row behind the last, or a percentage; negative: from the end. Empty: the end."""

    def rows(self, num_rows: int) -> range:
        """Return the numbers of the rows, for a split of `num_rows` rows. Percentages are rounded to whole rows."""
        return range(*slice(_row(self.start, num_rows), _row(self.stop, num_rows)).indices(num_rows))


def parse_split(text: str) -> list[SplitPart]:
    """Return the parts of a split, in the order of their rows.

    Raises:
        ValueError: the text is not in the notation of splits.
    """
    found = []
    for part in text.split("+"):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no split; write train, train[:1000], train[:90%] or train+validation")
        for bound in (match["start"], match["stop"]):
            if bound and bound.endswith("%") and abs(int(bound[:-1])) > 100:
                raise ValueError(f"{text!r}: {bound} is more than all rows")
        found.append(SplitPart(match["name"], match["start"] or "", match["stop"] or ""))
    return found


def _row(bound: str, num_rows: int) -> int | None:
    if not bound:
        return None
    return round(int(bound[:-1]) * num_rows / 100) if bound.endswith("%") else int(bound)
