"""Progress bars of libraries as progress of the task under way, in place of a drawing in the log."""

from typing import Any

from tqdm import tqdm

from actors.process.tasks import Task

BYTES = "B"
"""Unit of bytes in the bars of libraries."""


def bars_for(task: Task) -> type[tqdm]:
    """Return a class of bars that draw nothing and tell a task what they count.

    Bars of one unit are added up, since a library downloads several files at once. A bar of another unit is the next
    part of the work, from which the time left is counted.
    """

    class TaskBar(tqdm):  # type: ignore[misc]  # has no types
        """Bar of a library."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))
            name = str(kwargs.get("unit", "it"))
            unit = "bytes" if name == BYTES else "" if name == "it" else name
            total = float(self.total or 0)
            if unit != task.unit or task.done >= task.total:
                task.begin(total, unit)
            else:
                task.reach(task.done, task.total + total)

        def __iter__(self) -> Any:
            for item in self.iterable:
                yield item
                task.advance()

        def update(self, n: float | None = 1) -> bool | None:
            task.advance(n or 0)
            return None

    return TaskBar
