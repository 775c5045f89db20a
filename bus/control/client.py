"""The actor's end of the control plane.

Consumes reports of its actor, and directives. Emits a heartbeat every `bus.beat_interval`, and at once after an urgent
report (10 per second sustained). The thread waits until the next heartbeat is due; a directive or an urgent report ends
the wait. No
send waits: a heartbeat without room is dropped, and the next heartbeat carries the same values.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from bus import codec, threads
from bus.control.waker import Waker
from bus.counts import EdgeCounts
from bus.curve import Link, keys_for, secure_client, watch_link
from bus.fence import Fence
from bus.hosts import HostResolver, choose_family
from bus.sockets import MAX_IN_A_ROW, drop, drop_fenced, send_frames, waiting
from bus.topology import CLOSE_LINGER_MILLISECONDS, CONTROL_HWM, PLAIN, milliseconds, prepare
from schemas import limits
from schemas.config.services import BusConfig
from schemas.errors import ConfigError, DecodeError
from schemas.messages import Directive, Heartbeat, fingerprint
from schemas.messages.base import check_name

HEARTBEATS_PER_SECOND = 10.0
"""Heartbeats per second that a client sends at most, sustained."""
HEARTBEAT_BURST = 10.0
"""Heartbeats that a client may send at once after a pause."""


class ControlClient:
    """The actor's end of the control plane: sends heartbeats, receives directives.

    Args:
        address: address of the packer's control socket.
        heartbeat_type: message type of this actor's heartbeats.
        name: name of the actor.
        boot_id: id of this process, new at each start (P3: a peer is its name and boot id).
        on_directive: called with each admitted directive, in the client's thread; must return quickly.
        interval: seconds between two heartbeats.
        bus: keys and limits of the run's bus.

    Raises:
        ConfigError: the name or the keys can't be used.
    """

    def __init__(
        self,
        address: str,
        heartbeat_type: type[Heartbeat],
        name: str,
        boot_id: str,
        on_directive: Callable[[Directive], None],
        interval: float = 1.0,
        bus: BusConfig = PLAIN,
    ) -> None:
        self.counts = EdgeCounts("control")
        self._ring = keys_for(address, bus)
        self._heartbeat_type, self._name, self._boot_id = heartbeat_type, name, boot_id
        self._on_directive, self._interval = on_directive, interval
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        prepare(self._socket, CONTROL_HWM, None, limits.CONTROL_FRAME_BYTES)
        # before connecting: the ROUTER addresses directives by it
        self._socket.setsockopt(zmq.IDENTITY, identity_of(name, boot_id))
        self._waker = Waker()
        self._link = Link(self._waker.wake)
        if self._ring:  # before connecting: libzmq reports no refusal that happened before the monitor
            watch_link(self._socket, self._link, address, until_heard=True)
        self._resolver, self._endpoint = HostResolver(address, self._waker.wake), ""
        self._connect()
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {}
        self._urgent = self._stopping = False
        self._fence, self._sequence = Fence(), 0
        self.other_run = ""
        """Id of another run whose packer has answered since this run's packer was last heard; empty: none.

        P1: a process belongs to the run of its first directive."""
        self._tokens, self._last_heartbeat = HEARTBEAT_BURST, time.monotonic()
        self._last_heard = time.monotonic()
        self._thread = threads.make(f"control-{name}", self._loop)

    @property
    def num_refused(self) -> int:
        """Attempts to connect that were made after a refusal."""
        return self._link.attempt

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last admitted directive; before the first directive, since the client was made."""
        return time.monotonic() - self._last_heard

    @property
    def reported(self) -> Mapping[str, Any]:
        """Newest fields of the heartbeat, as reported so far."""
        with self._lock:
            return dict(self._fields)

    def start(self) -> None:
        """Start the thread that sends heartbeats. Every field of the heartbeat must have been reported before."""
        self._thread.start()

    def report(self, *, urgent: bool = True, **fields: Any) -> None:
        """Set fields of the next heartbeats. Thread-safe.

        Args:
            urgent: send a heartbeat as soon as the rate allows, if any field has changed. False: wait for the next
                heartbeat.
            fields: fields of the heartbeat; all other fields keep their values.
        """
        with self._lock:
            # by identity: values may be arrays, and an equal copy costs no more than one more heartbeat
            changed = any(self._fields.get(key) is not value for key, value in fields.items())
            self._fields.update(fields)
            if not (urgent and changed):
                return
            self._urgent = True
        self._waker.wake()

    def close(self) -> None:
        """Send a last heartbeat and stop the thread; waits 2 s at most. May be called again."""
        self._stopping = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join(2.0)
        elif not self._thread.ident:  # never started; a thread that has run closes its sockets itself
            self._close_sockets()

    def _connect(self) -> None:
        if self._ring:  # libzmq reads the keys when it connects
            secure_client(self._socket, self._ring, self._ring.current().server_publics, self._link.attempt)
        self._endpoint, self._connected_at = self._resolver.endpoint, time.monotonic()
        if self._endpoint:  # empty until the packer's name is resolved
            choose_family(self._socket, self._endpoint)
            self._socket.connect(self._endpoint)

    def _connect_again(self) -> None:
        """Connect again after a refusal, with the newest keys: the packer's or this actor's may have been rotated."""
        if self._endpoint:
            with contextlib.suppress(zmq.ZMQError):  # libzmq may have given the connection up already
                self._socket.disconnect(self._endpoint)
        self._connect()

    def _follow_name(self) -> None:
        """Resolve the packer's name again while no directive comes, and connect to the new address (P0: discovery)."""
        # each heartbeat is answered; two intervals leave room for a lost directive, and for a connection to be made
        if time.monotonic() - max(self._last_heard, self._connected_at) > 2 * self._interval:
            self._resolver.look()
        if self._resolver.endpoint != self._endpoint:
            self._connect_again()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.receiver, zmq.POLLIN)
        while not self._stopping:
            threads.mark("control.client")
            if self._link.wants_another_try():
                self._connect_again()
            self._follow_name()
            if self._seconds_to_next_heartbeat() <= 0.0:
                self._send_heartbeat()
            ready = dict(poller.poll(milliseconds(self._seconds_to_next_heartbeat())))
            if self._waker.receiver in ready:
                self._waker.clear()
            if self._socket in ready:
                self._read_directives()
        self._send_heartbeat()  # the last one: it carries the actor's final phase
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._resolver.close()
        # LINGER is 0 otherwise, and the last heartbeat would be dropped
        self._socket.close(linger=CLOSE_LINGER_MILLISECONDS)
        self._waker.close()

    def _seconds_to_next_heartbeat(self) -> float:
        due = self._last_heartbeat + self._interval - time.monotonic()
        if self._urgent:  # a token bucket: wait until one whole token is there
            due = min(due, (1.0 - self._refilled()) / HEARTBEATS_PER_SECOND)
        return max(0.0, due)

    def _refilled(self) -> float:
        return min(HEARTBEAT_BURST, self._tokens + (time.monotonic() - self._last_heartbeat) * HEARTBEATS_PER_SECOND)

    def _send_heartbeat(self) -> None:
        with self._lock:  # in one step: a report that comes after the copy makes the next heartbeat urgent
            fields, self._urgent = dict(self._fields), False
        # regular heartbeats take tokens too, but never wait for one
        self._tokens, self._last_heartbeat = max(0.0, self._refilled() - 1.0), time.monotonic()
        self._sequence += 1
        heartbeat = self._heartbeat_type(
            run=self._fence.run,
            term=self._fence.term,
            name=self._name,
            boot_id=self._boot_id,
            sequence=self._sequence,
            fingerprint=None if self._fence.run else fingerprint(),  # the packer checks it at the first contact
            **fields,
        )
        try:
            send_frames(self._socket, codec.encode(heartbeat))
        except zmq.Again:
            return  # the packer is away and the queue is full: the next heartbeat carries the same values

    def _read_directives(self) -> None:
        newest: Directive | None = None
        for frames in waiting(self._socket, MAX_IN_A_ROW):
            try:
                message = codec.decode(frames, limits.CONTROL_HEADER_BYTES)
            except DecodeError as error:
                drop(self.counts, error, "packer")
                continue
            self.counts.add(codec.num_bytes(frames))
            if isinstance(message, Directive) and self._admits(message):
                newest = message  # directives are absolute: older ones that wait before it are of no use
        if newest is not None:
            self._last_heard, self.other_run = time.monotonic(), ""
            self._link.refused = ""  # a refusal of an earlier attempt, told late
            self._on_directive(newest)

    def _admits(self, directive: Directive) -> bool:
        """Return whether a directive comes from this run's packer in its newest term (P1: run, P2: term).

        The first directive decides the run.
        """
        reason = self._fence.refuses(directive.run, directive.term)
        if reason:
            drop_fenced(self.counts, reason, directive, "packer")
            self.other_run = directive.run if reason == "foreign_run" else self.other_run
            return False
        if not self._fence.run:
            # a process that waits for its name gets it with its next heartbeat (P3: holder of a name)
            self._urgent = True
        self._fence.follow(directive.run, directive.term)
        return True


def identity_of(name: str, boot_id: str) -> bytes:
    """Return the ZeroMQ identity of a peer, `NAME/BOOT_ID` (P3: a peer is its name and boot id).

    Raises:
        ConfigError: the name is too long for an identity, or has forbidden characters.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(f"--name: {error}; use a shorter one: {name[:40]!a}") from error
    return f"{name}/{boot_id}".encode()
