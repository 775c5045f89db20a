"""The topology as it is printed, the addresses it makes, and the ones it refuses."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bus.topology import CONTROL_HWM, EDGES, Addresses, describe, milliseconds
from schemas.config import RunConfig, check_tree
from schemas.errors import ConfigError
from schemas.messages import MESSAGE_TYPES


def _config(**bus: Any) -> RunConfig:
    return check_tree(
        {
            "output_dir": "/nowhere/run",
            "model": {"path": "none"},
            "environments": [{"type": "arithmetic"}],
            "reward": {"functions": [{"path": "exact_match"}]},
            "trainer": {"max_steps": 1},
            "bus": bus,
        }
    )


def _problem(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    (problem,) = caught.value.problems
    return problem


def test_description_names_binder_connector_and_mark_of_every_edge() -> None:
    """A line per edge: who binds, who connects, the high-water mark as configured, and what makes a loss good."""
    lines = describe(_config(high_water_mark=17)).splitlines()
    assert lines[0].split()[:4] == ["edge", "message", "pattern", "binds"]
    for edge, line in zip(EDGES, lines[1:], strict=False):
        cells = [cell for cell in line.split("  ") if cell]
        mark = {"control": str(CONTROL_HWM), "completions": "-", "weights": "-"}.get(edge.name, "17")
        told = [edge.name, edge.message, edge.pattern, edge.binder, edge.connector, mark, edge.made_good_by]
        assert [cell.strip() for cell in cells] == told
    assert "control address: ipc://" in lines[-1]


def test_edges_carry_messages_that_exist() -> None:
    """The data edges name classes of the wire, and every data kind has its edge."""
    names = {message.__name__ for message in MESSAGE_TYPES.values()}
    assert {edge.message for edge in EDGES if edge.pattern == "PUSH→PULL"} == {
        "RolloutGroup",
        "ScoredGroup",
        "StepBatch",
    }
    assert {"RolloutGroup", "ScoredGroup", "StepBatch"} <= names


def test_addresses_of_one_run_are_the_same_in_each_process_and_differ_between_runs() -> None:
    """Actors find the packer by configuration alone; two runs on one machine don't meet."""
    assert Addresses(_config()).control == Addresses(_config()).control
    other = _config().model_copy(update={"output_dir": "/nowhere/other"})
    assert Addresses(other).control != Addresses(_config()).control
    assert Addresses(_config()).to_bind("reward-0", "boot1") != Addresses(_config()).to_bind("reward-0", "boot2")


def test_tcp_binds_any_port_and_advertises_the_name_others_know() -> None:
    """Data sockets take a free port; peers are told `bus.advertise_host` with it."""
    addresses = Addresses(
        _config(control="tcp://127.0.0.1:5000", host="127.0.0.2", advertise_host="box.local", allow_plaintext=True)
    )
    assert addresses.control == "tcp://127.0.0.1:5000"
    assert addresses.to_bind("packer", "boot") == "tcp://127.0.0.2:*"
    assert addresses.advertised("tcp://127.0.0.2:41234") == "tcp://box.local:41234"
    plain = Addresses(_config(control="tcp://127.0.0.1:5000"))
    assert plain.advertised("tcp://127.0.0.1:41234") == "tcp://127.0.0.1:41234"


@pytest.mark.parametrize(
    ("bus", "key", "host"),
    [
        ({"control": "tcp://10.0.0.5:5000"}, "bus.control", "10.0.0.5"),
        ({"control": "tcp://0.0.0.0:5000"}, "bus.control", "0.0.0.0"),
        ({"control": "tcp://box.local:5000"}, "bus.control", "box.local"),
        ({"control": "tcp://127.evil.org:5000"}, "bus.control", "127.evil.org"),
        ({"control": "tcp://[2001:db8::1]:5000"}, "bus.control", "[2001:db8::1]"),
        ({"control": "tcp://127.0.0.1:5000", "host": "0.0.0.0"}, "bus.host", "0.0.0.0"),
        ({"control": "tcp://127.0.0.1:5000", "advertise_host": "box.local"}, "bus.advertise_host", "box.local"),
    ],
)
def test_plaintext_beyond_loopback_is_refused(bus: dict[str, str], key: str, host: str) -> None:
    """The error names the key, the host and the key that allows it; with that it is allowed."""
    problem = _problem(lambda: _config(**bus))
    assert problem.startswith(f"{key}: '{host}' is reachable from other machines")
    assert "bus.allow_plaintext: true" in problem
    assert "set bus.keys" in problem
    Addresses(_config(**bus, allow_plaintext=True))
    Addresses(_config(**bus, keys="keys"))


@pytest.mark.parametrize("control", ["tcp://localhost:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "ipc", "inproc"])
def test_loopback_and_local_transports_need_no_permission(control: str) -> None:
    """What no other machine can reach is not refused."""
    Addresses(_config(control=control))


@pytest.mark.parametrize(
    "control", ["udp://127.0.0.1:1", "", "tcp", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://h:70000", "ipc:///x"]
)
def test_control_that_is_no_address_is_refused(control: str) -> None:
    """The error names the key, the value and what is allowed."""
    problem = _problem(lambda: _config(control=control))
    assert problem == f"bus.control: must be 'ipc' or 'tcp://host:port', got {control!r}"


def test_socket_path_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix socket paths are short; the error says which path and what to change."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 25)))
    problem = _problem(lambda: Addresses(_config()).control)
    assert problem.startswith("bus.control: the socket path ")
    assert "longer than 100 bytes; set TMPDIR shorter" in problem


def test_socket_folder_is_closed_to_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may not enter the folder can't reach the bus, which has no other lock on one host."""
    base = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    (base / f"grpo-actors-{os.getuid()}").mkdir(mode=0o755)  # as an older version, or somebody else, made it
    folder = Path(Addresses(_config()).control.removeprefix("ipc://")).parent
    assert folder.parent.parent == base
    assert [made.stat().st_mode & 0o077 for made in (folder, folder.parent)] == [0, 0]
    shutil.rmtree(base)


def test_socket_folder_that_leads_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link at the predictable name could lead to a folder that another user reads."""
    base = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    (base / "elsewhere").mkdir()
    (base / f"grpo-actors-{os.getuid()}").symlink_to(base / "elsewhere")
    assert "belongs to another user; set TMPDIR" in _problem(lambda: Addresses(_config()).control)
    shutil.rmtree(base)


def test_dead_sockets_are_removed_and_living_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that was killed leaves its socket's file; one that still listens is not cut off."""
    base = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    addresses = Addresses(_config())
    paths = [addresses.to_bind(name, "boot").removeprefix("ipc://") for name in ("reward-0", "reward-7")]
    dead, living = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for made, path in zip((dead, living), paths, strict=True):
        made.bind(path)
        made.listen()
    dead.close()
    addresses.remove()
    assert [str(path) for path in addresses.folder.iterdir()] == paths[1:]
    living.close()
    addresses.remove()
    assert not addresses.folder.exists()
    Addresses(_config(control="tcp://127.0.0.1:5000")).remove()
    shutil.rmtree(base)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0), (0.0001, 1), (0.02, 20), (1.0005, 1001), (-1.0, 0)])
def test_timeouts_are_rounded_up(seconds: float, expected: int) -> None:
    """A poll never ends before its deadline, so nothing spins through the last millisecond."""
    assert milliseconds(seconds) == expected
