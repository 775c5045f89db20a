"""Clock for a run's record: wall-clock time that never goes back, and never jumps while a packer lives."""

import time
from collections.abc import Iterable


class RunClock:
    """Wall clock that is read once, when the packer starts, and then advanced by the monotonic clock.

    So time differences within a packer's life are right whatever happens to the machine's clock, and no difference
    between two lives is negative.

    Args:
        stamps: times recorded by earlier packers of the run, in seconds since 1970.
    """

    def __init__(self, stamps: Iterable[float] = ()) -> None:
        # not before any recorded time, even if the machine's clock has been set back
        self._began, self._at = max([time.time(), *stamps]), time.monotonic()

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        return self._began + time.monotonic() - self._at


def per_second(amount: float, seconds: float) -> float | None:
    """Return amount ÷ seconds; None if no time has passed."""
    return amount / seconds if seconds > 0 else None
