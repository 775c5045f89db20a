"""Logs by structlog: text on a terminal, else JSON, with actor, name, step and policy as fields."""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from typing import TextIO

import structlog

from bus import threads
from schemas.config.services import TelemetryConfig

PATIENCE_SECONDS = 0.2
"""Longest wait of a thread for its log line to be written."""
FLUSH_SECONDS = 5.0
"""Longest wait for the last lines at the end of a process."""
MAX_WAITING = 10_000
"""Largest number of lines waiting for the stream; further lines are lost."""
IDLE_SECONDS = 1.0
"""Longest wait of the writing thread before its next turn."""


def configure_logs(config: TelemetryConfig, stream: TextIO | None = None) -> None:
    """Configure logging of this process; called once, by the runtime.

    Args:
        config: log level and format.
        stream: destination; default: stderr.
    """
    stream = stream or sys.stderr
    as_json = config.log_format == "json" or (config.log_format == "auto" and not stream.isatty())
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=stream.isatty())
    )
    lines = Lines(stream)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.log_level.upper()]),
        logger_factory=lambda *_: lines,
        # a module may log before this call; its logger must follow the configuration later
        cache_logger_on_first_use=False,
    )


class Lines:
    """Writer of log lines, in a separate thread: a pipe that is not read blocks no other thread.

    `write` waits until the line is written: nothing is lost at the end of a process. If the stream stands
    still, the wait is PATIENCE_SECONDS, and later calls don't wait until the stream moves again. Lines beyond
    MAX_WAITING are lost. Lines that can't be written are lost too: a full disk must not end a process.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begin()
        _all_lines.add(self)

    def _begin(self) -> None:
        """Reset to a state without a thread. A forked child needs this: it has no copy of its parent's threads."""
        self._waiting: deque[tuple[str, threading.Event]] = deque()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stands_still = False
        self._num_lost = 0

    def write(self, line: str) -> None:
        """Write a line, and wait up to PATIENCE_SECONDS until it is written."""
        written = threading.Event()
        with self._news:
            if len(self._waiting) >= MAX_WAITING:
                self._num_lost += 1
                return
            self._waiting.append((line, written))
            if self._thread is None:
                self._thread = threads.start("log", self._run)
            self._news.notify()
        # once the stream stands still no line is waited for, until one is written again
        if not self._stands_still and not written.wait(PATIENCE_SECONDS):
            with self._news:
                # looked at again: a line that was written just now must not leave later ones unwaited for
                self._stands_still = not written.is_set()

    def flush(self, seconds: float) -> None:
        """Wait up to `seconds` until all lines so far are written."""
        with self._news:
            newest = self._waiting[-1][1] if self._waiting else None
        if newest is not None:
            newest.wait(seconds)

    msg = log = debug = info = warning = error = critical = exception = fatal = failure = warn = err = write
    """Methods that structlog calls, by level."""

    def _run(self) -> None:
        try:
            while True:
                threads.mark("log")
                with self._news:
                    if not self._news.wait_for(lambda: self._waiting, IDLE_SECONDS):
                        continue
                    line, written = self._waiting[0]
                    num_lost, self._num_lost = self._num_lost, 0
                lost = f"{num_lost} log lines lost: nothing reads the output\n" if num_lost else ""
                try:
                    # outside of the lock, since a pipe that is not read holds this thread up for good
                    with contextlib.suppress(OSError, ValueError):
                        self._stream.write(f"{lost}{line}\n")
                        self._stream.flush()
                finally:  # removed even if this thread ends here: the line would end the next thread too
                    with self._news:
                        self._stands_still = False
                        written.set()
                        # removed after the write, so that a line being written counts against MAX_WAITING
                        self._waiting.popleft()
        except BaseException:
            # the next line, most likely about this very failure, starts another thread
            self._thread = None
            raise


_all_lines: "weakref.WeakSet[Lines]" = weakref.WeakSet()
"""Writers that a forked child must reset."""


def _begin_in_child() -> None:
    for lines in list(_all_lines):
        lines._begin()


os.register_at_fork(after_in_child=_begin_in_child)


@atexit.register
def flush() -> None:
    """Wait up to FLUSH_SECONDS until all lines are written, before this process ends: a busy machine writes late."""
    deadline = time.monotonic() + FLUSH_SECONDS
    for lines in list(_all_lines):
        lines.flush(max(0.0, deadline - time.monotonic()))


def bind_everywhere(**fields: str | int) -> None:
    """Add fields to every later log line of this process, in all threads."""
    _FIELDS.update(fields)
    processors = structlog.get_config()["processors"]
    if _add_fields not in processors:
        structlog.configure(processors=[_add_fields, *processors])


_FIELDS: dict[str, str | int] = {}


def _add_fields(logger: object, method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    return {**_FIELDS, **event}
