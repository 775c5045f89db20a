"""Writes to a run's files on a disk that may be full: tried again, logged, counted.

A failed write ends no process. Training goes on without it, and the caller keeps the data for another try.
"""

import time
from collections.abc import Callable

import structlog

from actors.telemetry.writer import WriteError

log = structlog.get_logger("packer")

RETRY_SECONDS = 1.0
"""Pause after a failed write of a file."""
TELL_SECONDS = 10.0
"""Shortest time between two log lines about failed writes."""


class RetryingWriter:
    """Writer with retries, and the current problems of all files.

    Args:
        count: called once for each failed write.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self.problems: dict[str, str] = {}
        """Path and reason for each file whose last write has failed, by file name."""
        self._count = count
        self._retry_at: dict[str, float] = {}
        self._tell_at = 0.0

    def write(self, name: str, write: Callable[[], object]) -> bool:
        """Write a file; return False if that fails, or if the last write has failed less than RETRY_SECONDS ago.

        Args:
            name: name of the file.
            write: does the write; raises WriteError if nothing was written.
        """
        if time.monotonic() < self._retry_at.get(name, 0.0):
            return False
        try:
            write()
        except WriteError as error:
            now = time.monotonic()
            self._retry_at[name], self.problems[name] = now + RETRY_SECONDS, str(error)
            self._count()
            # a line for all files together: on a full disk each of them fails
            if now >= self._tell_at:
                self._tell_at = now + TELL_SECONDS
                log.warning(
                    "can't be written, free space; training goes on, and what is missing is written once there is room",
                    files=sorted(self.problems.values()),
                )
            return False
        # only after a failure, so that a healthy run logs nothing
        if self.problems.pop(name, None):
            log.info("written again", file=name)
        return True
