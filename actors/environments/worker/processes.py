"""Processes below a worker: counted against a limit, and killed with the worker, also those that left its session.

Used by the actor, and by the guard in a worker's own interpreter.
"""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROUNDS = 100
"""Most searches for processes that were started during the search before."""
MOST_FOUND = 10_000
"""Processes after which a search below a process stops; a fork bomb might keep it up for ever."""


class Process(NamedTuple):
    """Facts about a process, as the kernel tells them."""

    parent: int
    group: int
    session: int
    started: int
    """Ticks from the start of the machine: an id that is used again has another start."""
    is_living: bool


Processes = Mapping[int, Process]


def snapshot() -> dict[int, Process]:
    """Return all processes of the machine by id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # a process may end during the search
            with contextlib.suppress(OSError, ValueError, IndexError):
                # the name in parentheses may hold blanks, parentheses and any bytes; the other fields follow it
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                found[int(folder.name)] = Process(
                    int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), fields[0] not in b"ZX"
                )
    return found


def below(roots: Iterable[int], processes: Processes) -> dict[int, int]:
    """Return the start of each living process among some and below them, by id."""
    children: dict[int, list[int]] = {}
    for number, process in processes.items():
        children.setdefault(process.parent, []).append(number)
    found = list(dict.fromkeys(roots))
    known = set(found)
    for number in found:
        new = [child for child in children.get(number, []) if child not in known]
        found += new
        known.update(new)
    return {n: processes[n].started for n in found if n in processes and processes[n].is_living}


def num_below(root: int, most: int) -> int:
    """Return the number of living processes below one, which is not counted. Beyond `most` the count may stop."""
    if not _tells_children(root):
        return len(below([root], snapshot())) - 1
    number = 0
    for process in _walk(root):
        # a process may end during the search
        with contextlib.suppress(OSError):
            number += Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
        # a fork bomb may grow faster than the search
        if number > most:
            break
    return number


def kill_all(root: int, seen: Mapping[int, int]) -> None:
    """Kill a process that has not been waited for, its session, everything below, and what was seen below before.

    Args:
        root: leads its session.
        seen: result of `below` from some time before.
    """
    _kill(root, seen, root_is_ours=True)


def kill_left(root: int, seen: Mapping[int, int]) -> None:
    """Kill what a process that has ended and was waited for has left: its session, and what was seen below it before.

    Args:
        root: the id that the process had; another process may have it now.
        seen: result of `below` from some time before.
    """
    _kill(root, seen, root_is_ours=False)


def kill_below(guard: int) -> None:
    """Kill everything below a process once. Sound only for a subreaper, which adopts the children of the killed.

    By process groups: a signal to a group misses no process that is just being forked, so that a fork bomb ends at once
    unless each of its processes has a group of its own.

    Args:
        guard: no process below it is in its group.
    """
    killed = {os.getpgid(guard)}
    for number in _walk(guard) if _tells_children(guard) else below([guard], snapshot()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            group = os.getpgid(number)
            if number != guard and group not in killed:
                killed.add(group)
                os.killpg(group, signal.SIGKILL)
        if number != guard:
            # its group may have changed
            _signal(number, signal.SIGKILL)


def _tells_children(process: int) -> bool:
    """Return whether the kernel tells the children of a process; it may have been built without."""
    return Path(f"/proc/{process}/task/{process}/children").exists()


def _walk(root: int) -> Iterator[int]:
    """Yield the processes below one; each after its children were asked for, so that it may be killed.

    The time does not grow with the processes of the machine. A child may be missed while others end.
    """
    waiting = _children(root)
    for number in waiting:
        if len(waiting) < MOST_FOUND:
            waiting += _children(number)
        yield number


def _children(process: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        folder = f"/proc/{process}/task"
        for thread in os.listdir(folder):  # noqa: PTH208 - many times in the search for a fork bomb
            found += map(int, Path(f"{folder}/{thread}/children").read_bytes().split())
    return found


def _kill(root: int, seen: Mapping[int, int], root_is_ours: bool) -> None:
    """Kill processes; never raise, because what can't be killed must not save the others.

    All are stopped before the first is killed: a stopped process forks no more, and the children of a killed one are no
    longer found below it.
    """
    stopped: set[int] = set()
    for _ in range(ROUNDS):
        processes = snapshot()
        roots = [n for n, started in seen.items() if n in processes and processes[n].started == started]
        if root_is_ours or root not in processes:
            # the kernel gives out no id that a session still has, so a session without its leader is the old one
            roots += [n for n, process in processes.items() if n == root or process.session == root]
        running = [n for n in below(roots, processes) if n not in stopped]
        if not running:
            break
        for number in running:
            _signal(number, signal.SIGSTOP)
        stopped.update(running)
    for number in stopped:
        _signal(number, signal.SIGKILL)


def _signal(process: int, number: signal.Signals) -> None:
    """Send a signal; a process may be gone, or belong to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)
