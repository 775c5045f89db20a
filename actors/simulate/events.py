"""Events in virtual time: a heap of actions, carried out in the order of their times.

Actions of the same time are carried out in the order in which they were asked for, so that a simulation is a function
of its inputs alone.
"""

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """Clock of a simulation, in seconds from its start, with the actions that are due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Carry out an action at a time; a time that has passed means now."""
        # the count decides between equal times, and keeps the heap from comparing functions
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Carry out an action some seconds from now."""
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, action, arguments))

    def run(self, until: Callable[[], bool]) -> None:
        """Carry out actions until a condition holds, or none is left."""
        due, pop = self._due, heapq.heappop
        while due and not until():
            self.now, _, action, arguments = pop(due)
            action(*arguments)
