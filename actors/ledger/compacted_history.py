"""Compacted history of the ledger: counts and ranges of ordinals instead of rows (P21: old rows are compacted).

A run of weeks has millions of ordinals, and no rollback reaches all but the last few thousand. Trained and dropped
ordinals of the steps up to the oldest kept checkpoint are compacted into ranges. The ranges have few gaps, since every
ordinal is trained or dropped in the end.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from actors.ledger.rows import Step
from actors.ledger.witness import START


@dataclass
class Ranges:
    """A set of integers as sorted, disjoint, non-touching half-open ranges: {0, 1, 2, 5} is [(0, 3), (5, 6)]."""

    bounds: list[tuple[int, int]] = field(default_factory=list)
    """Ranges (first, last + 1)."""

    def add(self, numbers: Iterable[int]) -> int:
        """Add numbers; return the number of known ones among them."""
        new, before = list(numbers), len(self)
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self.bounds, *((number, number + 1) for number in new)]):
            if merged and start <= merged[-1][1]:  # `<=`: touching ranges merge too
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self.bounds[:] = merged
        return len(new) - (len(self) - before)

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        place = bisect_right(self.bounds, (number, float("inf"))) - 1  # last range that starts at or before it
        return place >= 0 and self.bounds[place][0] <= number < self.bounds[place][1]

    def __len__(self) -> int:
        return sum(end - start for start, end in self.bounds)

    @property
    def first_missing(self) -> int:
        """Lowest number ≥ 0 outside the set."""
        return self.bounds[0][1] if self.bounds and self.bounds[0][0] == 0 else 0


@dataclass
class CompactedHistory:
    """Summary of all compacted steps."""

    step: int = 0
    """Newest compacted step; 0: none."""
    chain: str = START
    """Chain of witnesses (P20) after `step`."""
    finished: Ranges = field(default_factory=Ranges)
    """Train ordinals trained by the compacted steps, or reported by them as dropped."""
    trained: int = 0
    """Number of trained ordinals."""
    trained_twice: int = 0
    """Number of ordinals found in several steps; 0 unless the protocol is broken."""
    evaluated: int = 0
    """Number of settled eval ordinals."""
    dropped: dict[str, Counter[str]] = field(default_factory=lambda: {"train": Counter(), "eval": Counter()})
    """Number of dropped ordinals, by purpose and reason."""

    def take(self, step: Step) -> list[int]:
        """Compact the next step; return the ordinals trained or reported as dropped by the step."""
        gone = [*step.ordinals, *(drop.ordinal for drop in step.dropped)]
        self.step, self.chain = step.step, step.chain
        self.trained += len(step.ordinals)
        self.trained_twice += self.finished.add(gone)
        self.dropped["train"].update(drop.reason for drop in step.dropped)
        return gone

    def record(self) -> dict[str, Any]:
        """Return the fields in the form of the store, ready for JSON."""
        return self.__dict__ | {"finished": self.finished.bounds}

    @classmethod
    def of(cls, record: dict[str, Any] | None) -> "CompactedHistory":
        """Rebuild from `record` after JSON; None: nothing is compacted."""
        if record is None:
            return cls()
        # JSON has made lists of tuples and plain dicts of counters
        dropped = {purpose: Counter(reasons) for purpose, reasons in record["dropped"].items()}
        finished = Ranges([(start, end) for start, end in record["finished"]])
        return cls(**record | {"finished": finished, "dropped": dropped})

    def counts(self) -> dict[tuple[str, str, str | None], int]:
        """Return the number of compacted ordinals by (purpose, state, reason), like `LedgerReader.counts`."""
        counts: dict[tuple[str, str, str | None], int] = {
            ("train", "durable", None): self.trained,
            ("eval", "settled", None): self.evaluated,
        }
        for purpose, reasons in self.dropped.items():
            counts |= {(purpose, "dropped", reason): count for reason, count in reasons.items()}
        return {key: count for key, count in counts.items() if count}
