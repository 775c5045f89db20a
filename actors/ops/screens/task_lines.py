"""Progress of long work of a command: a bar on a terminal, lines of text elsewhere."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from actors.ops.screens.render import printable
from actors.process import tasks
from actors.process.tasks import Task

if TYPE_CHECKING:
    from tqdm import tqdm

QUIET_SECONDS = 0.5
"""Age of a task in seconds from which on it has a bar."""


class Bars:
    """Teller that shows the newest task as a bar, which is gone when the task has ended.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._of: Task | None = None
        self._bar: tqdm | None = None

    def told(self, task: Task) -> None:
        """Draw the bar."""
        if task.seconds < QUIET_SECONDS:
            return
        # a terminal that is gone must not end the work
        with _without_interrupt(), contextlib.suppress(OSError):
            if self._bar is None or task is not self._of:
                self._close()
                self._of, self._bar = task, self._made(task)
            # the start too: a task may have begun its next part, or long before it has a bar
            self._bar.n, self._bar.total = int(task.done), int(task.total) or None
            self._bar.start_t = time.time() - task.seconds
            self._bar.refresh()

    def ended(self, task: Task) -> None:
        """Remove the bar of a task."""
        if task is self._of:
            self._close()

    def _made(self, task: Task) -> "tqdm":
        # imported here: most commands end before there is a bar
        from tqdm import tqdm

        is_bytes = task.unit == "bytes"
        return tqdm(
            desc=printable(task.name),
            total=int(task.total) or None,
            unit="B" if is_bytes else f" {task.unit}".rstrip(),
            unit_scale=is_bytes,
            file=self._stream,
            leave=False,
            dynamic_ncols=True,
        )

    def _close(self) -> None:
        bar, self._of, self._bar = self._bar, None, None
        if bar is not None:
            with _without_interrupt(), contextlib.suppress(OSError):
                bar.close()


class TextLines:
    """Teller that writes a line about a task at the intervals of `actors.process.tasks`.

    Args:
        stream: file or pipe.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def told(self, task: Task) -> None:
        """Write a line, if one is due."""
        if task.is_line_due:
            # a full disk, or a pipe that its reader has closed, must not end the work
            with contextlib.suppress(OSError):
                print(printable(task.words), file=self._stream, flush=True)

    def ended(self, task: Task) -> None:
        """Write nothing: the command goes on with what it has to say."""


@contextlib.contextmanager
def _without_interrupt() -> Iterator[None]:
    """Hold a Ctrl-C back until the end of the block.

    In the middle of a bar it would leave the bar on the terminal, or be lost in code that ignores exceptions.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are handled in the main thread alone
        yield
        return
    before, came = signal.getsignal(signal.SIGINT), threading.Event()
    if not callable(before):  # ignored, or ends the process at once
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came.is_set():
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def tasks_on(stream: IO[str]) -> Iterator[None]:
    """Show the long work of the block on a stream."""
    tasks.tell_by(Bars(stream) if stream.isatty() else TextLines(stream))
    try:
        yield
    finally:
        tasks.tell_by(None)
