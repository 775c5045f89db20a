"""When a gate shuts a connection: never because the socket's reader was held up."""

import socket as sockets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from bus.counts import EdgeCounts
from bus.gate import Gate

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells bytes per connection")


@pytest.fixture
def suspect() -> Iterator[Gate]:
    """Return a gate with one connection, found beyond the bound of 10 bytes for the first time."""
    with ExitStack() as stack:
        listener = stack.enter_context(sockets.create_server(("127.0.0.1", 0)))
        peer = stack.enter_context(sockets.create_connection(listener.getsockname()))
        accepted = stack.enter_context(listener.accept()[0])
        gate = Gate(EdgeCounts("groups"), connection_bytes=10, total_bytes=1000)
        gate.hear(int(zmq.EVENT_ACCEPTED), accepted.fileno())
        peer.sendall(bytes(100))
        accepted.recv(1, sockets.MSG_PEEK)
        gate.empty(gate.sweep)
        assert _swept(gate) == 0
        assert gate.suspects
        yield gate


def _swept(gate: Gate) -> int:
    """Bytes of the connections that a sweep has shut."""
    gate.look()
    return gate.shut_those_beyond(growing=False)


def test_a_suspect_is_shut_when_a_later_read_finds_no_whole_message(suspect: Gate) -> None:
    """Until then its message may be whole and wait in the socket."""
    assert _swept(suspect) == 0
    suspect.empty(suspect.sweep)
    assert _swept(suspect) == 100
    assert suspect.counts.dropped["unfinished"] == 1


def test_a_reader_that_was_held_up_tells_nothing_about_what_has_come_meanwhile(suspect: Gate) -> None:
    """It read before the message was whole, and says so, or waits on, after the sweep that made a suspect."""
    suspect.empty(suspect.sweep - 1)
    assert [_swept(suspect) for _ in range(3)] == [0, 0, 0]
    assert suspect.counts.dropped["unfinished"] == 0
