"""The clock of leases: stands still while no heartbeats are read (P8: leases run from the reading of a heartbeat)."""

import time


class ListeningClock:
    """Counts the seconds for which a thread reads its socket.

    The thread calls `listened` each time after it has read all waiting messages. The clock then runs for at most
    `allowed` seconds and stands still until the next call. So a peer is late on this clock only if no heartbeat has
    come, never because the reading thread was held up or the process was stopped.

    Example with `allowed` 1 s: calls at 0.0, 0.2 and 9.2 s. The clock shows 0.2 at the second call, stands still at 1.2
    from 1.2 s on, and shows 1.2 at the third call: 8 s are lost.

    Args:
        allowed: seconds for which the clock runs after a call; longer than a turn of the thread.
    """

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._marked = (time.monotonic(), 0.0)
        """Time of the newest call of `listened`, and the seconds lost until then. In a tuple: readers need no lock."""

    def listened(self) -> None:
        """Note that all waiting messages have been read. Not thread-safe."""
        now, (at, lost) = time.monotonic(), self._marked
        # one assignment: a reader sees the old pair or the new one, never half of each
        self._marked = now, lost + max(0.0, now - at - self._allowed)

    @property
    def now(self) -> float:
        """Seconds on this clock; the zero point is arbitrary. Never goes back. Thread-safe."""
        at, lost = self._marked
        return at - lost + min(time.monotonic() - at, self._allowed)
