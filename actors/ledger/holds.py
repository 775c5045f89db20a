"""Index of the attempts named in the newest heartbeats of live peers of a kind (P9, P13), by peer and by ordinal.

A peer names an attempt for as long as the work lasts.
"""

from collections.abc import Iterable

Hold = tuple[int, int]
"""(ordinal, attempt)."""
NOTHING: frozenset[Hold] = frozenset()
"""Holds of an unknown peer."""


class Holds:
    """Attempts by peer and by ordinal, updated by difference: an unchanged heartbeat costs a comparison of two sets."""

    def __init__(self) -> None:
        self._named: dict[str, frozenset[Hold]] = {}
        self._naming: dict[int, set[str]] = {}

    def update(self, identity: str, holds: Iterable[Iterable[int]]) -> frozenset[Hold]:
        """Replace the attempts of a peer; return the new ones."""
        before, named = self.of(identity), frozenset((ordinal, attempt) for ordinal, attempt in holds)
        new = named - before
        # nearly all heartbeats name what the last one named; only then the index by ordinal is touched
        if new or len(named) < len(before):
            gone = {ordinal for ordinal, _ in before - named}
            # a peer may name another attempt of the same ordinal still
            for ordinal in gone.difference(ordinal for ordinal, _ in named):
                self._naming[ordinal].discard(identity)
                if not self._naming[ordinal]:
                    del self._naming[ordinal]
            for ordinal, _ in new:
                self._naming.setdefault(ordinal, set()).add(identity)
        self._named[identity] = named
        return new

    def forget(self, identity: str) -> frozenset[Hold]:
        """Remove a peer; return the attempts named last."""
        before = self.of(identity)
        self.update(identity, ())
        del self._named[identity]
        return before

    def of(self, identity: str) -> frozenset[Hold]:
        """Return the attempts named by a peer; empty for an unknown peer."""
        return self._named.get(identity, NOTHING)

    def naming(self, ordinal: int) -> set[str]:
        """Return the peers naming any attempt of an ordinal."""
        return self._naming.get(ordinal, set())

    def is_named(self, hold: Hold) -> bool:
        """Return whether a live peer names this attempt."""
        return any(hold in self._named[identity] for identity in self.naming(hold[0]))
