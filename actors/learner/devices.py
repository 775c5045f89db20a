"""Work on a device: seconds that count the device's own time, and the name of a GPU."""

import time
from itertools import pairwise

import torch


class Stopwatch:
    """Marks in the work of a device, and the seconds between them.

    A GPU runs behind the program, so the program's clock would count the work of a part in a later one.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._on_gpu = device.type == "cuda"

    def mark(self) -> None:
        """Mark this place in the work."""
        if self._on_gpu:
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())

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
