"""GPUs are counted by NVML, without torch; a choice that was made before bounds them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.process import devices
from actors.process.devices import Gpu, visible_gpus


def driver(number: int | None) -> Any:
    """Return a double of NVIDIA's library: with `number` GPUs, or without a driver."""
    error = type("NVMLError", (Exception,), {})

    def fail(*_: object) -> None:
        raise error

    def memory(handle: int) -> Any:
        return (
            SimpleNamespace(total=139 << 30, used=1 << 30) if handle != 2 else fail()
        )  # an integrated GPU does not tell

    return SimpleNamespace(
        NVMLError=error,
        nvmlInit=fail if number is None else lambda: None,
        nvmlShutdown=fail,  # an end that fails costs nothing
        nvmlDeviceGetCount=lambda: number,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetUUID=lambda handle: f"GPU-8{handle}f5",
        nvmlDeviceGetMemoryInfo=memory,
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`machine(number, "nvidia0")`: a machine with a driver for so many GPUs, and with these device files."""

    def make(number: int | None, *files: str) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", driver(number))
        for file in files:
            (tmp_path / file).touch()
        monkeypatch.setattr(devices, "DEVICES", tmp_path)

    return make


def test_gpus_are_counted_in_the_order_of_the_bus(machine: Any) -> None:
    """One that does not tell its memory counts as well."""
    machine(3, "nvidia0", "nvidia1", "nvidia2")
    known = ("NVIDIA H200", 139 << 30, 1 << 30)
    assert visible_gpus({}) == [Gpu("0", *known, "GPU-80f5"), Gpu("1", *known, "GPU-81f5"), Gpu("2")]


def test_a_choice_that_was_made_before_bounds_the_plan(machine: Any) -> None:
    """A batch system's CUDA_VISIBLE_DEVICES; CUDA stops at the first entry that is no device."""
    machine(4)
    assert [gpu.entry for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-8f"}) or ()] == ["3", "GPU-8f"]
    assert [gpu.entry for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": "2,-1,3"}) or ()] == ["2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_a_gpu_chosen_by_uuid_is_known_by_name_and_memory(machine: Any) -> None:
    """The beginning is enough, as for CUDA; what is no whole GPU keeps its entry and tells nothing."""
    machine(2)
    chosen = visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-81,MIG-GPU-80f5/1/0"})
    assert chosen == [Gpu("GPU-81", "NVIDIA H200", 139 << 30, 1 << 30, "GPU-81f5"), Gpu("MIG-GPU-80f5/1/0")]


def test_without_a_driver_there_are_no_gpus_unless_device_files_say_otherwise(machine: Any) -> None:
    """AMD's GPUs are there, and NVML knows nothing of them: nothing is planned, and processes see all."""
    machine(None)
    assert visible_gpus({}) == []
    machine(None, "kfd")
    assert visible_gpus({}) is None


@pytest.mark.slow
def test_the_plan_is_made_without_torch() -> None:
    """Importing torch takes seconds, and its first question about GPUs makes a context on one."""
    program = (
        "import sys; from actors.ops.device_plan import plan_here; from actors.process.devices import visible_gpus;"
        "visible_gpus(); print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
