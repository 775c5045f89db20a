"""Runs of which only the bus matters, on each transport, with sockets in a short folder of their own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from bus import keys, topology
from bus.encryption import keys_for, secure_client, split_key
from schemas.config import RunConfig, check_tree
from schemas.config.services import BusConfig
from tests.ports import free_port

TRANSPORTS = ("tcp", "ipc", "inproc", "tcp+curve")
MakeConfig = Callable[..., RunConfig]
HANDSHAKE_MILLISECONDS = topology.HANDSHAKE_MILLISECONDS
"""As it is in a run; tests have a longer one."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the bus that no machine reaches which stands still for seconds. Who tests one sets it shorter again."""
    monkeypatch.setattr(topology, "HANDSHAKE_MILLISECONDS", 120_000)
    monkeypatch.setattr("bus.control.server.BIND_SECONDS", 60.0)
    monkeypatch.setattr("bus.keys.PATIENCE_SECONDS", 60.0)
    # two lines in place of one, when a test is held up between two refusals
    monkeypatch.setattr("bus.sockets.DROP_LOG_INTERVAL_SECONDS", 600.0)
    monkeypatch.setattr("bus.encryption.REFUSAL_LOG_SECONDS", 600.0)


@pytest.fixture
def long_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control sockets that drop nothing while the thread of the other end is held up, nor when they are closed."""
    for module in ("connection", "server"):
        monkeypatch.setattr(f"bus.control.{module}.CONTROL_HWM", 100_000)
        monkeypatch.setattr(f"bus.control.{module}.CLOSE_LINGER_MILLISECONDS", 60_000)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport in turn."""
    return str(request.param)


@pytest.fixture
def make_config(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeConfig]:
    """Makes configurations; the arguments are keys of `bus`."""
    tmp_path_factory.getbasetemp()  # before the folder of temporary files is another one
    folder = tempfile.mkdtemp(prefix="bus-", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", folder)

    def make(transport: str, **bus: Any) -> RunConfig:
        control = f"tcp://127.0.0.1:{free_port()}" if transport.startswith("tcp") else transport
        if transport == "tcp+curve":
            bus["keys"] = f"{folder}/keys"
            if not Path(bus["keys"]).exists():
                keys.make(Path(bus["keys"]))
        return check_tree(
            {
                "output_dir": f"{folder}/out",
                "model": {"path": "none"},
                "environments": [{"type": "arithmetic"}],
                "reward": {"functions": [{"path": "exact_match"}]},
                "trainer": {"max_steps": 1},
                "bus": {"control": control, **bus},
            }
        )

    yield make
    shutil.rmtree(Path(folder), ignore_errors=True)


class Place(str):
    """An address, with the configuration of the bus that it belongs to."""

    bus: BusConfig

    @classmethod
    def of(cls, address: str, bus: BusConfig) -> "Place":
        """Both in one."""
        place = cls(address)
        place.bus = bus
        return place


def connect(socket: "zmq.Socket[bytes]", address: str, bus: BusConfig) -> None:
    """Connect a bare socket with the keys of the run, where it has some."""
    ring = keys_for(address, bus)
    if ring is None:
        socket.connect(address)
        return
    endpoint, known = split_key(address, ring) if "#" in address else (address, ring.current().server_publics)
    secure_client(socket, ring, known, 0)
    socket.connect(endpoint)
