"""Runs of the whole ring whose environments, workers, engines or actors break: nothing lost, twice or paid with 0."""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from tests.marks import long_but
from tests.processes import children, has_ended
from tests.ring.harness import (
    PATIENCE_SECONDS,
    SHORT_LEASE,
    Processes,
    check_promise,
    processes,
    ring,
    ring_config,
    scraped,
    wait_until,
)
from tests.ring.test_environments import WORLDS
from tests.ring.worlds import PLACES

pytestmark = pytest.mark.slow
LIMITS = {"load": 20.0, "reset": 4.0, "step": 4.0, "score": 4.0, "silence": 6.0, "processes": 16}
"""Short enough to wait for, longer than a busy machine needs for a call."""
WAYS = ("SIGKILL", "SIGSTOP", "hang", "sys.exit", "_exit", "output", "fork bomb")


def config_of(folder: Path, world: str, *, environment: dict[str, Any], **sections: Any) -> RunConfig:
    """A run with an environment of worlds.py, in groups of two."""
    one = {"type": "python", "name": "letters", "path": f"{WORLDS}:{world}", "limits": LIMITS} | environment
    given: dict[str, Any] = {"rollout": {"group_timeout": 120.0}, "packer": {"sequence_len": 512}} | sections
    return ring_config(folder, environments=[one], reward={"functions": []}, **given)


def check_rewards(config: RunConfig) -> None:
    """Each trained trajectory has all of its turns, and its whole reward; nothing was dropped."""
    assert check_promise(config).dropped == {}
    records = [one for one in read_lines(config.output / "samples.jsonl") if one["purpose"] == "train"]
    assert records
    for record in records:
        assert all(reward >= 3.0 for reward in record["reward"]), record["reward"]
        assert set(record["turns"]) == {3}


@pytest.mark.parametrize("way", long_but(["SIGKILL", "output", "fork bomb"], WAYS))
def test_whatever_an_environment_does_to_its_worker_no_example_is_lost(tmp_path: Path, way: str) -> None:
    """Once while it is loaded, reset, stepped and scored: each costs attempts and time, and nothing else."""
    options = {"folder": str(tmp_path), "way": way}
    if way == "sys.exit":
        # a file that exits when it is loaded is refused before anything is written
        (tmp_path / f"load.{way}").touch()
    config = config_of(tmp_path, "Ruined", environment={"options": options, "workers": 2})
    with ring(config) as run:
        run.start().wait()
    assert {path.name.partition(".")[0] for path in tmp_path.glob(f"*.{way}")} == set(PLACES)
    check_rewards(config)


def test_an_engine_that_dies_between_turns_costs_no_turn(tmp_path: Path) -> None:
    """The finished turns are kept: the next one is asked of the other engine, and no step is called twice."""
    gate, counted = tmp_path / "gate", tmp_path / "counted"
    gate.touch()
    counted.mkdir()
    options = {"gate": str(gate), "folder": str(counted)}
    # one group at a time: all its trajectories stand at the gate behind their first turn
    config = config_of(
        tmp_path,
        "CountedAtGate",
        environment={"options": options, "limits": LIMITS | {"step": 120.0, "reset": 120.0}},
        bus=SHORT_LEASE,
        up={"inference": 2},
        rollout={"max_concurrent_groups": 1, "group_timeout": 300.0},
        eval={"num_prompts": 0},
    )
    with processes(config, tmp_path) as run:
        names = ("packer-0", "trainer-0", "reward-0", "rollout-0", "inference-0", "inference-1")
        for name in names:
            run.run(name)
        wait_until(lambda: len(list(counted.iterdir())) == 2, "both trajectories have had their first turn")
        asked = {name: scraped(config, name, "grpo_inference_generated_tokens_total") for name in names[-2:]}
        dead = max(asked, key=lambda name: asked[name])
        run.processes[dead].kill()
        run.processes[dead].wait(PATIENCE_SECONDS)
        gate.unlink()
        end(run, tuple(name for name in names if name != dead))
    check_rewards(config)
    # a trajectory that was played again would have begun a second file of the same seed
    assert all(path.read_text() == "3" for path in counted.iterdir())


def end(run: Processes, names: tuple[str, ...]) -> None:
    """Wait until all have ended well."""
    for name in names:
        assert run.processes[name].wait(PATIENCE_SECONDS) == 0, run.text(name)


def test_a_packer_that_is_killed_costs_no_trajectory(tmp_path: Path) -> None:
    """Groups that are played meanwhile are trained by the run that goes on."""
    gate = tmp_path / "gate"
    gate.touch()
    environment = {"options": {"gate": str(gate)}, "limits": LIMITS | {"step": 120.0}}
    config = config_of(tmp_path, "Gated", environment=environment, bus=SHORT_LEASE, eval={"num_prompts": 0})
    with processes(config, tmp_path) as run:
        names = ("packer-0", "trainer-0", "reward-0", "rollout-0", "inference-0")
        for name in names:
            run.run(name)
        wait_until(gate.with_name("gate.entered").exists, "a step is under way")
        run.processes["packer-0"].kill()
        run.processes["packer-0"].wait(PATIENCE_SECONDS)
        run.run("packer-0")
        gate.unlink()
        end(run, names)
    check_rewards(config)


def workers_of(parent: int) -> list[int]:
    """Worker processes of environments that a process has started."""
    return [child.pid for child in children(parent)]


@contextlib.contextmanager
def killed_at_the_end(pids: list[int]) -> Iterator[None]:
    """Leave none of these behind, also if the test fails."""
    try:
        yield
    finally:
        for pid in itertools.filterfalse(has_ended, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_workers_end_with_a_rollout_actor_that_is_killed(tmp_path: Path) -> None:
    """Also while a step of theirs hangs; the groups are played by the next one."""
    gate = tmp_path / "gate"
    gate.touch()
    environment = {"options": {"gate": str(gate)}, "limits": LIMITS | {"step": 120.0}, "workers": 2}
    config = config_of(tmp_path, "Gated", environment=environment, bus=SHORT_LEASE, eval={"num_prompts": 0})
    with processes(config, tmp_path) as run:
        names = ("packer-0", "trainer-0", "reward-0", "rollout-0", "inference-0")
        for name in names:
            run.run(name)
        wait_until(gate.with_name("gate.entered").exists, "a step is under way")
        pids = workers_of(run.processes["rollout-0"].pid)
        assert len(pids) == 2
        with killed_at_the_end(pids):
            run.processes["rollout-0"].kill()
            run.processes["rollout-0"].wait(PATIENCE_SECONDS)
            wait_until(lambda: all(map(has_ended, pids)), f"the end of {pids}", 60.0)
        gate.unlink()
        run.run("rollout-0")
        end(run, names)
    check_rewards(config)
