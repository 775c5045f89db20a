"""The topology as it is printed, the addresses it makes, and the ones it refuses."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bus.data import Inbox
from bus.topology import CONTROL_HWM, EDGES, Addresses, describe, milliseconds
from schemas import limits
from schemas.config import RunConfig, check_tree
from schemas.errors import ConfigError
from schemas.messages import DATA_KINDS, MESSAGE_TYPES
from tests.ports import free_port


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


def test_description_has_every_limit_with_its_reason() -> None:
    """The table that senders and receivers read is the one that is printed."""
    lines = describe(_config()).splitlines()
    for limit in limits.TABLE:
        assert any(line.startswith(limit.name) and line.endswith(limit.why) for line in lines), limit.name
    assert any(line.split("  ")[0] == "data: frame" and "64 MiB" in line for line in lines)


def test_edges_carry_messages_that_exist() -> None:
    """The data edges name classes of the wire, and every data kind has its edge."""
    names = {message.__name__ for message in MESSAGE_TYPES.values()}
    assert {edge.message for edge in EDGES if edge.pattern == "PUSH→PULL"} == {
        "RolloutGroup",
        "ScoredGroup",
        "StepBatch",
    }
    # a part stands for its batch
    assert {kind.__name__ for kind in DATA_KINDS} - {"BatchPart"} == {"RolloutGroup", "ScoredGroup", "StepBatch"}
    assert {kind.__name__ for kind in DATA_KINDS} <= names


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
        ({"control": "tcp://0.0.0.1:5000"}, "bus.control", "0.0.0.1"),
        ({"control": "tcp://box.local:5000"}, "bus.control", "box.local"),
        ({"control": "tcp://127.evil.org:5000"}, "bus.control", "127.evil.org"),
        ({"control": "tcp://[2001:db8::1]:5000"}, "bus.control", "[2001:db8::1]"),
        ({"control": "tcp://127.0.0.1:5000", "host": "10.0.0.5"}, "bus.host", "10.0.0.5"),
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


@pytest.mark.parametrize(
    ("bus", "key"),
    [
        ({"control": "tcp://0.0.0.0:5000", "host": "10.0.0.5"}, "bus.control"),
        ({"control": "tcp://[::]:5000", "host": "10.0.0.5"}, "bus.control"),
        ({"control": "tcp://10.0.0.5:5000", "host": "0.0.0.0"}, "bus.host"),
        ({"control": "tcp://10.0.0.5:5000", "host": "::"}, "bus.host"),
        ({"control": "tcp://10.0.0.5:5000", "host": "10.0.0.5", "advertise_host": "[::]"}, "bus.host"),
    ],
)
def test_an_address_that_nobody_can_connect_to_is_never_advertised(bus: dict[str, str], key: str) -> None:
    """All addresses of a machine are no address; the words name the key to set, and with it a wildcard is bound to."""
    problem = _problem(lambda: _config(**bus, allow_plaintext=True))
    assert problem.startswith(f"{key}: ")
    assert "is no address that" in problem
    reached = {"control": "tcp://10.0.0.5:5000", "host": "0.0.0.0", "advertise_host": "10.0.0.5"}
    assert Addresses(_config(**reached, allow_plaintext=True)).advertised("tcp://0.0.0.0:7") == "tcp://10.0.0.5:7"


@pytest.mark.parametrize("control", ["tcp://[fd00::5]:5000", "tcp://fd00::5:5000"])
def test_an_ipv6_address_gets_its_brackets_where_a_port_follows(control: str) -> None:
    """As people write it, and as a pod is told its own."""
    addresses = Addresses(_config(control=control, host="[::1]", advertise_host="fd00::7", keys="keys"))
    assert addresses.control == "tcp://[fd00::5]:5000"
    assert addresses.to_bind("packer", "boot") == "tcp://[::1]:*"
    assert addresses.advertised("tcp://[::1]:41234") == "tcp://[fd00::7]:41234"


def test_data_sockets_bind_within_the_range_and_say_when_it_is_used_up() -> None:
    """For a firewall; a range without a free port is an error that names the key."""
    first = free_port()
    config = _config(control="tcp://127.0.0.1:5000", data_ports=f"{first}-{first + 2}")
    inboxes = []
    make = lambda: Inbox("groups", Addresses(config), config.bus, "reward-0", "b0")  # noqa: E731
    try:
        for _ in range(3):
            inboxes.append(make())
    except ConfigError:
        assert inboxes  # another process has one of them
    with pytest.raises(ConfigError, match=rf"bus.data_ports: all 3 ports of {first}-{first + 2} are in use"):
        make()
    ports = {int(inbox.address.rpartition(":")[2]) for inbox in inboxes}
    for inbox in inboxes:
        inbox.close()
    assert 1 <= len(ports) == len(inboxes) <= 3
    assert ports <= set(range(first, first + 3))
    assert "must be two ports" in _problem(lambda: _config(data_ports="40000"))
    assert "must be two ports" in _problem(lambda: _config(data_ports="40100-40000"))


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
    """An actor that was killed leaves its socket's file; one that still listens is not cut off, other files stay."""
    base = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    addresses = Addresses(_config())
    paths = [addresses.to_bind(name, "boot").removeprefix("ipc://") for name in ("reward-0", "reward-7")]
    dead, living = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for made, path in zip((dead, living), paths, strict=True):
        made.bind(path)
        made.listen()
    dead.close()
    note = addresses.folder / "notes.txt"
    note.write_text("no socket of ours")
    addresses.remove()
    assert sorted(map(str, addresses.folder.iterdir())) == sorted([str(note), *paths[1:]])
    living.close()
    addresses.remove()
    assert [path.read_text() for path in addresses.folder.iterdir()] == ["no socket of ours"]
    note.unlink()
    addresses.remove()
    assert not addresses.folder.exists()
    Addresses(_config(control="tcp://127.0.0.1:5000")).remove()
    shutil.rmtree(base)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0), (0.0001, 1), (0.02, 20), (1.0005, 1001), (-1.0, 0)])
def test_timeouts_are_rounded_up(seconds: float, expected: int) -> None:
    """A poll never ends before its deadline, so nothing spins through the last millisecond."""
    assert milliseconds(seconds) == expected
