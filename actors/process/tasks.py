"""Long work of this process with its progress: the load of a model, the first pass over a file, a download.

    with task("read data.jsonl", total=size, unit="bytes") as reading:
        for line in file:
            reading.advance(len(line))

A task is told while it lasts: in heartbeats, which the packer passes on to screens, and to the teller of the process.
Actors tell their log (work that takes FIRST_SECONDS), commands the terminal.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from actors.process.durations import seconds_in_words

if TYPE_CHECKING:
    from schemas.messages import ActorTask

log = structlog.get_logger("task")

TELL_SECONDS = 0.2
"""Shortest time between two calls of the teller for the same task."""
FIRST_SECONDS, NEXT_SECONDS = 10.0, 30.0
"""Age of a task in seconds at its first log line, and seconds from one line to the next."""
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Units of bytes, largest first."""


class Task:
    """Work under way.

    Args:
        name: what is done, as a verb with its object: `load model`.
        total: amount of all work; 0: unknown.
        unit: unit of the amount, in the plural; `bytes` are shown as kB to TB.
        measure: function that returns the amount done, for work that can't call `advance`; may raise OSError.
    """

    def __init__(self, name: str, total: float, unit: str, measure: Callable[[], float] | None) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done, self._measure = 0.0, measure
        self.since, self._started = time.time(), time.monotonic()
        self._told_at = self._started
        self._line_at = FIRST_SECONDS

    @property
    def seconds(self) -> float:
        """Seconds since the start of the work."""
        return time.monotonic() - self._started

    def advance(self, amount: float = 1.0) -> None:
        """Add an amount that is done."""
        self.done += amount
        self._tell()

    def reach(self, done: float, total: float | None = None, unit: str | None = None) -> None:
        """Set the amount that is done, and total and unit if they are known now."""
        self.done = done
        self.total = self.total if total is None else total
        self.unit = self.unit if unit is None else unit
        self._tell()

    def begin(self, total: float, unit: str, name: str | None = None) -> None:
        """Begin the next part of the work, whose time is counted from now; the name stays by default."""
        self.name = self.name if name is None else name
        self.total, self.unit, self.done = total, unit, 0.0
        self.since, self._started = time.time(), time.monotonic()
        self._line_at = FIRST_SECONDS

    def look(self) -> None:
        """Measure the amount that is done, if the task has a measure."""
        if self._measure is not None:
            try:
                self.done = self._measure()
            except OSError:  # a file that is being replaced: the next look finds another
                return

    @property
    def is_line_due(self) -> bool:
        """True if a line of text shall tell of the task now; False again until the next one is due."""
        if self.seconds < self._line_at:
            return False
        self._line_at = self.seconds + NEXT_SECONDS
        return True

    @property
    def words(self) -> str:
        """The task in words."""
        return task_words(self.name, self.done, self.total, self.unit, self.seconds)

    @property
    def values(self) -> dict[str, Any]:
        """The task as plain values, for files."""
        values = {"name": self.name, "done": self.done, "total": self.total, "unit": self.unit}
        return values | {"seconds": round(self.seconds, 1)}

    def _tell(self) -> None:
        now = time.monotonic()
        if _teller is not None and now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            _teller.told(self)


class Teller(Protocol):
    """Receiver of a process's tasks. Methods are called in the thread that works, and return quickly."""

    def told(self, task: Task) -> None:
        """Take note of the progress of a task."""
        ...

    def ended(self, task: Task) -> None:
        """Take note that a task has ended, well or not."""
        ...


_teller: Teller | None = None
_lock = threading.Lock()
_running: list[Task] = []
"""Tasks under way, outermost first."""


def tell_by(teller: Teller | None) -> None:
    """Set the teller of this process; None: tasks are told in heartbeats alone."""
    global _teller
    _teller = teller


@contextmanager
def task(name: str, total: float = 0.0, unit: str = "", measure: Callable[[], float] | None = None) -> Iterator[Task]:
    """Provide a task for the block that does its work; the arguments are those of `Task`."""
    made = Task(name, total, unit, measure)
    with _lock:
        _running.append(made)
    try:
        yield made
    finally:
        with _lock:
            _running.remove(made)
        if _teller is not None:
            _teller.ended(made)


def reported() -> "ActorTask | None":
    """Return the innermost task under way, for a heartbeat; None: there is none.

    The teller hears of the task too, since some work has no progress of its own to tell.
    """
    with _lock:
        newest = _running[-1] if _running else None
    if newest is None:
        return None
    # imported here: each command imports this module, and messages load numpy
    from schemas.messages import ActorTask

    newest.look()
    if _teller is not None:
        _teller.told(newest)
    return ActorTask(name=newest.name[:200], done=newest.done, total=newest.total, unit=newest.unit, since=newest.since)


class LogTeller:
    """Teller that writes log lines: the first after FIRST_SECONDS, then one every NEXT_SECONDS, and the end."""

    def told(self, task: Task) -> None:
        """Write a line, if one is due."""
        if task.is_line_due:
            log.info("under way", task=task.words)

    def ended(self, task: Task) -> None:
        """Write the last line, of a task that lasted for FIRST_SECONDS."""
        if task.seconds >= FIRST_SECONDS:
            log.info("ended", task=task.name, seconds=round(task.seconds, 1))


def task_words(name: str, done: float, total: float, unit: str, seconds: float) -> str:
    """Return the progress of a task: `load model: 120 of 290 tensors, about 12 s left`.

    Args:
        name: what is done.
        done, total: amounts; a total of 0 is unknown.
        unit: unit of the amounts.
        seconds: time since the start, from which the time left follows by the mean pace.
    """
    if total <= 0:
        amount = f"{_amount(done, unit)}, " if done > 0 else ""
        return f"{name}: {amount}for {seconds_in_words(seconds)}"
    counts = f"{name}: {_amount(min(done, total), unit, total)}"
    if not 0 < done < total:
        return counts
    return f"{counts}, about {seconds_in_words(seconds / done * (total - done))} left"


def words_of(values: Mapping[str, Any]) -> str:
    """Return the words of a task as `progress.json` has it."""
    return task_words(*(values[name] for name in ("name", "done", "total", "unit", "seconds")))


def _amount(done: float, unit: str, total: float | None = None) -> str:
    scale = 1.0
    if unit == "bytes":
        scale, unit = next(((size, name) for size, name in SIZES if (total or done) >= size), (1.0, "bytes"))
    form = "{:.0f}" if scale == 1.0 else "{:.1f}"
    of = "" if total is None else f" of {form.format(total / scale)}"
    return f"{form.format(done / scale)}{of} {unit}".rstrip()
