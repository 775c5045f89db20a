"""Where the time of a run goes on the cores of a machine: CPU time by actor, and ten steps out of its timeline."""

import math
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors.ops.trace.files import Span
from actors.ops.trace.window import index_of, steps_of
from actors.ops.trace.words import words

Interval = tuple[float, float]
NAME = re.compile(rb"actors[\0 ]run[\0 ].*--name[\0 ]([\w-]+)", re.DOTALL)
"""Name of an actor in the command line of its process."""
TICKS = os.sysconf("SC_CLK_TCK")
COMPUTING = (("trainer-0", "main"), ("inference-0", "engine"))
"""Actor and thread of the two that compute with the model."""


class CpuClock:
    """CPU time of the machine and of each actor while a command runs.

    Args:
        seconds: time between two samples of the machine.
        every: samples of the machine for each sample of the actors, which costs more.
    """

    def __init__(self, seconds: float = 0.2, every: int = 10) -> None:
        self._seconds, self._every, self._ends = seconds, every, threading.Event()
        self._machine: list[tuple[float, float]] = []
        self._actors: list[tuple[float, dict[tuple[str, int], float]]] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "CpuClock":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(10.0)

    def share(self, start: float, end: float) -> float:
        """Return the CPU time between two times, as a share of all cores; NaN between fewer than two samples."""
        inside = [(at, used) for at, used in self._machine if start <= at <= end]
        if len(inside) < 2:
            return math.nan
        (first, before), (last, after) = inside[0], inside[-1]
        return (after - before) / (last - first) / (os.cpu_count() or 1)

    def by_actor(self, start: float, end: float) -> dict[str, float]:
        """Return the CPU seconds of each actor in a second between two times; empty if there is no actor."""
        inside = [(at, used) for at, used in self._actors if start <= at <= end]
        if len(inside) < 2:
            return {}
        found: dict[str, float] = {}
        for (_, before), (_, after) in pairwise(inside):
            for (name, pid), used in after.items():
                found[name] = found.get(name, 0.0) + used - before.get((name, pid), 0.0)
        return {name: used / (inside[-1][0] - inside[0][0]) for name, used in sorted(found.items())}

    def _sample(self) -> None:
        count = 0
        while not self._ends.wait(self._seconds):
            fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
            # user, nice, system, -, -, irq, softirq
            self._machine.append((time.time(), sum(int(fields[i]) for i in (0, 1, 2, 5, 6)) / TICKS))
            if count % self._every == 0:
                self._actors.append((time.time(), dict(_cpu_of_actors())))
            count += 1


def _cpu_of_actors() -> Iterable[tuple[tuple[str, int], float]]:
    """Yield name and pid, and CPU seconds, of each process that is an actor."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if found := NAME.search((folder / "cmdline").read_bytes()):
                # after the name of the program, which may have spaces and brackets
                fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                yield (found[1].decode(), int(folder.name)), (int(fields[11]) + int(fields[12])) / TICKS
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue


def trace_of(output: Path, first: int, last: int) -> dict[str, Any]:
    """Return what the timeline of a run tells about some steps: the words of `actors trace`, and idle gaps.

    `both`, `one` and `neither` are the shares of time in which trainer and engine compute.
    """
    recorded, window = steps_of(index_of(output), first, last)
    whole = (window.start, window.end)
    trainer, engine = (_working(recorded.spans, *place, whole) for place in COMPUTING)
    both = _overlap(trainer, engine)
    any_of_them = _union([*trainer, *engine])
    gaps = _without([whole], any_of_them)
    seconds = window.end - window.start
    return {
        "steps": [first, last],
        "step_ms": round(1e3 * seconds / len(window.steps), 1),
        "both": round(_length(both) / seconds, 3),
        "one": round((_length(any_of_them) - _length(both)) / seconds, 3),
        "neither": round(_length(gaps) / seconds, 3),
        "longest_gap_ms": round(1e3 * max((end - start for start, end in gaps), default=0.0), 1),
        "words": words(recorded, window).splitlines(),
    }


def _working(spans: Iterable[Span], actor: str, track: str, whole: Interval) -> list[Interval]:
    """Return the times in which a thread works."""
    its = [span for span in spans if (span.actor, span.track) == (actor, track)]
    works, waits = (_union((s.start, s.end) for s in its if s.waits is is_wait) for is_wait in (False, True))
    return _overlap(_without(works, waits), [whole])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times in at least one interval, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times in both."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return [(start, end) for start, end in pairs if start < end]


def _without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times in one and not in the other; each is in order and does not overlap itself."""
    found = []
    for start, end in one:
        for since, until in other:
            if until <= start or since >= end:
                continue
            if since > start:
                found.append((start, since))
            start = until
        if start < end:
            found.append((start, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
