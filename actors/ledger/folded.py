"""What the ledger no longer keeps row by row: counts, and ranges of ordinals (P21).

A run of weeks has millions of ordinals, and all but the last few thousand are past every rollback. Trained and dropped
ordinals of the steps up to the oldest kept checkpoint fold into ranges, which have few gaps, since sooner or later an
ordinal is one or the other.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from actors.ledger.witness import START


@dataclass
class Ranges:
    """A set of integers as sorted, disjoint, non-touching half-open ranges."""

    bounds: list[tuple[int, int]] = field(default_factory=list)

    def add(self, numbers: Iterable[int]) -> int:
        """Add numbers; returns how many of them were no news."""
        new, before = list(numbers), len(self)
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self.bounds, *((number, number + 1) for number in new)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self.bounds[:] = merged
        return len(new) - (len(self) - before)

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        place = bisect_right(self.bounds, (number, float("inf"))) - 1
        return place >= 0 and self.bounds[place][0] <= number < self.bounds[place][1]

    def __len__(self) -> int:
        return sum(end - start for start, end in self.bounds)

    @property
    def first_missing(self) -> int:
        """The lowest number ≥ 0 that is not in it."""
        return self.bounds[0][1] if self.bounds and self.bounds[0][0] == 0 else 0


@dataclass
class Folded:
    """All steps up to `step` have been folded; `chain` is the chain of witnesses there."""

    step: int = 0
    chain: str = START
    finished: Ranges = field(default_factory=Ranges)
    """Train ordinals that these steps trained, or told to be dropped."""
    trained: int = 0
    trained_twice: int = 0
    evaluated: int = 0
    """Eval ordinals that were settled."""
    dropped: dict[str, Counter[str]] = field(default_factory=lambda: {"train": Counter(), "eval": Counter()})

    def record(self) -> dict[str, Any]:
        """As the store keeps it."""
        return self.__dict__ | {"finished": self.finished.bounds}

    @classmethod
    def of(cls, record: dict[str, Any] | None) -> "Folded":
        """What `record` gave, after a journey through JSON."""
        if record is None:
            return cls()
        dropped = {purpose: Counter(reasons) for purpose, reasons in record["dropped"].items()}
        finished = Ranges([(start, end) for start, end in record["finished"]])
        return cls(**record | {"finished": finished, "dropped": dropped})

    def counts(self) -> dict[tuple[str, str, str | None], int]:
        """(purpose, state, reason) → ordinals, in the manner of the store's own."""
        counts: dict[tuple[str, str, str | None], int] = {
            ("train", "durable", None): self.trained,
            ("eval", "settled", None): self.evaluated,
        }
        for purpose, reasons in self.dropped.items():
            counts |= {(purpose, "dropped", reason): count for reason, count in reasons.items()}
        return {key: count for key, count in counts.items() if count}
