"""The connections of a bound tcp socket, and the decision to shut connections with an endless message.

A `Gate` consumes events of the socket's monitor (`hear`), what the socket's reader finds (`took`, `empty`) and, at
each sweep of `bus.unfinished`, the kernel's counts (`look`). `shut_those_beyond` decides. A connection is shut if it
brings more than `connection_bytes` without one whole message, if all connections together are beyond `total_bytes`, or
if its tiny frames make the process grow. It is then counted as `unfinished` and named in the log.
"""

import contextlib
import os
import time
from dataclasses import dataclass, field

import structlog
import zmq

from bus.connection import Connection
from bus.counts import REFUSALS, EdgeCounts
from bus.sockets import drop
from schemas.errors import DecodeError

log = structlog.get_logger("bus")

EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED)
"""Events of a socket's monitor that a gate must hear."""
_SOURCE = int(zmq.SRCFD)
FULL_LOG_SECONDS = 5.0
"""Seconds between two log lines about connections that can't be accepted."""


@dataclass
class Gate:
    """Connections of a bound socket. Its reader calls `took` and `empty`, the monitor's thread calls `hear`.

    Args:
        counts: counters of the edge; shut connections are added to `dropped`.
        connection_bytes: most unfinished bytes of a connection.
        total_bytes: most unfinished bytes of all connections together.
    """

    counts: EdgeCounts
    connection_bytes: int
    total_bytes: int
    closed: bool = False
    suspects: bool = False
    """True if any open connection was beyond a bound at the last sweep."""
    port: int = 0
    """Local port of the bound socket, 0 until bound. A descriptor with another port is not this socket's."""
    _connections: dict[int, Connection] = field(default_factory=dict)
    """Open connections by descriptor."""
    _newest: dict[int, int] = field(default_factory=dict)
    """Place of the newest whole message, counted over the socket, by descriptor of its connection."""
    _num_taken: int = 0
    """Whole messages taken from the socket so far."""
    _next_full_log: float = 0.0
    sweep: int = 0
    """Number of sweeps so far."""
    _empty_after: int = -1
    """Number of sweeps before the newest read of the socket that found no whole message."""

    def took(self, frame: zmq.Frame) -> None:
        """Note that a whole message has come over the connection of this frame."""
        self._num_taken += 1
        try:  # noqa: SIM105  # `suppress` takes as long as the call itself, and this runs for each message
            self._newest[frame.get(_SOURCE)] = self._num_taken
        except zmq.ZMQError:
            # some transports have no descriptor, and a closed connection needs no judgement
            pass

    def empty(self, sweep: int) -> None:
        """Note that a read of the socket has found no whole message. A reader that waits reads every LOOK_MILLISECONDS.

        Args:
            sweep: value of `sweep` before the read. A reader that was held up since then, or while it waits, says
                nothing about messages that have come meanwhile.
        """
        self._empty_after = sweep

    def hear(self, event: int, value: int) -> None:
        """Handle an event of the socket's monitor. `value` is a descriptor, or an errno for EVENT_ACCEPT_FAILED."""
        if event == zmq.EVENT_ACCEPT_FAILED:
            # libzmq retries at once while the cause lasts, so the log is limited and the counter is not
            self.counts.refused["not_accepted"] += 1
            if time.monotonic() >= self._next_full_log:
                self._next_full_log = time.monotonic() + FULL_LOG_SECONDS
                log.error(
                    "connections can't be accepted",
                    edge=self.counts.edge,
                    reason=os.strerror(value),
                    detail=REFUSALS["not_accepted"],
                )
            return
        # the descriptor's old connection is gone either way: closed, or replaced by the accepted one
        self._connections.pop(value, None)
        self._newest.pop(value, None)
        if event == zmq.EVENT_ACCEPTED:
            with contextlib.suppress(OSError):  # closed already
                self._connections[value] = Connection.accepted(value)

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    @property
    def unfinished(self) -> int:
        """Bytes received in unfinished messages, over all connections."""
        # a copy, here and below: the monitor's thread adds and removes connections
        return sum(connection.unfinished for connection in list(self._connections.values()))

    @property
    def largest(self) -> int:
        """Bytes received in the largest unfinished message."""
        return max((connection.unfinished for connection in list(self._connections.values())), default=0)

    def look(self) -> int:
        """Ask the kernel for the bytes read from each connection, and return how many are new."""
        num_new = 0
        for descriptor, connection in list(self._connections.items()):
            # before the look at the bytes: a message that comes in between is seen at the next sweep
            newest = self._newest.get(descriptor, 0)
            num_new += connection.look(self.port, whole=newest > connection.newest)
            connection.newest = newest
        return num_new

    def shut_those_beyond(self, *, growing: bool) -> int:
        """Shut the connections with an endless message, and return their unfinished bytes.

        A connection beyond a bound becomes a suspect first: its whole messages may still wait in the socket. The
        connection is shut at a later call, once a read has found the socket empty, or the socket has delivered two
        messages for each open connection.

        Args:
            growing: True if a connection of this socket makes the process grow by far more than the bytes received.
        """
        # by a read that began after the last sweep, which has marked the suspects
        emptied = self._empty_after == self.sweep
        open_ones = {number: one for number, one in list(self._connections.items()) if not one.is_shut}
        beyond = {number for number, one in open_ones.items() if one.unfinished > self.connection_bytes}
        beyond |= _to_make_room(open_ones, self.total_bytes)
        # below both bounds and yet growing: tiny frames, which take far more memory than bytes on the wire
        if growing and not beyond and open_ones:
            beyond = {_likeliest(open_ones)}
        freed = 0
        for number, connection in open_ones.items():
            if number not in beyond:
                connection.suspect_since = None
            elif connection.suspect_since is None:
                connection.suspect_since = self._num_taken
            elif self._newest.get(number, 0) > connection.newest:
                # whole messages have been read since the look at the bytes, and the socket may be empty for that reason
                connection.suspect_since = None
            elif emptied or self._num_taken - connection.suspect_since > 2 * len(open_ones):
                # a socket takes from its connections in turn: one with a whole message would have been served
                size, (_, peer) = connection.unfinished, connection.ends
                freed += size
                connection.shut(self.port)
                error = DecodeError("unfinished", f"{size} bytes without one whole message; the connection was closed")
                drop(self.counts, error, ":".join(map(str, peer[:2])) if isinstance(peer, tuple) else str(peer))
        self.suspects = any(c.suspect_since is not None and not c.is_shut for c in open_ones.values())
        self.sweep += 1
        return freed


