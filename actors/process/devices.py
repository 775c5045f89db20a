"""Accelerators of this machine, found by device files; no driver is loaded."""

from pathlib import Path

DEVICES = Path("/dev")
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "nvmap", "nvhost-gpu", "nvgpu")
"""Patterns of device files: NVIDIA's driver, WSL, ROCm; the last three are of Jetson, which has no `nvidia0`."""


def has_gpu() -> bool:
    """Return whether this machine has the device files of a GPU."""
    return any(next(DEVICES.glob(pattern), None) for pattern in GPU_DEVICES)
