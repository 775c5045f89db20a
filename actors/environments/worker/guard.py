"""Guard of a worker: a process between the actor and the worker, so that neither leaves a process behind.

A worker puts a guard between itself and each command of an agent in the same way (`agents/program.py`): there the
worker has the part of the actor, and the command that of the worker.

The guard adopts every process below it whose parent has ended (it is a subreaper), also those in sessions of their own.
When the actor dies, the worker ends, or the worker has too many processes, the guard kills all that is left, and then
ends as the worker has ended. An actor that ends a worker asks its guard, by SIGTERM: only the guard still finds the
children of what it has killed.

Forked before anything is imported: costs one small process for each worker.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from .processes import kill_below, num_below

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WOKEN_BY = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PACE_SECONDS = 0.02
"""Seconds between two looks at the number of processes that the kernel has started."""
LOOK_SECONDS = 1.0
"""Seconds between two counts of processes, at most."""
SHARE_OF_TIME = 0.1
"""Most of the time that counts may take, with many processes or on a machine with many short ones."""
TOO_MANY_PROCESSES = 240
"""Status of a guard whose worker had too many processes. A worker that ends with it counts as ended with 1."""
END_SECONDS = 10.0
"""Longest wait for killed processes; those of another user can't be killed."""


class End(NamedTuple):
    """End of a worker, as its guard has seen it."""

    status: int
    """Status as `os.waitpid` returns it; of a worker that the guard is to kill, that of the guard."""
    reason: Literal["ended", "asked", "processes"]
    """`ended`: by itself, or by a signal of others; `asked`: the parent ends it, or has died; `processes`: it had too
    many."""


def guarded(parent: int, processes: int, tell: Callable[[End], None] = lambda end: None) -> None:
    """Fork: return in the worker, and never in the guard, which is the process that the actor has started.

    Args:
        parent: id of the actor's process.
        processes: most processes of the worker, itself included; 0: any number.
        tell: called in the guard with the end of the worker, once everything below the guard has ended.
    """
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WOKEN_BY)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"the actor (process {parent}) ended before its worker had started")
    guard = os.getpid()
    worker = os.fork()
    if not worker:
        # of its own, or a signal of the user's to the own process group would reach the guard
        os.setsid()
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    end = End(_exited(1), "asked")
    try:
        end = _watch(worker, _Count(processes), PACE_SECONDS if processes else LOOK_SECONDS)
    finally:
        try:
            _end_all()
            tell(end)
        finally:
            is_taken = end == End(_exited(TOO_MANY_PROCESSES), "ended")
            _end_as(_exited(1) if is_taken else end.status)


def _watch(worker: int, count: "_Count", pace: float) -> End:
    """Wait until the worker ends, has too many processes, or is to end; look each `pace` seconds."""
    while True:
        woken = signal.sigtimedwait(WOKEN_BY, pace)
        if woken is not None and woken.si_signo != signal.SIGCHLD:
            # the actor has died, or ends this worker
            return End(int(woken.si_signo), "asked")
        for process, status in _ended():
            if process == worker:
                return End(status, "ended")
        if count.is_passed():
            return End(_exited(TOO_MANY_PROCESSES), "processes")


class _Count:
    """Count of the processes below this one.

    A count reads all processes below. So they are counted once a second, and as soon as the ids that the machine has
    given out since the last count (of processes and of threads) would be enough to pass the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._number, self._newest, self._next, self._latest = 1, 0, 0.0, 0.0

    def is_passed(self) -> bool:
        """Return whether there are too many processes, if it is time to count; otherwise False."""
        if not self._limit:
            return False
        now = time.monotonic()
        started = _newest_id() - self._newest
        # ids start again at the largest one
        may_be_too_many = not 0 <= started <= self._limit - self._number
        if now < self._next or (now < self._latest and not may_be_too_many):
            return False
        self._newest = _newest_id()
        self._number = num_below(os.getpid(), self._limit)
        cost = time.monotonic() - now
        self._next, self._latest = now + cost / SHARE_OF_TIME, now + LOOK_SECONDS
        return self._number > self._limit


def _exited(code: int) -> int:
    """Return the status of a process that has ended by itself."""
    return code << 8


def _newest_id() -> int:
    """Return the newest process id that the kernel has given out."""
    with open("/proc/loadavg", encoding="ascii") as file:  # noqa: PTH123 - fifty times a second
        return int(file.read().split()[-1])


def _ended() -> list[tuple[int, int]]:
    """Return process and status of children that have ended, adopted ones too."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def _end_all() -> None:
    """Kill everything below this process, and wait for its end."""
    deadline = time.monotonic() + END_SECONDS
    # ChildProcessError: there is none left
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            kill_below(os.getpid())
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            # for the killed to end
            time.sleep(0.001)


def _end_as(status: int) -> None:
    """End as the worker has ended: with its status, or by its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError, ImportError):
            import resource

            # the worker has left its own
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
