"""Choice between speed and equal bits on a GPU, for trainer and engine."""

import os

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable with the sizes of cuBLAS's scratch memory; products have equal bits only with fixed sizes."""


def make_deterministic(device: torch.device) -> None:
    """Make torch take algorithms with equal bits on a GPU; an operation without such an algorithm raises.

    Nothing changes on a CPU.
    """
    if device.type == "cuda":
        os.environ.setdefault(WORKSPACE, ":4096:8")  # read when cuBLAS starts, at the first product
        torch.use_deterministic_algorithms(True)


def is_inexact(device: torch.device) -> bool:
    """Return whether equal work may have other bits: on a GPU, sums by atomic additions have no fixed order."""
    return device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
