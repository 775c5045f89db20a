"""GPUs of this machine as the driver tells (NVML), without torch: a plan of devices must not start a CUDA context."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

DEVICES = Path("/dev")
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "nvmap", "nvhost-gpu", "nvgpu")
"""Patterns of device files: NVIDIA's driver, WSL, ROCm; the last three are of Jetson, which has no `nvidia0`."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process may use, by index or UUID."""
SHARED = "GRPO_ACTORS_SHARED_GPU"
"""Environment variable of processes whose GPU has another process of the run too."""
ORDER = "CUDA_DEVICE_ORDER"
"""Environment variable with the order of indices. CUDA's default is by speed, NVML's order is by PCI bus."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may hand on.

    Args:
        entry: its entry in CUDA_VISIBLE_DEVICES: an index in the order of the PCI bus, or a UUID.
        name: product name; empty if the driver does not tell.
        memory: bytes in all; 0 if the driver does not tell.
        memory_taken: bytes in use by all processes now.
        uuid: name of this very GPU, `GPU-…`; empty if the driver does not tell.
    """

    entry: str
    name: str = ""
    memory: int = 0
    memory_taken: int = 0
    uuid: str = ""


def has_gpu() -> bool:
    """Return whether this machine has the device files of a GPU. No driver is loaded."""
    return any(next(DEVICES.glob(pattern), None) for pattern in GPU_DEVICES)


def shares_gpu() -> bool:
    """Return whether the plan of devices gives a GPU of this process to another process too."""
    return os.environ.get(SHARED) == "1"


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu] | None:
    """Return the GPUs that processes started here may use; None if the machine has GPUs that NVML can't count.

    A CUDA_VISIBLE_DEVICES that is set already, by a batch system for example, bounds the choice; its entries are
    handed on as they are.
    """
    if VISIBLE not in environment:
        gpus = _all_gpus()
        return gpus if gpus or not has_gpu() else None
    entries = (entry.strip() for entry in environment[VISIBLE].split(","))
    # CUDA stops reading at the first entry that is no device, as -1
    known = list(takewhile(lambda entry: entry and not entry.startswith("-"), entries))
    gpus = _all_gpus()
    return [_with_entry(entry, gpus) for entry in known]


def _with_entry(entry: str, gpus: Sequence[Gpu]) -> Gpu:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES means: an index, or the beginning of a UUID."""
    for gpu in gpus:
        if entry == gpu.entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry)):
            return replace(gpu, entry=entry)
    return Gpu(entry)  # a part of a GPU (MIG), which is not listed


def _all_gpus() -> list[Gpu]:
    """Return all GPUs of the machine, by NVML; none without NVIDIA's driver."""
    import pynvml  # imported here, since most processes never ask

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no GPU
        return []
    gpus = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
                gpus.append(Gpu(str(index), name, memory.total, memory.used, uuid))
            except pynvml.NVMLError:  # a GPU without memory of its own tells none
                gpus.append(Gpu(str(index)))
        return gpus
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
