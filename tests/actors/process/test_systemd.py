"""What an actor says of its main loop to systemd, over a real socket."""

import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.process import systemd
from actors.process.systemd import Systemd

ABSTRACT = itertools.count()


class Supervisor:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self.socket.settimeout(2.0)
        self.environment = {"NOTIFY_SOCKET": address}

    def heard(self) -> list[str]:
        """All that has come."""
        found = []
        self.socket.setblocking(False)
        while True:
            try:
                found.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return found


@pytest.fixture(params=["path", "abstract"])
def supervisor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Supervisor]:
    """Bound to a path, and to one of Linux' abstract names."""
    name = f"@grpo-liveness-{os.getpid()}-{next(ABSTRACT)}"
    made = Supervisor(str(tmp_path / "notify") if request.param == "path" else name)
    yield made
    made.socket.close()


class Clock:
    """Time that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(systemd.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the module's."""
    return Clock(monkeypatch)


def test_systemd_hears_ready_with_the_first_turn_and_nothing_before(supervisor: Supervisor) -> None:
    """Without WatchdogSec= no WATCHDOG=1 follows."""
    alive = Systemd(supervisor.environment)
    assert supervisor.heard() == []
    alive.turn()
    alive.turn()
    assert supervisor.heard() == ["READY=1"]


@pytest.mark.parametrize(("watchdog_seconds", "between"), [(60, 1.0), (2, 0.5)])
def test_watchdog_is_fed_by_turns_once_a_second_or_four_times_in_its_time(
    supervisor: Supervisor, clock: Clock, watchdog_seconds: int, between: float
) -> None:
    """However often the loop goes round in between; and not at all while it does not."""
    alive = Systemd(supervisor.environment | {"WATCHDOG_USEC": str(watchdog_seconds * 1_000_000)})
    for _ in range(8):
        alive.turn()
        clock.now += between / 4
    assert supervisor.heard() == ["READY=1", "WATCHDOG=1"]
    clock.now += 1000.0
    assert supervisor.heard() == []
    alive.turn()
    assert supervisor.heard() == ["WATCHDOG=1"]


def test_watchdog_of_another_process_is_not_fed(supervisor: Supervisor, clock: Clock) -> None:
    """WATCHDOG_PID names whom systemd means."""
    alive = Systemd(supervisor.environment | {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"})
    for _ in range(4):
        alive.turn()
        clock.now += 1.0
    assert supervisor.heard() == ["READY=1"]


def test_leaving_is_said_once(supervisor: Supervisor) -> None:
    """By the signal handler or at the end of the run, whichever is first."""
    alive = Systemd(supervisor.environment)
    alive.leave()
    alive.leave()
    assert supervisor.heard() == ["STOPPING=1"]


def test_children_do_not_inherit_the_supervisors_socket() -> None:
    """A server that an actor starts would be heard in its place."""
    environment = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    Systemd(environment)
    assert environment == {"PATH": "/bin"}


def test_without_a_supervisor_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket is made."""
    made: list[object] = []
    monkeypatch.setattr(systemd.socket, "socket", lambda *kind: made.append(kind))
    alive = Systemd({})
    alive.turn()
    alive.leave()
    assert made == []


def test_a_supervisor_that_does_not_listen_is_told_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the actor goes on."""
    alive = Systemd({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "0"})
    for _ in range(3):
        alive.turn()
    assert capsys.readouterr().out.count("NOTIFY_SOCKET does not listen") == 1
