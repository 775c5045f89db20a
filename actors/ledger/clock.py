"""Deadlines that all have the same length: leases of peers, timeouts of attempts (P8, P12)."""

from collections.abc import Hashable
from itertools import takewhile
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class Clock(Generic[KeyT]):
    """Who was started when. Since all have `seconds`, the order of starting is the order of ending: no search."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[KeyT, float] = {}

    def start(self, key: KeyT, now: float) -> None:
        """Give this key its whole time from now on."""
        self._since.pop(key, None)
        self._since[key] = now

    def start_all(self, now: float) -> None:
        """Give all keys their whole time from now on."""
        self._since = dict.fromkeys(self._since, now)

    def stop(self, key: KeyT) -> None:
        """Forget a key; nothing happens where it is not known."""
        self._since.pop(key, None)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._since

    def late(self, now: float) -> list[KeyT]:
        """The keys whose time is over, oldest first."""
        return list(takewhile(lambda key: now >= self._since[key] + self._seconds, self._since))
