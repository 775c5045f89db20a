"""Threads of `actors` and `bus`. An exception in a marked thread stops the process, so that no thread dies unnoticed.

An uncaught exception goes to `threading.excepthook`; `actors.process.exits` then stops the process if the thread
`is_ours`. Otherwise a run would stand still for good, waiting for a dead thread. Threads of user code and of libraries
are not marked, and may die.

    start(name, run)          a loop: its exception ends the process
    start_helper(name, run)   a single piece of work; hands its exceptions to the waiting thread
    Workers(n, name)          a pool; `submit` for results that are read, `run` for work without a result
    DaemonWorkers(n, name)    the same for code of users, which may never return: the interpreter exits without it

`tests/test_threads.py` checks that no other module of `actors` and `bus` makes a thread. `tests/chaos/threads.py` lists
each thread with the place at which `make chaos` makes it raise.
"""

import asyncio
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TICK_SECONDS = 0.5
"""Seconds between two calls of `mark` from an event loop."""

_ours: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # weak: threads that have ended are forgotten


def is_ours(thread: threading.Thread | None) -> bool:
    """Return whether an exception in this thread must stop the process."""
    return thread is not None and thread in _ours


def start(name: str, run: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Start and return a thread. An exception in the thread stops the process."""
    thread = make(name, run, *arguments)
    thread.start()
    return thread


def make(name: str, run: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Return a thread, not started yet. An exception in the thread stops the process."""
    # daemon: a thread that hangs in a system call must not keep the process alive at its exit
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    _ours.add(thread)
    return thread


def start_helper(name: str, run: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Start and return a thread. `run` must catch its exceptions and hand over any error to the waiting thread."""
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


class _Running(Executor):
    """An executor with a second way to submit: `run`, for work without a result."""

    def run(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run work without a result. An exception stops the process."""

        def watched() -> None:
            try:
                work(*arguments)
            except BaseException:  # noqa: BLE001 - handled like the uncaught exception of a thread
                thread = threading.current_thread()
                _ours.add(thread)
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))

        # not `submit(work)`: the exception would stay in a future that nobody reads
        self.submit(watched)


class Workers(ThreadPoolExecutor, _Running):
    """A thread pool. The interpreter's exit waits for work that has been submitted."""

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        super().__init__(max_workers, thread_name_prefix)


class DaemonWorkers(_Running):
    """A thread pool for work that may never return: the interpreter's exit does not wait for its threads.

    Args:
        max_workers: largest number of threads; each is started when no other is free.
        name: name of the threads.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers, self._name = max_workers, name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._threads: list[threading.Thread] = []
        self._free = threading.Semaphore(0)
        self._waiting: set[Future[Any]] = set()
        # a pool that nobody has shut down lets its threads go when it is forgotten
        weakref.finalize(self, self._work.put, None)

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> Future[T]:
        """Run work in a thread, and return the future of its result.

        Raises:
            RuntimeError: the pool is shut down.
        """
        future: Future[T] = Future()
        waiting = self._waiting

        def call() -> None:
            waiting.discard(future)
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(*arguments, **keywords)
            except BaseException as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.add(future)
            self._work.put(call)
            if not self._free.acquire(blocking=False) and len(self._threads) < self._max_workers:
                name = f"{self._name}_{len(self._threads)}"
                self._threads.append(start_helper(name, _serve, self._work, self._free))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work.

        Args:
            wait: True to wait until all work is done.
            cancel_futures: True to cancel work that has not started.
        """
        with self._lock:
            self._closed = True
        if cancel_futures:
            for future in list(self._waiting):
                future.cancel()
        self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


def _serve(work: "queue.SimpleQueue[Callable[[], None] | None]", free: threading.Semaphore) -> None:
    """Do the work of a pool until its end."""
    while (call := work.get()) is not None:
        call()
        # a result must not live until the next call
        del call
        free.release()
    # for the next thread
    work.put(None)


on_mark: Callable[[str], None] | None = None
"""Set by `actors.process.fault_points` where tests have threads raise."""


def mark(place: str) -> None:
    """Mark a turn of a thread's loop or a piece of work. Does nothing, unless a test has set `on_mark` to raise here.

    Args:
        place: name of the loop or of the work.
    """
    if on_mark is not None:
        on_mark(place)


def tick(loop: asyncio.AbstractEventLoop, place: str) -> None:
    """Make an event loop call `mark` every TICK_SECONDS. Does nothing without `on_mark`."""
    if on_mark is None:
        return

    def again() -> None:
        mark(place)
        loop.call_later(TICK_SECONDS, again)

    loop.call_soon(again)  # runs in the loop's thread once the loop has started
