"""Runs of the whole ring with workers of an environment host: nothing lost or twice, whichever side is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bus import keys
from schemas.config import RunConfig
from tests.ports import free_port
from tests.processes import has_ended
from tests.ring.harness import PATIENCE_SECONDS, SHORT_LEASE, Processes, processes, wait_until
from tests.ring.test_broken_environments import LIMITS, check_rewards, config_of, end, workers_of

pytestmark = pytest.mark.slow
NAMES = ("packer-0", "trainer-0", "reward-0", "rollout-0", "inference-0")


def hosted(folder: Path, world: str, options: dict[str, Any], **environment: Any) -> tuple[RunConfig, str]:
    """A run with keys whose workers are on a host, and the address of the host."""
    keys.make(folder / "keys")
    address = f"tcp://127.0.0.1:{free_port()}"
    environment = {"options": options, "hosts": [address], "limits": LIMITS, **environment}
    bus = {"keys": str(folder / "keys"), **SHORT_LEASE}
    return config_of(folder, world, environment=environment, bus=bus, eval={"num_prompts": 0}), address


def start(run: Processes, address: str) -> None:
    """Start the host, then all actors: the packer asks the host for examples."""
    run.run("environment-0", "--listen", address)
    for name in NAMES:
        run.run(name)


def check_end(run: Processes, config: RunConfig) -> None:
    """The run ends well, its rewards are whole, and the host ends at a signal without a worker left."""
    end(run, NAMES)
    check_rewards(config)
    host = run.processes["environment-0"]
    left = workers_of(host.pid)
    host.send_signal(signal.SIGTERM)
    assert host.wait(PATIENCE_SECONDS) == 0, run.text("environment-0")
    wait_until(lambda: all(map(has_ended, left)), f"the end of {left}")


def at_the_gate(run: Processes, gate: Path) -> list[int]:
    """Wait until a step is under way; return the host's worker processes."""
    wait_until(gate.with_name("gate.entered").exists, "a step is under way")
    found = workers_of(run.processes["environment-0"].pid)
    assert found
    return found


def test_a_remote_worker_that_is_killed_costs_no_example(tmp_path: Path) -> None:
    """With all of its processes, in the middle of a step."""
    gate = tmp_path / "gate"
    gate.touch()
    config, address = hosted(tmp_path, "Gated", {"gate": str(gate)}, limits=LIMITS | {"step": 120.0}, workers=2)
    with processes(config, tmp_path) as run:
        start(run, address)
        dead = at_the_gate(run, gate)
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(map(has_ended, dead)), f"the end of {dead}")
        gate.unlink()
        check_end(run, config)


def test_a_rollout_actor_that_is_killed_leaves_no_remote_worker_once_its_successor_is_there(tmp_path: Path) -> None:
    """The groups are played by the next one, on workers of its own."""
    gate = tmp_path / "gate"
    gate.touch()
    config, address = hosted(tmp_path, "Gated", {"gate": str(gate)}, limits=LIMITS | {"step": 120.0}, workers=2)
    with processes(config, tmp_path) as run:
        start(run, address)
        before = at_the_gate(run, gate)
        run.processes["rollout-0"].kill()
        run.processes["rollout-0"].wait(PATIENCE_SECONDS)
        run.run("rollout-0")
        wait_until(lambda: all(map(has_ended, before)), f"the end of {before}", 60.0)
        gate.unlink()
        check_end(run, config)


def test_a_host_that_is_killed_and_started_again_costs_no_example(tmp_path: Path) -> None:
    """Its workers die with it, and the rollout actor finds its successor by itself."""
    gate = tmp_path / "gate"
    gate.touch()
    config, address = hosted(tmp_path, "Gated", {"gate": str(gate)}, limits=LIMITS | {"step": 120.0}, workers=2)
    with processes(config, tmp_path) as run:
        start(run, address)
        before = at_the_gate(run, gate)
        run.processes["environment-0"].kill()
        run.processes["environment-0"].wait(PATIENCE_SECONDS)
        wait_until(lambda: all(map(has_ended, before)), f"the end of {before}", 60.0)
        gate.unlink()
        run.run("environment-0", "--listen", address)
        check_end(run, config)
