"""Runs with agents in which a process is killed or stopped in each state: nothing lost, twice, left or paid with 0.

Where the victim is an actor it is a real process, the other actors are threads of the test.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from tests.marks import long_but
from tests.ring.harness import (
    ALL,
    SHORT_LEASE,
    check_promise,
    processes,
    ring,
    ring_config,
    wait_until,
)

pytestmark = pytest.mark.slow

AGENTS = Path(__file__).with_name("agents.py")
PLACES = ("before", "in", "between", "after")
"""States of an agent, around its calls."""
LIMITS = {"load": 20.0, "silence": 6.0}
ACTORS = {"rollout": "rollout-0", "inference": "inference-0", "packer": "packer-0", "reward": "reward-0"}
MARK = "AGENT_CRASHES"
"""Variable of all processes of a test, by which those that are left over are found."""


def config_of(folder: Path, kind: str) -> RunConfig:
    """A run of three steps with agents in worker processes, or programs."""
    one: dict[str, Any] = {"type": "agent", "name": "helper", "workers": 2, "limits": LIMITS}
    if kind == "agent":
        command = [sys.executable, str(AGENTS), str(folder)]
        one |= {"command": command, "options": {"reward": "file", "seconds": 6}}
    else:
        one |= {"path": f"{AGENTS}:Staged", "options": {"folder": str(folder)}}
    return ring_config(
        folder,
        environments=[one],
        rollout={"group_size": 2, "group_timeout": 120.0, "max_concurrent_groups": 3},
        reward={"functions": []},
        packer={"sequence_len": 512},
        trainer={"max_steps": 3, "checkpoint": {"interval": 1}},
        inference={"engine": {"type": "fake", "token_seconds": 0.05}},
        eval={"num_prompts": 0},
        bus=SHORT_LEASE,
    )


def left_over(folder: Path) -> dict[int, str]:
    """Processes of a test that still run, by pid with their command."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
            dead = (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if int(process.name) != os.getpid() and not dead and str(folder).encode() in command + environment:
                found[int(process.name)] = command.decode().replace("\0", " ")
    return found


def check(config: RunConfig, folder: Path) -> None:
    """Each group was trained once, with two whole trajectories and their rewards, and no process is left."""
    assert check_promise(config).dropped == {}
    records = [one for one in read_lines(config.output / "samples.jsonl") if one["purpose"] == "train"]
    assert records
    for record in records:
        assert (record["reward"], record["turns"]) == ([1.0, 1.0], [2, 2])
    deadline = time.monotonic() + 20.0
    while (left := left_over(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == {}


def run_with(config: RunConfig, folder: Path, victim: str, way: str) -> None:
    """Run to the end; the victim has `way` done to it at the place that is armed."""
    is_actor = victim in ACTORS
    # the parent of workers and agents is a process, so that nothing of them is the test's own
    name = ACTORS.get(victim, "rollout-0")
    with ring(config) as run, processes(config, folder) as started:
        others = [f"{kind}-0" for kind in ALL if f"{kind}-0" != name]
        if name == "packer-0":
            started.run(name)
        run.start(*others)
        if name != "packer-0":
            started.run(name)
        wait_until((folder / "hit").exists, "the place is reached")
        harmed = started.processes[name].pid if is_actor else int((folder / "hit").read_text())
        if way:
            os.kill(harmed, signal.Signals[way])
        if is_actor:
            started.processes[name].wait(60)
            started.run(name)
        (folder / "go").touch()
        run.wait()
        assert started.processes[name].wait(60) == 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose name is in each process of the test."""
    monkeypatch.setenv(MARK, str(tmp_path))
    return tmp_path


SHORT = [
    ("agent", "in", "SIGKILL"),
    ("worker", "between", "SIGKILL"),
    ("rollout", "in", "SIGKILL"),
    ("inference", "in", "SIGKILL"),
    ("packer", "between", "SIGKILL"),
]
KILLED = [(victim, place, "SIGKILL") for victim in ("agent", "worker", *list(ACTORS)[:3]) for place in PLACES]
STOPPED = [(victim, place, "SIGSTOP") for victim in ("agent", "worker") for place in PLACES]


@pytest.mark.parametrize(
    ("victim", "place", "way"), long_but(SHORT, [*KILLED, ("agent", "rewarded", "SIGKILL"), *STOPPED])
)
def test_whoever_dies_around_a_call_no_answer_is_lost(folder: Path, victim: str, place: str, way: str) -> None:
    """Its trajectories are played again, and those beside it go on."""
    config = config_of(folder, victim)
    (folder / "armed").write_text(place)
    run_with(config, folder, victim, way)
    check(config, folder)


DELIVERY = [
    ("rollout", "rollout.sampled"),
    ("rollout", "rollout.sent"),
    ("reward", "reward.taken"),
    ("reward", "reward.scored"),
    ("reward", "reward.sent"),
    ("packer", "packer.taken"),
    ("packer", "packer.committed"),
]


@pytest.mark.parametrize(("victim", "point"), long_but(DELIVERY[:1], DELIVERY))
def test_whoever_dies_while_the_reward_is_delivered_it_is_trained_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, victim: str, point: str
) -> None:
    """The actor kills itself between the agent's end and the batch."""
    faults, name = folder / "faults", ACTORS[victim]
    faults.mkdir()
    monkeypatch.setenv("GRPO_FAULTS", str(faults))
    (faults / f"{name}@{point}").write_text("SIGKILL")
    # the place is reached once the actor is dead
    (folder / "hit").symlink_to(faults / f"{name}@{point}.hit")
    config = config_of(folder, victim)
    run_with(config, folder, victim, "")
    check(config, folder)
