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
def ends() -> Iterator[tuple[Gate, sockets.socket, sockets.socket]]:
    """Return a gate with one connection, the peer's end and the accepted end."""
    with ExitStack() as stack:
        listener = stack.enter_context(sockets.create_server(("127.0.0.1", 0)))
        peer = stack.enter_context(sockets.create_connection(listener.getsockname()))
        accepted = stack.enter_context(listener.accept()[0])
        gate = Gate(EdgeCounts("groups"), connection_bytes=10, total_bytes=1000)
        gate.hear(int(zmq.EVENT_ACCEPTED), accepted.fileno())
        yield gate, peer, accepted


@pytest.fixture
def suspect(ends: tuple[Gate, sockets.socket, sockets.socket]) -> Gate:
    """Return the gate, with its connection found beyond the bound of 10 bytes for the first time."""
    gate, peer, accepted = ends
    peer.sendall(bytes(100))
    accepted.recv(100, sockets.MSG_WAITALL)  # as libzmq does
    gate.empty(gate.sweep)
    assert _swept(gate) == 0
    assert gate.suspects
    return gate


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


def test_bytes_that_libzmq_has_not_read_make_no_suspect(ends: tuple[Gate, sockets.socket, sockets.socket]) -> None:
    """They may be a whole message, and wait in the kernel while libzmq's thread waits for a core."""
    gate, peer, accepted = ends
    peer.sendall(bytes(100))
    accepted.recv(100, sockets.MSG_WAITALL | sockets.MSG_PEEK)  # all have come, none is read
    assert (gate.look(), gate.unfinished) == (0, 0)
    accepted.recv(30, sockets.MSG_WAITALL)
    assert (gate.look(), gate.unfinished) == (30, 30)


class _Frame:
    """A frame of a connection. While it is asked for the descriptor, the watch looks."""

    def __init__(self, gate: Gate, descriptor: int) -> None:
        self._gate, self._descriptor = gate, descriptor

    def get(self, _: int) -> int:
        self._gate.look()
        return self._descriptor


def test_a_whole_message_counts_though_the_watch_looks_at_the_same_moment(
    ends: tuple[Gate, sockets.socket, sockets.socket],
) -> None:
    """Otherwise its bytes, and those of the next message, would look like one message without end."""
    gate, peer, accepted = ends
    peer.sendall(bytes(100))
    accepted.recv(100, sockets.MSG_WAITALL)
    gate.took(_Frame(gate, accepted.fileno()))  # type: ignore[arg-type]
    assert gate.unfinished == 100
    gate.look()
    assert gate.unfinished == 0


def test_messages_that_are_read_between_the_look_and_the_verdict_count(
    suspect: Gate, ends: tuple[Gate, sockets.socket, sockets.socket]
) -> None:
    """A watch that is held up there finds a socket that is empty since all was read. A later endless one is shut."""
    _, peer, accepted = ends
    suspect.look()
    suspect._num_taken += 12
    suspect._newest[accepted.fileno()] = suspect._num_taken
    suspect.empty(suspect.sweep)
    assert suspect.shut_those_beyond(growing=False) == 0
    assert _swept(suspect) == 0
    peer.sendall(bytes(50))
    accepted.recv(50, sockets.MSG_WAITALL)
    assert _swept(suspect) == 0
    suspect.empty(suspect.sweep)
    assert _swept(suspect) == 50
    assert suspect.counts.dropped["unfinished"] == 1
