"""Children that are started and given back; real ones are tested in tests/ring/test_scaling.py."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from actors.ops.device_plan import actors_of, largest_of, plan_devices
from actors.ops.up import scaler as scaler_module
from actors.ops.up.child import Child, plan
from actors.ops.up.scaler import Scaler
from actors.process.devices import Gpu
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

SCALE = {"reward": {"min": 2, "max": 4}}


class Lives:
    """A process that runs until a test ends it, and remembers its signals."""

    pid = 1

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None before the end."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Remember a signal."""
        self.signals.append(number)


@pytest.fixture
def children(tmp_path: Path) -> list[Child]:
    """The reward actors of a run that may have four."""
    config = ring_config(tmp_path, scale=SCALE)
    return [child for child in plan(config, None, largest_of(config)) if child.kind == "reward"]


def follow(scaler: Scaler, wanted: int) -> list[str]:
    """What is said about a number that the packer wants."""
    return list(scaler.follow({"wanted": {"reward": wanted, "rollout": 5}, "because": "it is slow"}))


def living(children: list[Child]) -> list[Lives]:
    """Start all children that are not parked."""
    lives = []
    for child in children:
        if not child.parked and child.process is None:
            child.process = Lives()  # type: ignore[assignment]
        lives.append(child.process)
    return lives  # type: ignore[return-value]


def test_a_run_starts_with_its_minimum_and_grows_to_what_is_wanted(tmp_path: Path, children: list[Child]) -> None:
    """In the order of their numbers, at once; roles that are not scaled here stay as they are."""
    scaler = Scaler(ring_config(tmp_path, scale=SCALE), children)
    assert [child.parked for child in children] == [False, False, True, True]
    assert not list(scaler.follow({}))
    assert not follow(scaler, 2)
    assert follow(scaler, 3) == ["reward: 2 → 3, since it is slow"]
    assert [child.parked for child in children] == [False, False, False, True]
    assert children[2].start_at <= time.monotonic()


@pytest.mark.parametrize(("own", "parked"), [([0], [False]), ([1, 3], [False, True]), ([2, 3], [True, True])])
def test_a_node_has_the_children_of_its_numbers(
    tmp_path: Path, children: list[Child], own: list[int], parked: list[bool]
) -> None:
    """What the packer wants is a number of all nodes together; a child of a node drains by the node's signal."""
    here = [children[index] for index in own]
    scaler = Scaler(ring_config(tmp_path, scale=SCALE), here, signal.SIGUSR2)
    assert [child.parked for child in here] == parked
    assert follow(scaler, 4) == ["reward: 2 → 4, since it is slow"]
    assert not any(child.parked for child in here)
    lives = living(here)
    assert follow(scaler, 3) == ["reward: 4 → 3, since it is slow"]
    assert [child.parked for child in here] == [index == 3 for index in own]
    assert [life.signals for life in lives] == [[signal.SIGUSR2] if index == 3 else [] for index in own]


def test_the_last_children_drain_and_are_killed_if_they_do_not_end(
    tmp_path: Path, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM first; SIGKILL once, after the time of the drain."""
    scaler = Scaler(ring_config(tmp_path, scale=SCALE), children)
    follow(scaler, 4)
    lives = living(children)
    assert follow(scaler, 2) == ["reward: 4 → 2, since it is slow"]
    lives[3].returncode = 0
    now = time.monotonic()
    monkeypatch.setattr(scaler_module.time, "monotonic", lambda: now + 60.0)
    follow(scaler, 2)
    follow(scaler, 2)
    assert [one.signals for one in lives] == [[], [], [signal.SIGTERM, signal.SIGKILL], [signal.SIGTERM]]


def test_a_child_that_still_drains_is_wanted_again(tmp_path: Path, children: list[Child]) -> None:
    """It may end, is not killed, and is started again afterwards, like any child that has ended."""
    scaler = Scaler(ring_config(tmp_path, scale=SCALE), children)
    follow(scaler, 3)
    lives = living(children)
    follow(scaler, 2)
    follow(scaler, 3)
    assert not children[2].parked
    assert children[2].kill_at > 1e12
    assert lives[2].signals == [signal.SIGTERM]


def test_gpus_are_planned_for_the_largest_numbers(tmp_path: Path) -> None:
    """A machine that can't hold them is refused at the start, by the keys that need GPUs."""
    engine: dict[str, Any] = {"type": "embedded"}
    config = ring_config(
        tmp_path, model={"path": "m"}, inference={"engine": engine}, scale={"inference": {"min": 1, "max": 3}}
    )
    gpus = [Gpu(str(index)) for index in range(3)]
    plan_devices(config, gpus, actors_of(config))
    with pytest.raises(ConfigError, match="this machine has 3 GPUs, and the run needs 4"):
        plan_devices(config, gpus, largest_of(config))
