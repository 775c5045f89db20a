"""Report of an import: the outcome for each key of the input, and the values that the input does not say."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """Outcome for a key of the input."""

    TAKEN = "taken"
    """Same name, same meaning, same value."""
    RENAMED = "renamed"
    """Another name here, same meaning, same value."""
    CONVERTED = "converted"
    """Other values here, by a formula that the report shows with its numbers."""
    REFUSED = "refused"
    """No counterpart: the run differs from the origin's in this point."""
    IRRELEVANT = "irrelevant"
    """Without influence on what is trained, or done here without a key."""


@dataclass(frozen=True)
class Entry:
    """One key of the input."""

    key: str
    """Name as in the input, dotted where nested."""
    value: Any
    """Value as in the input."""
    verdict: Verdict
    """Outcome for the key."""
    targets: tuple[str, ...]
    """Keys of run.yaml that the key decides, dotted; empty if refused or irrelevant."""
    text: str
    """Formula with its numbers, or the reason; for a refused key also what to do instead."""


@dataclass(frozen=True)
class Question:
    """A value that the input does not say."""

    target: str
    """Key of run.yaml that waits for the value."""
    text: str
    """Missing value, and the option or file that gives it."""


@dataclass
class Report:
    """All keys of the input, each once, with notes and questions."""

    origin: str
    """System and version whose defaults were used, such as `TRL 1.16`."""
    entries: list[Entry] = field(default_factory=list)
    """Keys of the input, in the order of the decisions."""
    notes: list[str] = field(default_factory=list)
    """Differences that belong to no key of the input, such as a default of the origin without counterpart."""
    questions: list[Question] = field(default_factory=list)
    """Values that are missing."""

    def add(self, entry: Entry) -> None:
        """Add a key. Each key is added once."""
        assert not self.has(entry.key), f"{entry.key} is reported twice"
        self.entries.append(entry)

    def has(self, key: str) -> bool:
        """Tell whether a key has an entry."""
        return any(entry.key == key for entry in self.entries)

    def of(self, verdict: Verdict) -> list[Entry]:
        """Return the keys with a verdict."""
        return [entry for entry in self.entries if entry.verdict is verdict]

    def lines(self) -> Iterator[str]:
        """Yield the report as text, one key a line, by verdict; questions last, where a terminal shows them."""
        yield f"defaults of {self.origin}"
        for verdict in Verdict:
            for entry in self.of(verdict):
                yield f"{verdict:<10} {describe(entry)}"
        for note in self.notes:
            yield f"note       {note}"
        for question in self.questions:
            yield f"missing    {question.target}: {question.text}"


def describe(entry: Entry) -> str:
    """Return an entry as a line without its verdict."""
    # one key a line, also where the value has several
    value = str(entry.value).replace("\n", "\\n")
    shown = f"{entry.key}={value if len(value) <= 60 else value[:57] + '...'}"
    targets = f" → {', '.join(entry.targets)}" if entry.targets else ""
    return f"{shown}{targets}{': ' + entry.text if entry.text else ''}"
