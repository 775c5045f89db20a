"""Processes below a worker: counted against a limit, and killed with the worker, also those that left its session."""

import contextlib
import os
import signal
from pathlib import Path

ROUNDS = 100
"""Most searches for processes that were started during the search before."""


def descendants(root: int) -> list[int]:
    """Return the ids of the living processes below a process, the process itself first; empty if it is gone."""
    children: dict[int, list[int]] = {}
    living = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # the name in parentheses may hold blanks; state and parent follow it
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(folder.name))
                if state not in "ZX":
                    living.add(int(folder.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return [process for process in found if process in living]


def kill_all(root: int) -> None:
    """Kill a process and everything below it.

    All are stopped before the first is killed: a stopped process forks no more, and the children of a killed one are no
    longer found below it.
    """
    stopped: set[int] = set()
    for _ in range(ROUNDS):
        running = [process for process in descendants(root) if process not in stopped]
        if not running:
            break
        for process in running:
            _signal(process, signal.SIGSTOP)
        stopped.update(running)
    for process in stopped:
        _signal(process, signal.SIGKILL)


def _signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
