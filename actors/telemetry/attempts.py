"""Writes to the files of a run, on a disk that may be full: tried again, told in words, counted.

A failed write ends no process: training goes on without it, and what is not written is kept by who wanted it written.
"""

import time
from collections.abc import Callable

import structlog

from actors.telemetry.reporter import WriteError

log = structlog.get_logger("packer")

RETRY_SECONDS = 1.0
TELL_SECONDS = 10.0


class Attempts:
    """Who writes, and what can't be written now.

    Args:
        count: called for each write that has failed.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self.problems: dict[str, str] = {}
        """By file name: path and reason of those whose last write has failed."""
        self._count = count
        self._retry_at: dict[str, float] = {}
        self._tell_at = 0.0

    def write(self, name: str, write: Callable[[], object]) -> bool:
        """Whether it is written; a file whose last write has failed is left alone for RETRY_SECONDS.

        Args:
            name: of the file.
            write: raises WriteError when nothing has been written.
        """
        if time.monotonic() < self._retry_at.get(name, 0.0):
            return False
        try:
            write()
        except WriteError as error:
            self._failed(name, str(error))
            return False
        if self.problems.pop(name, None):
            log.info("written again", file=name)
        return True

    def _failed(self, name: str, problem: str) -> None:
        now = time.monotonic()
        self._retry_at[name] = now + RETRY_SECONDS
        self.problems[name] = problem
        self._count()
        if now < self._tell_at:
            return
        self._tell_at = now + TELL_SECONDS
        log.warning(
            "can't be written, free space; training goes on, and what is missing is written once there is room",
            files=sorted(self.problems.values()),
        )
