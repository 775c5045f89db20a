"""Writes to files in a separate thread: a file system that hangs stops nothing but these writes.

The caller waits for a write up to PATIENCE_SECONDS. A longer write counts as failed for now, and goes on in the
background. If the caller asks for the same write again, it is not repeated: the result of the write under way counts.
Each file has at most one write under way, which limits the queue.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from actors.telemetry.spans import SHORT_SECONDS, span
from bus import threads

PATIENCE_SECONDS = 0.25
"""Longest wait of a round for a write; a working disk needs a hundredth of it."""
IDLE_SECONDS = 1.0
"""Time without a write after which the thread ends; the next write starts another."""


class WriteError(Exception):
    """A file can't be written now; its data counts as not written."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a WriteError that names the file.

    Raises:
        WriteError: in place of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}") from error


class Work(Protocol):
    """Function that does a write, and shares no changing state with other threads."""

    def __call__(self) -> object:
        """Do the write."""
        ...


@dataclass
class _Job:
    """A write under way."""

    work: Work
    what: object
    begun: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def do(self) -> None:
        """Do the write, in the writer's thread."""
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for the write
            self.error = error
        self.done.set()


class Writer:
    """Writer with a background thread. Use from a single thread."""

    def __init__(self) -> None:
        self._jobs: dict[Path, _Job] = {}
        """Writes that no caller has seen the end of, by file."""
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = False
        """True while there is a thread, which ends when idle."""

    def write(self, path: Path, what: object, work: Work) -> None:
        """Write something; return once it is written.

        Args:
            path: path of the file.
            what: identity of the data. A write of the same data still under way is waited for, not repeated; the
                result of a finished write of other data is dropped.
            work: function that does the write.

        Raises:
            WriteError: the file can't be written, or the write takes too long.
        """
        job = self._jobs.get(path)
        if job is None:
            job = self._jobs[path] = _Job(work, what)
            # under the lock, so that a thread about to end for want of work either gets this job or has ended
            with self._lock:
                self._queue.put(job)
                if not self._runs:
                    self._runs = True
                    threads.start("record", self._run)
        # behind a write that hangs nothing is waited for: a round would wait for every file, one after the other
        now = time.monotonic()
        hangs = any(not one.done.is_set() and now - one.begun >= PATIENCE_SECONDS for one in self._jobs.values())
        if not job.done.wait(0.0 if hangs else PATIENCE_SECONDS):
            seconds = time.monotonic() - job.begun
            raise WriteError(f"{path}: the file system has not answered for {seconds:.0f} s")
        del self._jobs[path]
        if job.what != what:
            # it ended with other data, at whatever moment: its result does not matter, and ours is not written yet
            self.write(path, what, work)
            return
        if job.error is not None:
            with writing(path):
                raise job.error

    def _run(self) -> None:
        while True:
            threads.mark("packer.record")
            try:
                job = self._queue.get(timeout=IDLE_SECONDS)
                with span("write", least=SHORT_SECONDS):
                    job.do()
            except queue.Empty:
                # `write` may have queued a job since the queue was empty: then this thread does the job
                with self._lock:
                    if self._queue.empty():
                        self._runs = False
                        return
