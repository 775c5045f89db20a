"""Real processes, and what systemd would hear of them: the tests hold the other end of NOTIFY_SOCKET."""

import contextlib
import signal
import socket
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.marks import long_but
from tests.ports import free_port
from tests.ring.harness import (
    ALL,
    PATIENCE_SECONDS,
    Processes,
    processes,
    ring,
    ring_config,
    steps_recorded,
    wait_until,
)

pytestmark = pytest.mark.slow

WATCHDOG_SECONDS = 1.0
QUIET_SECONDS = 2.0
"""Without a word: twice what the watchdog allows, and eight times what the actor keeps to."""
LONG = {"trainer": {"max_steps": 100_000}, "eval": {"num_prompts": 0}}


class Supervisor:
    """Hears one process."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._last_heard = time.monotonic()
        self.all: list[str] = []

    def hear(self) -> list[str]:
        """What has come since the last time."""
        new = []
        with contextlib.suppress(BlockingIOError):
            while True:
                new.append(self._socket.recv(4096).decode())
        self._last_heard = time.monotonic() if new else self._last_heard
        self.all += new
        return new

    def is_fed(self) -> bool:
        """Whether the watchdog has been fed since the last time."""
        return "WATCHDOG=1" in self.hear()

    def is_quiet(self) -> bool:
        """Whether nothing has come for QUIET_SECONDS."""
        self.hear()
        return time.monotonic() - self._last_heard > QUIET_SECONDS

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Named to every process that the test starts, which is one."""
    heard = Supervisor(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1e6)))
    yield heard
    heard.close()


def _others(kind: str) -> list[str]:
    return [f"{other}-0" for other in ALL if other != kind]


def _log(started: Processes, label: str) -> str:
    return started.text(label)[-2000:]


@pytest.mark.parametrize("kind", long_but(["packer", "trainer", "inference"], ALL))
def test_every_actor_says_that_it_is_up_that_it_lives_and_that_it_leaves(
    tmp_path: Path, supervisor: Supervisor, kind: str
) -> None:
    """READY=1 once and first, then WATCHDOG=1 four times a second, STOPPING=1 last; drained, it ends with 0."""
    config = ring_config(tmp_path, **LONG)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start(*_others(kind))
        process = started.run(f"{kind}-0")
        wait_until(lambda: steps_recorded(config) and supervisor.hear() and len(supervisor.all) > 8, "it lives")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, _log(started, f"{kind}-0")
        supervisor.hear()
    stopped_at = supervisor.all.index("STOPPING=1")
    assert supervisor.all[:stopped_at] == ["READY=1", *["WATCHDOG=1"] * (stopped_at - 1)]
    assert set(supervisor.all[stopped_at + 1 :]) <= {"WATCHDOG=1"}


@pytest.mark.parametrize("kind", ["packer", "reward"])
def test_a_frozen_process_feeds_no_watchdog(tmp_path: Path, supervisor: Supervisor, kind: str) -> None:
    """SIGSTOP; it goes on where it was after SIGCONT."""
    config = ring_config(tmp_path, **LONG)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start(*_others(kind))
        process = started.run(f"{kind}-0")
        wait_until(supervisor.is_fed, "it lives")
        process.send_signal(signal.SIGSTOP)
        wait_until(supervisor.is_quiet, "nothing is heard")
        process.send_signal(signal.SIGCONT)
        wait_until(supervisor.is_fed, "it lives again")


def test_a_main_loop_that_hangs_feeds_no_watchdog_though_all_other_threads_live(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    """A packer that waits for its ledger still answers and serves metrics; probe and watchdog tell that it hangs."""
    port = free_port()
    config = ring_config(
        tmp_path, **LONG, ledger={"commit_timeout": 600.0}, telemetry={"metrics_host": "127.0.0.1", "metrics_port": 0}
    )
    with ring(config) as run, processes(config, tmp_path) as started:
        process = started.run("packer-0", f"telemetry.metrics_port={port}")
        run.start(*_others("packer"))
        wait_until(lambda: steps_recorded(config) and supervisor.is_fed(), "it lives")
        with contextlib.closing(sqlite3.connect(config.ledger_path, isolation_level=None, timeout=30.0)) as other:
            other.execute("BEGIN IMMEDIATE")
            wait_until(supervisor.is_quiet, "nothing is heard")
            assert process.poll() is None
            assert _status(port, "metrics") == 200
            assert _status(port, f"healthz?within={QUIET_SECONDS / 2:g}") == 503
            other.execute("ROLLBACK")
        wait_until(supervisor.is_fed, "it lives again")
        assert _status(port, "healthz?within=60") == 200


def _status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
