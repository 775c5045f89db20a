"""Work on a device: seconds that count the device's own time, and the name of a GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from actors.telemetry.spans import is_recording, record


class Stopwatch:
    """Marks in the work of a device, and the seconds between them.

    A GPU runs behind the program, so the program's clock would count the work of a part in a later one.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._on_gpu = device.type == "cuda"
        self._began = 0.0
        self._parts: list[tuple[str, Any, Any, dict[str, Any]]] = []
        """Name, start, end and arguments of each part: seconds of the CPU, or events of a GPU."""

    def mark(self) -> None:
        """Mark this place in the work."""
        if self._on_gpu:
            if not self._events:
                # the device has done all work before, as far as `laps` was called: both clocks start here
                self._began = time.monotonic()
            self._events.append(self._event())
        else:
            self._times.append(time.monotonic())

    @contextmanager
    def part(self, name: str, **args: Any) -> Iterator[None]:
        """Measure a part of the work for the timeline; `tell` records it. Nothing waits for the device here."""
        if not is_recording():
            yield
            return
        start = self._event() if self._on_gpu else time.monotonic()
        yield
        self._parts.append((name, start, self._event() if self._on_gpu else time.monotonic(), args))

    def tell(self) -> None:
        """Record all parts as spans. After `laps`, when the device has done them."""
        parts, self._parts = self._parts, []
        for name, start, end, args in parts:
            if self._on_gpu:
                first = self._events[0]
                start, end = (self._began + first.elapsed_time(event) / 1000 for event in (start, end))
            record(name, start, end, **args)

    @staticmethod
    def _event() -> torch.cuda.Event:
        """Return an event at this place of the GPU's work."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def laps(self) -> list[float]:
        """Return the seconds between each two marks; waits for the device."""
        if self._on_gpu:
            self._events[-1].synchronize()
            return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(self._events)]
        return [later - earlier for earlier, later in pairwise(self._times)]


def gpu_name(device: torch.device) -> str:
    """Return the name of a GPU that no other GPU has; empty for a CPU, or if torch has no NCCL to reach the GPU."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)