def _to_make_room(connections: dict[int, Connection], total_bytes: int) -> set[int]:
    """Return as few connections as bring the sum of unfinished bytes back to its bound, the slowest messages first.

    The slowest and not the largest: messages at their full rate are nearer to their end than their size tells. Messages
    far below the mean size stay, since ending them would make no room.
    """
    sizes = {number: one.unfinished for number, one in connections.items() if one.unfinished}
    too_much, mean = sum(sizes.values()) - total_bytes, sum(sizes.values()) / max(1, len(sizes))
    chosen: set[int] = set()
    if too_much <= 0:
        return chosen
    now = time.monotonic()
    # suspects of the last look first: a choice that changed each time would never be confirmed
    for number in sorted(sizes, key=lambda n: (connections[n].suspect_since is None, connections[n].rate(now))):
        if too_much > 0 and 2 * sizes[number] >= mean:
            chosen.add(number)
            too_much -= sizes[number]
    return chosen


def _likeliest(connections: dict[int, Connection]) -> int:
    """Return the connection with the most unfinished bytes.

    The suspect of the last sweep stays the choice while its bytes are at least half of the most: only a stable choice
    is confirmed.
    """
    largest = max(connection.unfinished for connection in connections.values())

    def rank(number: int) -> tuple[bool, int]:
        connection = connections[number]
        return connection.suspect_since is not None and 2 * connection.unfinished >= largest, connection.unfinished

    return max(connections, key=rank)
