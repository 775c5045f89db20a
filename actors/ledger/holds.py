"""Which attempts the live peers of a kind name in their newest beats (P9, P13), found by peer and by ordinal."""

from collections.abc import Iterable

Hold = tuple[int, int]
"""(ordinal, attempt)."""
NOTHING: frozenset[Hold] = frozenset()


class Holds:
    """Kept by difference, so that a beat that says what the last one said costs one comparison of sets."""

    def __init__(self) -> None:
        self._named: dict[str, frozenset[Hold]] = {}
        self._naming: dict[int, set[str]] = {}

    def update(self, identity: str, holds: Iterable[Iterable[int]]) -> frozenset[Hold]:
        """Replace what a peer names; returns what it has not named before."""
        before, named = self.of(identity), frozenset((ordinal, attempt) for ordinal, attempt in holds)
        new = named - before
        if new or len(named) < len(before):
            gone = {ordinal for ordinal, _ in before - named}
            for ordinal in gone.difference(ordinal for ordinal, _ in named):
                self._naming[ordinal].discard(identity)
                if not self._naming[ordinal]:
                    del self._naming[ordinal]
            for ordinal, _ in new:
                self._naming.setdefault(ordinal, set()).add(identity)
        self._named[identity] = named
        return new

    def forget(self, identity: str) -> frozenset[Hold]:
        """A peer is gone; returns what it named."""
        before = self.of(identity)
        self.update(identity, ())
        del self._named[identity]
        return before

    def of(self, identity: str) -> frozenset[Hold]:
        """What a peer names."""
        return self._named.get(identity, NOTHING)

    def naming(self, ordinal: int) -> set[str]:
        """The peers that name any attempt of an ordinal."""
        return self._naming.get(ordinal, set())

    def is_named(self, hold: Hold) -> bool:
        """Whether a live peer names this attempt."""
        return any(hold in self._named[identity] for identity in self.naming(hold[0]))
