"""Deadlines of equal length: leases of peers (P8) and timeouts of attempts (P12)."""

from collections.abc import Hashable
from itertools import takewhile
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class Clock(Generic[KeyT]):
    """Start times of keys with an equal number of seconds to run.

    The order of the starts is the order of the deadlines, so `late` searches nothing.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[KeyT, float] = {}

    def start(self, key: KeyT, now: float) -> None:
        """Start or restart a key with the whole time from now on."""
        self._since.pop(key, None)  # a dict keeps the order of insertion: the key must move to the end
        self._since[key] = now

    def stop(self, key: KeyT) -> None:
        """Stop a key; an unknown key is ignored."""
        self._since.pop(key, None)

    def since(self, key: KeyT) -> float:
        """Return the time of the newest start of a running key.

        Raises:
            KeyError: the key is not running.
        """
        return self._since[key]

    def __contains__(self, key: KeyT) -> bool:
        return key in self._since

    def late(self, now: float) -> list[KeyT]:
        """Return the keys past the deadline, oldest first; a key is late until stopped."""
        # a start never lies before an earlier one, so the first key in time ends the search
        return list(takewhile(lambda key: now >= self._since[key] + self._seconds, self._since))
