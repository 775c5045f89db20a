"""The processes of this machine. One that ends while it is looked at is left out, and is no error."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ENDED = "ZX"
"""States of a process that has ended and whose parent has not asked for its exit code yet."""


class Running(NamedTuple):
    """A process that has not ended."""

    pid: int
    parent: int
    group: int
    command: tuple[str, ...]
    """Its arguments; none for a thread of the kernel."""


def running() -> Iterator[Running]:
    """All processes that have not ended, by id."""
    for pid in _pids():
        process = look_at(pid)
        if process is not None:
            yield process


def look_at(pid: int) -> Running | None:
    """One process; None if it has ended."""
    # the file is gone, or, once it is open, its process is
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state, parent, group = _stat(pid)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        if len(words) == 1:  # a title, which a forked process has set
            words = words[0].split(" ")
        if state.decode() not in ENDED:
            return Running(pid, int(parent), int(group), tuple(words))
    return None


def has_ended(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    return look_at(pid) is None


def children(parent: int) -> list[Running]:
    """The processes that a process has started and that have not ended."""
    found = []
    for pid in _pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # tests ask in a loop while they wait: commands of all other processes would be most of the work
            if int(_stat(pid)[1]) == parent and (process := look_at(pid)) and process.parent == parent:
                found.append(process)
    return found


def in_group(group: int) -> list[Running]:
    """The processes of a process group that have not ended."""
    return [process for process in running() if process.group == group]


def _pids() -> list[int]:
    with os.scandir("/proc") as entries:
        return sorted(int(entry.name) for entry in entries if entry.name.isdecimal())


def _stat(pid: int) -> list[bytes]:
    """Return state, parent and process group."""
    # the name in parentheses may hold blanks and parentheses itself
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split(maxsplit=3)[:3]
