"""Groups that wait to be issued, for the first time or again, in order: evaluations first, then by number.

There are four heaps: evaluations and train groups, each never issued or issued before. An entry of a group that no
longer waits stays in its heap until it reaches the top. A group that can't be issued now is set aside for one round. So
a round costs the entries issued or set aside, however many groups wait behind.
"""

import heapq
from collections.abc import Callable, Iterator

Key = tuple[bool, bool]
"""Key of a heap: (train, issued before)."""


class Waiting:
    """Set of ordinals, read in the order of issue."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._heaps: dict[Key, list[tuple[int, int]]] = {}
        """Heaps of (absolute value, ordinal); some entries are no members any more."""
        self._in_heaps: set[tuple[Key, int]] = set()
        """Entries of all heaps, so that no entry is pushed twice."""

    def add(self, ordinal: int, *, again: bool) -> None:
        """Add a group; `again`: issued before."""
        self._members.add(ordinal)
        self._push((ordinal >= 0, again), ordinal)

    def discard(self, ordinal: int) -> None:
        """Remove a group, if present."""
        self._members.discard(ordinal)  # its heap entry stays until it reaches the top: a heap has no cheap removal

    def __contains__(self, ordinal: object) -> bool:
        return ordinal in self._members

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def offers(self, *, again: bool, served: int, min_version: Callable[[int], int]) -> "Offers":
        """Return the groups to issue in this round; close the result at the end of the round.

        Args:
            again: offer groups issued before, too.
            served: version served by the engines.
            min_version: function from an ordinal to the oldest version allowed to sample the group.
        """
        # waiting groups issued before are held back for a lease after a restart (P8): holders may come back
        keys = [(train, old) for train in (False, True) for old in ((False, True) if again else (False,))]
        return Offers(self, keys, served, min_version)

    def _push(self, key: Key, ordinal: int) -> None:
        # a group that waits again may still have the entry of its last wait
        if (key, ordinal) not in self._in_heaps:
            self._in_heaps.add((key, ordinal))
            heapq.heappush(self._heaps.setdefault(key, []), (abs(ordinal), ordinal))

    def _top(self, key: Key) -> int | None:
        """Return the first member of a heap, and remove stale entries above; None without any."""
        heap = self._heaps.get(key, [])
        while heap and heap[0][1] not in self._members:
            self._in_heaps.discard((key, heapq.heappop(heap)[1]))
        return heap[0][1] if heap else None

    def _pop(self, key: Key) -> None:
        self._in_heaps.discard((key, heapq.heappop(self._heaps[key])[1]))


class Offers:
    """View of the waiting groups in one round: `next` takes an entry off the heap, `close` puts unissued ones back."""

    def __init__(self, waiting: Waiting, keys: list[Key], served: int, min_version: Callable[[int], int]) -> None:
        self._waiting, self._keys, self._served, self._min_version = waiting, keys, served, min_version
        self._taken: list[tuple[Key, int]] = []

    def next(self) -> int | None:
        """Return the next ordinal to issue; None if none is left."""
        # evaluations first: they are few, and outside the lag budget (P26)
        for train in (False, True):
            tops = [
                (abs(top), key, top) for key in self._keys if key[0] is train and (top := self._top(key)) is not None
            ]
            if tops:
                _, key, ordinal = min(tops)
                self._waiting._pop(key)
                self._taken.append((key, ordinal))
                return ordinal
        return None

    def close(self) -> None:
        """Put all unissued groups back."""
        for key, ordinal in self._taken:
            if ordinal in self._waiting:
                self._waiting._push(key, ordinal)

    def _top(self, key: Key) -> int | None:
        """Return the first group of a heap that the served version may sample; None if none.

        All waiting evaluation groups are of the same policy: if the first needs newer engines, all do.
        """
        while (top := self._waiting._top(key)) is not None and self._min_version(top) > self._served:
            if not key[0]:
                return None
            # set aside for this round, so that it does not hide groups behind it
            self._waiting._pop(key)
            self._taken.append((key, top))
        return top
