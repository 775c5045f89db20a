"""Examples for the next train ordinals: first the examples given up by a fork, then new examples."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from actors.ledger.rows import Changes, ExampleRef, Group


class Draw(Protocol):
    """Function that draws the next new example, called once per ordinal (P10: an ordinal has one example for ever)."""

    def __call__(self, excluded: Collection[str] = ()) -> ExampleRef:
        """Return an example, not of the environments in `excluded`."""
        ...


class ReturnedExamples:
    """Queue of examples to issue again, each with the dropped ordinal of the example.

    The whole queue is stored when a fork fills the queue. A departure is stored as a count alone: otherwise each
    departure would write the whole queue again.

    Args:
        draw: draws the next new example.
        still_there: tells whether an example dropped by a fork can be issued again.
        changes: changes of the round, extended in place.
    """

    def __init__(self, draw: Draw, still_there: Callable[[ExampleRef], bool], changes: Changes) -> None:
        self.draw, self._still_there, self._changes = draw, still_there, changes
        self._examples: deque[tuple[ExampleRef, int]] = deque()
        self._num_taken = 0
        """Examples taken from the front of the stored queue since the queue was written."""

    def restore(self, values: dict[str, Any]) -> None:
        """Load the stored queue, less the examples taken since."""
        # both are stored with the tickets drawn from them, in one commit: none is skipped or issued twice
        self._num_taken = values.get("num_returned", 0)
        stored = values.get("returning", [])[self._num_taken :]
        self._examples = deque((ExampleRef(**example), origin) for example, origin in stored)

    def add(self, groups: list[Group]) -> None:
        """Queue the examples of dropped groups, as far as the data still has them, and store the queue."""
        self._examples.extend((group.example, group.ordinal) for group in groups if self._still_there(group.example))
        self._store()

    def next(self, excluded: Collection[str] = ()) -> tuple[ExampleRef, int | None]:
        """Return the example of the next train ordinal, and the dropped ordinal of the same example (None: new).

        A new example is not of the environments in `excluded`.
        """
        if not self._examples:
            return self.draw(excluded), None
        self._num_taken += 1
        self._changes.values["num_returned"] = self._num_taken
        example, origin = self._examples.popleft()
        if not self._examples:
            self._store()  # an empty queue: the stored one would only be skipped from now on
        return example, origin

    def _store(self) -> None:
        self._changes.values["returning"] = [[vars(example), origin] for example, origin in self._examples]
        self._num_taken = self._changes.values["num_returned"] = 0
