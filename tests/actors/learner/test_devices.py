"""Work on a device: its own clock, and equal bits where they are asked for."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from actors.learner import devices
from actors.learner.devices import Stopwatch, gpu_name
from actors.models import determinism
from actors.models.determinism import is_inexact, make_deterministic

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Event:
    """Double of a CUDA event: the GPU reaches the n-th one after n² milliseconds, whatever the program's clock says."""

    recorded = 0
    waited_for: ClassVar[list[float]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        """Take a place in the work."""
        Event.recorded += 1
        self.at = float(Event.recorded**2)

    def synchronize(self) -> None:
        """Wait until the GPU is there."""
        Event.waited_for.append(self.at)

    def elapsed_time(self, later: "Event") -> float:
        """Return milliseconds."""
        return later.at - self.at


@pytest.fixture
def torch_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts torch's choice of algorithms back."""
    monkeypatch.setenv(determinism.WORKSPACE, "")
    monkeypatch.delenv(determinism.WORKSPACE)
    yield
    torch.use_deterministic_algorithms(False)


def test_laps_on_a_gpu_are_those_of_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is far ahead of the GPU when it asks, and waits for the last mark."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(Event, "waited_for", [])
    watch = Stopwatch(GPU)
    for _ in range(4):
        watch.mark()
    assert watch.laps() == pytest.approx([0.003, 0.005, 0.007])
    assert Event.waited_for == [16.0]


def test_laps_on_a_cpu_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lap of 0.25 s on the program's clock, and one of nothing."""
    clock = iter([1.0, 1.25, 1.25])
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    watch = Stopwatch(CPU)
    for _ in range(3):
        watch.mark()
    assert watch.laps() == [0.25, 0.0]


def test_parts_of_a_step_are_spans_on_the_clock_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU begins with the first mark, at 5.0 s of the program's clock, and reaches the n-th event after n² ms."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(Event, "waited_for", [])
    told: list[tuple[str, float, float, dict[str, int]]] = []
    monkeypatch.setattr(devices, "record", lambda name, start, end, **args: told.append((name, start, end, args)))
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: 5.0))
    for is_recording in (False, True):
        monkeypatch.setattr(devices, "is_recording", lambda on=is_recording: on)
        watch = Stopwatch(GPU)
        Event.recorded = 0
        watch.mark()
        with watch.part("forward and backward", micro_batch=3):
            pass
        watch.mark()
        assert Event.waited_for == []
        watch.tell()
    assert told == [("forward and backward", pytest.approx(5.003), pytest.approx(5.008), {"micro_batch": 3})]
    clock = iter([7.0, 7.5])
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    watch = Stopwatch(CPU)
    with watch.part("optimizer"):
        pass
    watch.tell()
    watch.tell()
    assert told[1:] == [("optimizer", 7.0, 7.5, {})]


def test_a_gpu_computes_the_same_bits_when_it_is_asked_to(torch_settings: None) -> None:
    """Without the key its results are compared within a tolerance; on a CPU they have the same bits anyway."""
    assert (is_inexact(GPU), is_inexact(CPU)) == (True, False)
    make_deterministic(CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    make_deterministic(GPU)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[determinism.WORKSPACE] == ":4096:8"
    assert not is_inexact(GPU)


def test_a_gpu_has_a_name_where_nccl_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own number, since each process calls its own GPU cuda:0."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert (gpu_name(GPU), gpu_name(CPU)) == ("GPU-1", "")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert gpu_name(GPU) == ""
