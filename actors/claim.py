"""The claim to an output_dir: one `actors up` at a time, and none before the actors of the last one are gone.

`.up.lock` is held by `actors up` alone, and has its pid inside. `.actors.lock` is held through a descriptor that all
its actors inherit, so it is free once the last of them is gone: when `actors up` is killed the kernel kills them too,
but they live on for some 100 ms (one that is just starting: for a second), with the ledger and their sockets in hand.
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
"""What holds `.actors.lock` for longer is no actor, but something that user code has forked and left behind."""
POLL_SECONDS = 0.02


@contextlib.contextmanager
def claimed(output: Path, patience_seconds: float = ACTORS_END_SECONDS) -> Iterator[int]:
    """Hold the claim for a block, and however this process ends; yields the descriptor that every actor must inherit.

    Raises:
        ConfigError: a run is going on here.
    """
    with (output / ".up.lock").open("a+b", 0) as up, (output / ".actors.lock").open("a+b", 0) as actors:
        if not _locked(up, fcntl.LOCK_EX):
            up.seek(0)
            pid = up.read().decode()
            raise ConfigError(
                f"output_dir: {output}: a run is going on here (actors up, pid {pid}); wait for its end, stop it with "
                f"kill {pid}, or set another output_dir"
            )
        with contextlib.suppress(OSError):  # on a full disk: the lock is what counts, the pid is for people
            up.truncate(0)
            up.write(str(os.getpid()).encode())
        _wait_for(actors, patience_seconds)
        _locked(actors, fcntl.LOCK_SH)  # shared: beside what has not let go of it
        yield actors.fileno()


def _wait_for(actors: FileIO, patience_seconds: float) -> None:
    """Until the actors of a killed `actors up` are gone."""
    deadline, told = time.monotonic() + patience_seconds, False
    while not _locked(actors, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            print(f"warning: {actors.name} is still held after {patience_seconds:g} s; going on", file=sys.stderr)
            return
        if not told:
            print("waiting for the actors of the run before to end", file=sys.stderr)
        told = True
        time.sleep(POLL_SECONDS)


def _locked(file: FileIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: it is as safe as its user is careful
    return True
