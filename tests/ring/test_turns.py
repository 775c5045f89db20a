"""Trainer and engine in turns on one device (`up.colocate: turns`)."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.engines.fake import FakeEngine
from actors.engines.protocol import EngineStoppedError
from actors.learner.fake import FakeLearner
from actors.telemetry.metrics import TURN_HOLDERS
from schemas.config import RunConfig
from tests.ring.harness import SHORT_LEASE, check_promise, ring, ring_config, steps_recorded, wait_until

ALL_WITH_TWO_ENGINES = ("packer-0", "trainer-0", "inference-0", "inference-1", "reward-0", "rollout-0")


class Device:
    """Who uses the device, as the doubles of learner and engine tell."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engines: set[int] = set()
        self.ranks: set[int] = set()
        self.both: list[str] = []
        self.num_rests = 0

    def note(self, users: set[int], user: object, *, uses: bool, what: str) -> None:
        """Note a user; both kinds at once are one too many."""
        with self.lock:
            (users.add if uses else users.discard)(id(user))
            if self.engines and self.ranks:
                self.both.append(what)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The device of all learners and engines of this process."""
    device, step, sample = Device(), FakeLearner.step, FakeEngine._extend
    rest, wake, close = FakeEngine.rest, FakeEngine.wake, FakeEngine.close

    def stepped(learner: FakeLearner, *arguments: Any, **keywords: Any) -> Any:
        device.note(device.ranks, learner, uses=True, what="a step is trained")
        try:
            return step(learner, *arguments, **keywords)
        finally:
            device.note(device.ranks, learner, uses=False, what="")

    def rested(engine: FakeEngine, timeout: float) -> None:
        rest(engine, timeout)
        device.num_rests += 1
        device.note(device.engines, engine, uses=False, what="")

    def woken(engine: FakeEngine, timeout: float) -> None:
        device.note(device.engines, engine, uses=True, what="an engine wakes")
        wake(engine, timeout)

    def extended(engine: FakeEngine, *arguments: Any) -> None:
        sample(engine, *arguments)
        if device.ranks:
            device.both.append("an engine samples")

    def closed(engine: FakeEngine) -> None:
        device.note(device.engines, engine, uses=False, what="")
        close(engine)

    monkeypatch.setattr(FakeLearner, "step", stepped)
    for name, method in (("rest", rested), ("wake", woken), ("_extend", extended), ("close", closed)):
        monkeypatch.setattr(FakeEngine, name, method)
    yield device
    assert device.both == []
    assert device.engines | device.ranks == set(), "the dead hold the device"


def in_turns(folder: Path, **sections: Any) -> RunConfig:
    """Return a run whose steps take a while, so that turns matter."""
    return ring_config(folder, up={"colocate": "turns"}, **sections)


def test_a_run_in_turns_trains_what_it_trains_without(tmp_path: Path, device: Device) -> None:
    """Steps and samples never overlap, each step is trained once, and evaluations are complete."""
    config = in_turns(tmp_path, trainer={"max_steps": 8, "checkpoint": {"interval": 3}})
    with ring(config) as run:
        run.start().wait()
        holders = [run["packer-0"].value("grpo_packer_turn", holder=name) for name in TURN_HOLDERS]
    check_promise(config)
    assert device.num_rests >= 4
    assert sorted(holders) == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["rendezvous", "device"])
def test_a_broadcast_is_over_before_an_engine_rests(tmp_path: Path, device: Device, channel: str) -> None:
    """Weights by broadcast to two engines: no update is given up because a member has stopped for the trainer."""
    weights = {"channel": channel, "timeout": 20.0, "directory": str(tmp_path / "weights")}
    up = {"colocate": "turns", "inference": 2}
    config = ring_config(tmp_path, weights=weights, up=up, trainer={"max_steps": 10})
    with capture_logs() as lines, ring(config) as run:
        run.start(*ALL_WITH_TWO_ENGINES)
        run.wait()
    check_promise(config)
    assert [line for line in lines if "given up" in line["event"] or line["event"] == "weights not sent"] == []


def test_an_engine_that_keeps_its_memory_is_told_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor exits, so that the trainer gets its turn and a new process starts an engine."""

    def stuck(engine: FakeEngine, timeout: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(FakeEngine, "rest", stuck)
    with ring(in_turns(tmp_path, trainer={"max_steps": 3})) as run:
        run.start()
        wait_until(lambda: run["inference-0"].error, "the end of the engine's actor")
        assert isinstance(run["inference-0"].error, EngineStoppedError)
        assert "did not give its memory back to the trainer within" in str(run["inference-0"].error)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 2])
def test_levels_of_asynchrony_go_with_turns(tmp_path: Path, device: Device, level: int) -> None:
    """With level 2 the trainer trains several steps in a turn."""
    config = in_turns(tmp_path, packer={"max_async_level": level}, trainer={"max_steps": 10})
    with ring(config) as run:
        run.start().wait()
    check_promise(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer-0", "inference-0", "packer-0"])
def test_whoever_dies_in_a_turn_loses_it(tmp_path: Path, device: Device, name: str) -> None:
    """At three moments each: the run goes on, nothing is lost, and nobody is left with the device."""
    config = in_turns(tmp_path, trainer={"max_steps": 12, "checkpoint": {"interval": 3}}, bus=SHORT_LEASE)
    with ring(config) as run:
        run.start()
        for step in (2, 5, 8):
            wait_until(lambda step=step: steps_recorded(config) >= step, f"step {step}")
            run[name].crash()
            run.start(name)
        run.wait()
    check_promise(config)
