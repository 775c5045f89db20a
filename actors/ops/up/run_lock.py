"""Locks on an output_dir: only one `actors up` at a time, and none before the previous run's actors are gone.

`.up.lock` is held by `actors up` alone, and contains the pid. `.actors.lock` is held through a file descriptor that
all actors inherit, so the lock is free once the last actor is gone. When `actors up` is killed, the kernel kills the
actors too, but ledger and sockets stay open for about 100 ms (up to a second for an actor that is starting).
"""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from schemas.errors import ConfigError

ACTORS_END_SECONDS = 30.0
"""Longest wait for `.actors.lock`. A longer hold is not an actor's, but a process left behind by user code."""
LOOK_SECONDS = 0.2
"""Time for other processes to look whether the lock is held."""
POLL_SECONDS = 0.02
"""Seconds between two looks at a lock."""


@contextlib.contextmanager
def hold_run_lock(output: Path, patience_seconds: float = ACTORS_END_SECONDS) -> Iterator[int]:
    """Hold the locks for the duration of a block; the kernel releases them if this process dies.

    Yields:
        The file descriptor that every actor must inherit.

    Raises:
        ConfigError: another `actors up` holds the lock.
    """
    with (output / ".up.lock").open("a+b", 0) as up, (output / ".actors.lock").open("a+b", 0) as actors:
        if not _locked_soon(up):
            up.seek(0)
            pid = up.read().decode()
            raise ConfigError(
                f"output_dir: {output}: a run is going on here (actors up, pid {pid}); wait for its end, stop it with "
                f"kill {pid}, or set another output_dir"
            )
        # on a full disk the lock is enough: the pid is only for people
        with contextlib.suppress(OSError):
            up.truncate(0)
            up.write(str(os.getpid()).encode())
        _wait_for(actors, patience_seconds)
        # shared, since a process left behind may still hold the lock; the descriptor is inherited by all actors
        _locked(actors, fcntl.LOCK_SH)
        yield actors.fileno()


def is_held(output: Path) -> bool:
    """Return whether an `actors up` holds the output_dir, as far as this machine can see its lock."""
    try:
        with (output / ".up.lock").open("rb", 0) as lock:
            return not _locked(lock, fcntl.LOCK_EX)
    except OSError:  # no lock: nothing has run there; or the file is of another user, who alone may tell
        return False


def _wait_for(actors: FileIO, patience_seconds: float) -> None:
    """Wait until the actors of a killed `actors up` are gone; after `patience_seconds` print a warning and return."""
    deadline, told = time.monotonic() + patience_seconds, False
    while not _locked(actors, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            print(f"warning: {actors.name} is still held after {patience_seconds:g} s; going on", file=sys.stderr)
            return
        if not told:
            print("waiting for the actors of the previous run to exit", file=sys.stderr)
        told = True
        time.sleep(POLL_SECONDS)


def _locked_soon(up: FileIO) -> bool:
    """Lock a file, and try again for a moment: `is_held` holds it for the time of its look."""
    deadline = time.monotonic() + LOOK_SECONDS
    while not _locked(up, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _locked(file: FileIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks: a run must be possible there, and nothing prevents a second one
        return True
    return True
