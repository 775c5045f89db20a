"""Memory taken by libzmq's threads beyond the received bytes: the mark of messages made of tiny frames.

A frame may have 2 bytes on the wire, and takes 64 bytes in memory. `Growth` compares new pages with new bytes. The
kernel counts the new pages of each thread, so a model loaded by user code at the same time is not counted. Without
counters (not Linux, or a restricted /proc) the size of the whole process is compared.
"""

import contextlib
import os
from pathlib import Path

from schemas import limits

PAGE = os.sysconf("SC_PAGESIZE")
"""Bytes of a page of memory."""
TINY_FRAME_GROWTH = 32
"""Bytes of memory for each byte received, in frames without content."""

_MINOR_FAULTS_AT = 7
"""Index of `minflt` (pages new to the thread) after the thread's name in `/proc/PID/task/TID/stat`."""
_IO_THREADS = "ZMQbg/IO"
"""Prefix of the names of libzmq's threads for input and output."""


class Growth:
    """Bytes of new memory beyond `limits.UNFINISHED_GROWTH` times the received bytes."""

    def __init__(self) -> None:
        self._stats: list[int] = []
        """Open descriptors of the threads' `stat` files. Kept open: later the process may have no descriptors left."""
        self._faulted: int | None = None
        self._resident = 0
        self._excess = 0
        self._of_threads = False

    def note(self, resident: int, arrived: int, unfinished: int) -> None:
        """Add the growth since the last call to the excess. The excess never goes below 0.

        Args:
            resident: resident bytes of the process; used where threads are not counted.
            arrived: bytes received since the last call.
            unfinished: bytes received in unfinished messages. Up to `limits.UNFINISHED_SMALL_BYTES` the excess
                is reset: so few bytes can't be the cause.
        """
        faulted, before = self.faulted(), self._faulted
        self._of_threads = faulted is not None and before is not None
        grown = (
            faulted - before if faulted is not None and before is not None else resident - (self._resident or resident)
        )
        self._faulted, self._resident = faulted, resident
        if unfinished <= limits.UNFINISHED_SMALL_BYTES:
            self._excess = 0
        else:
            self._excess = max(0, self._excess + grown - limits.UNFINISHED_GROWTH * arrived)

    @property
    def too_much(self) -> bool:
        """True if the excess is above `limits.UNFINISHED_GROWTH_BYTES`, so that only tiny frames can be the cause."""
        return self._excess > limits.UNFINISHED_GROWTH_BYTES

    def forget(self, freed: int) -> None:
        """Subtract the memory of shut connections.

        Without counters of threads the excess becomes 0: anything may have made the process grow, and no further
        connection shall pay for it.

        Args:
            freed: unfinished bytes of the shut connections.
        """
        self._excess = max(0, self._excess - TINY_FRAME_GROWTH * freed) if self._of_threads else 0

    def faulted(self) -> int | None:
        """Return the bytes of pages new to libzmq's threads since their start; None if the kernel does not count."""
        # none yet, or none any more: libzmq starts its threads with the first socket of a context
        if not self._stats:
            with contextlib.suppress(OSError):
                for task in Path("/proc/self/task").iterdir():
                    if (task / "comm").read_text().startswith(_IO_THREADS):
                        self._stats.append(os.open(task / "stat", os.O_RDONLY | os.O_CLOEXEC))
        try:
            texts = [os.pread(stat, 1000, 0) for stat in self._stats]
            # split after the last parenthesis: the thread's name before it may hold spaces and parentheses itself
            num_faults = sum(int(text.rpartition(b")")[2].split()[_MINOR_FAULTS_AT]) for text in texts)
            return num_faults * PAGE or None
        except OSError:
            # the threads have ended, with their context; a new context has threads of its own
            for stat in self._stats:
                os.close(stat)
            self._stats = []
            return None
