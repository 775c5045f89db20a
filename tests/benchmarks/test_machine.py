"""The description of the machine that results carry."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from actors.process import devices
from actors.process.devices import Gpu
from benchmarks import machine


@pytest.mark.parametrize(
    ("product", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 990e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("", None),
    ],
)
def test_the_peak_is_of_the_exact_product(product: str, peak: float | None) -> None:
    """A slice of a GPU, and a product that the table lacks, have none."""
    assert machine.peak_flops(product) == peak


def test_versions_and_commit_are_named() -> None:
    """A package that is not installed has no version, and does not keep others from being named."""
    found = machine.machine()
    assert found["torch"]
    assert len(found["commit"].removesuffix("-dirty")) == 40
    assert machine.package_version("no-such-package") is None


def test_a_copy_without_git_takes_the_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or names none."""

    def fail(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setenv(machine.COMMIT, "0123abc")
    assert machine.commit() == "0123abc"
    monkeypatch.delenv(machine.COMMIT)
    assert machine.commit() is None


def test_gpus_are_named_with_driver_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA, cuDNN and NCCL are those that torch was built with; without a GPU nothing is asked of torch."""
    import pynvml
    import torch

    monkeypatch.setattr(devices, "visible_gpus", list)
    assert machine.accelerator() == {"gpus": []}
    monkeypatch.setattr(devices, "visible_gpus", lambda: [Gpu("0", "NVIDIA H200", 141 << 30)])
    for name, value in {"nvmlInit": None, "nvmlShutdown": None, "nvmlSystemGetDriverVersion": "580.1"}.items():
        monkeypatch.setattr(pynvml, name, lambda value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)))
    assert machine.accelerator() == {
        "gpus": [{"name": "NVIDIA H200", "memory_bytes": 141 << 30}],
        "driver": "580.1",
        "cuda": "13.0",
        "cudnn": 91900,
        "nccl": "2.28.9",
    }
