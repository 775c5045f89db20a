"""The server of /metrics: threads and connections are bounded whatever its peers leave undone."""

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from actors.telemetry.http import MetricsServer, serve_metrics
from schemas import limits
from tests.ring.harness import wait_until

WAIT = 60.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    """A server of one gauge on a free port."""
    registry = CollectorRegistry()
    Gauge("one", "is 1", registry=registry).set(1)
    made = serve_metrics(0, "127.0.0.1", registry)
    yield made
    made.shutdown()
    made.server_close()


def _asked(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=WAIT) as answer:
        return str(answer.read().decode())


def _open(server: MetricsServer, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=WAIT)
    connection.sendall(data)
    return connection


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_connections_that_never_finish_a_request_take_a_bounded_number_of_threads(server: MetricsServer) -> None:
    """150 half requests: the oldest make room for the newest, and who asks is answered."""
    before = threading.active_count()
    connections = [_open(server, b"GET /metr") for _ in range(150)]
    # answered after the server has taken all connections before this one
    assert "one 1.0" in _asked(server)
    assert all(_ended(connection) for connection in connections[:100])
    wait_until(lambda: server.num_open <= limits.HTTP_METRICS_CONNECTIONS, "the bound of connections", WAIT)
    wait_until(
        lambda: threading.active_count() <= before + limits.HTTP_METRICS_CONNECTIONS + 1, "the bound of threads", WAIT
    )
    for connection in connections:
        connection.close()


def test_connection_that_sends_a_byte_now_and_then_is_closed(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is in time; the connection is not."""
    connection = _open(server, b"GET /m")
    wait_until(lambda: server.num_open, "the server's part of the connection", WAIT)
    monkeypatch.setattr(limits, "HTTP_CONNECTION_SECONDS", 0.5)
    deadline = time.monotonic() + WAIT
    while server.num_open:
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):
            connection.sendall(b"e")
        time.sleep(0.05)
    assert _ended(connection)
    connection.close()
    monkeypatch.undo()
    assert "one 1.0" in _asked(server)
