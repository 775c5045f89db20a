"""Ports that keys fix: those in use are named with their key, and of runs that start at once each port has one."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.ops.ports import busy_ports, claimed_ports, fixed_ports
from schemas.config import dump_config
from schemas.errors import ConfigError
from tests.ports import free_port
from tests.ring.harness import ring_config

KEYS = ("bus.control", "inference.port", "telemetry.metrics_port", "rollout.sessions.port")


def sections_of(key: str, port: int) -> dict[str, Any]:
    """Sections of a run with this key at a port; an agent for the key of sessions."""
    section, _, name = key.partition(".")
    if key == "bus.control":
        return {"bus": {"control": f"tcp://127.0.0.1:{port}"}}
    if key != "rollout.sessions.port":
        return {section: {name: port}}
    agent = {"type": "agent", "path": "agent.py:play", "max_turns": 2}
    return {"rollout": {"sessions": {"port": port}}, "environments": [agent]}


def problems_of(config: Any) -> list[str]:
    """Texts with which the claim of a run's ports is refused; none if it is not."""
    try:
        with claimed_ports(config):
            return []
    except ConfigError as error:
        return list(error.problems)


def test_a_run_without_fixed_ports_claims_none(tmp_path: Path) -> None:
    """The default: any number of runs at once."""
    config = ring_config(tmp_path)
    assert fixed_ports(config) == []
    with claimed_ports(config), claimed_ports(config):
        pass


@pytest.mark.parametrize("number", [1, 3, 16])
def test_each_process_has_a_port_from_the_first_one_on(tmp_path: Path, number: int) -> None:
    """Engines are counted by themselves, ports of /metrics over all processes."""
    sections = {"inference": {"port": 7000}, "telemetry": {"metrics_port": 9000}, "up": {"inference": number}}
    found = fixed_ports(ring_config(tmp_path, **sections))
    engines = [port.number for port in found if port.key == "inference.port"]
    metrics = [port.number for port in found if port.key == "telemetry.metrics_port"]
    assert engines == list(range(7000, 7000 + number))
    assert metrics == list(range(9000, 9000 + number + 4))  # packer, trainer, reward and rollout


def test_ports_that_are_in_use_are_named_with_the_key_they_follow_from(tmp_path: Path) -> None:
    """Five actors take five ports from telemetry.metrics_port on; the fourth is bound by somebody."""
    with socket.socket() as taken:
        port = free_port()  # in a block of ours: one that the system hands out could be somebody's again at once
        taken.bind(("127.0.0.1", port))
        taken.listen()
        config = ring_config(tmp_path, telemetry={"metrics_port": port - 3})
        found = [words for words in busy_ports(config) if f":{port} " in words]
        (words,) = found
        assert words.startswith(f"telemetry.metrics_port: 127.0.0.1:{port} is in use (`actors up` gives its actors ")
        assert f"the ports from {port - 3} on" in words
    assert not [words for words in busy_ports(config) if f":{port} " in words]


@pytest.mark.parametrize("key", KEYS)
def test_of_two_runs_that_start_at_once_the_second_is_refused_by_the_key(tmp_path: Path, key: str) -> None:
    """Nothing is bound yet: the first run is still starting. Once it has ended, the port is free again."""
    port = free_port()
    first, second = (ring_config(tmp_path / name, **sections_of(key, port)) for name in "ab")
    with claimed_ports(first):
        (words,) = problems_of(second) if key != "telemetry.metrics_port" else problems_of(second)[:1]
        assert words == f"{key}: 127.0.0.1:{port} is in use; another run on this machine has the same value"
    assert problems_of(second) == []


@pytest.mark.parametrize("key", KEYS)
def test_a_port_that_a_stranger_has_bound_is_refused_by_the_key(tmp_path: Path, key: str) -> None:
    """Whoever it is."""
    port = free_port()
    config = ring_config(tmp_path, **sections_of(key, port))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        (words,) = problems_of(config)
        assert words == f"{key}: 127.0.0.1:{port} is in use; another process has bound it"
    assert problems_of(config) == []


def test_overlapping_ranges_are_refused_with_the_first_port(tmp_path: Path) -> None:
    """The fifth port of the one is the first of the other."""
    port = free_port()
    first, second = (ring_config(tmp_path / str(n), telemetry={"metrics_port": n}) for n in (port, port - 4))
    with claimed_ports(first):
        (words,) = problems_of(second)
    assert f":{port} is in use (`actors up` gives its actors the ports from {port - 4} on)" in words


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    """Also with SIGKILL: the next start needs no cleaning up."""
    config = ring_config(tmp_path, **sections_of("inference.port", free_port()))
    code = (
        "import sys, time; from actors.ops.ports import claimed_ports; from schemas.config import load_config\n"
        "with claimed_ports(load_config(sys.argv[1])): print('claimed', flush=True); time.sleep(600)"
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with contextlib.closing(process.stdout):
        assert process.stdout.readline() == "claimed\n"
        assert len(problems_of(config)) == 1
        process.kill()
        process.wait()
    assert problems_of(config) == []
