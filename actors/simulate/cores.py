"""CPU cores that engines and trainer share, on a machine without GPUs for all of them.

Everything that computes at the same time slows down alike once there is more to do than the cores can
(`actors.simulate.models.slowdown`). A worker that is told of a change first takes in the time before the change.
"""

from typing import Protocol

from actors.simulate.models import Times, slowdown


class Worker(Protocol):
    """Engine or trainer that shares the cores."""

    def set_slowdown(self, factor: float) -> None:
        """Compute slower by a factor from now on."""
        ...


class Cores:
    """Cores of the machine, with the workers that compute now.

    Args:
        times: figures of the models.
        workers: all workers, told of each change.
    """

    def __init__(self, times: Times) -> None:
        self._times = times
        self.workers: list[Worker] = []
        self._computing: dict[int, int] = {}
        """Processes that compute for each worker, by the worker's identity."""
        self._factor = slowdown(times, 1)

    def compute(self, worker: Worker, num_processes: int) -> None:
        """Note how many processes of a worker compute from now on; 0: none."""
        if num_processes == self._computing.get(id(worker), 0):
            return
        self._computing[id(worker)] = num_processes
        factor = slowdown(self._times, sum(self._computing.values()))
        if factor != self._factor:
            self._factor = factor
            for each in self.workers:
                each.set_slowdown(factor)

    @property
    def factor(self) -> float:
        """Factor by which computing takes longer now."""
        return self._factor
