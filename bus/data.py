"""The data plane: an `Inbox` is a bound PULL socket, an `Outbox` a PUSH socket connected to a named peer.

A message is lost if the receiver dies; the sender keeps a copy until the packer's directive settles the group (P13:
senders keep a group until its release). Order holds per pair of sockets; no code relies on order. Inboxes are always
read, and so never block senders for long; a full outbox says so at once. Each peer has a PUSH of its own, since a PUSH
with several peers does not tell which of them took a message. Frame 0 is the sender's name, for log lines about bad
frames. With keys, an inbox over tcp makes its own key pair, and the public half is part of its address.
"""

import threading
import time
from dataclasses import replace

import zmq

from bus import codec
from bus.connection import LOOK_MILLISECONDS
from bus.counts import EdgeCounts
from bus.encryption import Link, keys_for, secure_client, secure_server, split_key, watch_link, with_key
from bus.gate import Gate
from bus.hosts import choose_family
from bus.keys import new_secret
from bus.sockets import drop, drop_fenced, peer_of, receive_frames, send_frames
from bus.topology import Addresses, milliseconds, prepare
from bus.unfinished import guard, port_of
from schemas import limits
from schemas.config.services import BusConfig
from schemas.errors import ConfigError, DecodeError
from schemas.messages import Message


class Inbox:
    """Receives typed messages on a bound socket. Not thread-safe.

    Args:
        edge: name of the edge, for counters.
        addresses: makes the address to bind.
        bus: keys and limits of the run's bus.
        actor: name of this actor.
        boot_id: id of this process.

    Raises:
        ConfigError: no address can be bound, or the keys can't be used.
    """

    def __init__(self, edge: str, addresses: Addresses, bus: BusConfig, actor: str, boot_id: str) -> None:
        self.counts = EdgeCounts(edge)
        address = addresses.to_bind(actor, boot_id)
        ring = keys_for(address, bus)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        prepare(self._socket, bus.high_water_mark, bus.socket_buffer_bytes, limits.DATA_FRAME_BYTES)
        self._gate = Gate(self.counts, limits.DATA_UNFINISHED_BYTES, limits.DATA_UNFINISHED_TOTAL_BYTES)
        # keys and watch before bind: a connection could be accepted without them
        public = secure_server(self._socket, ring, new_secret(), self.counts, self._gate) if ring else b""
        guard(self._socket, self._gate, address, keys=bool(ring))
        try:
            bound = addresses.bind(self._socket, address)
        except ConfigError:
            self._socket.close()
            raise
        self._gate.port = port_of(bound)
        self.address = with_key(addresses.advertised(bound), public)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def receive(self, timeout: float) -> Message | None:
        """Return the next valid message; None after `timeout` seconds. Bad frames are counted, logged and dropped."""
        received = self.receive_with_frames(timeout)
        return received and received[0]

    def receive_with_frames(self, timeout: float) -> tuple[Message, list[zmq.Frame]] | None:
        """Return the next valid message, as `receive` does, and its frames."""
        deadline = time.monotonic() + timeout
        while True:
            sweep = self._gate.sweep
            try:
                frames = receive_frames(self._socket)
            except zmq.Again:
                # bytes that had come by that sweep belong to messages that are not whole
                self._gate.empty(sweep)
                left = milliseconds(deadline - time.monotonic())
                if not self._poller.poll(min(left, LOOK_MILLISECONDS)) and time.monotonic() >= deadline:
                    return None
                continue
            self._gate.took(frames[-1])
            try:
                message = codec.decode(frames[1:])
            except DecodeError as error:
                drop(self.counts, error, peer_of(frames[0]))
                if time.monotonic() >= deadline:  # a flood of bad frames must not keep the caller here
                    return None
                continue
            self.counts.add(codec.num_bytes(frames))
            return message, frames[1:]

    def drop(self, message: Message, reason: str) -> None:
        """Count a received message that is not for this process, with a log line at most every few seconds.

        Args:
            message: the message from `receive`.
            reason: label of the counter: `foreign_run` or `old_term`.
        """
        drop_fenced(self.counts, reason, message, str(getattr(message, "sender", "packer")))

    def refuse(self, error: DecodeError) -> None:
        """Count and log messages that together are none."""
        drop(self.counts, error, "packer")

    def close(self) -> None:
        """Stop receiving. Queued messages are dropped; their senders keep copies and send again."""
        self._socket.close()


class Outbox:
    """Sends typed messages to a peer. Thread-safe.

    Args:
        edge: name of the edge, for counters.
        address: address from the peer's heartbeats, `tcp://HOST:PORT#PUBLIC_KEY` with keys.
        bus: keys and limits of the run's bus.
        sender: name of this actor.

    Raises:
        ConfigError: the address is malformed, names no key where keys are needed, or is beyond loopback without keys.
    """

    def __init__(self, edge: str, address: str, bus: BusConfig, sender: str) -> None:
        self.counts = EdgeCounts(edge)
        self.address = address
        self._bus, self._sender = bus, sender.encode()
        self._ring = keys_for(address, bus)
        self._endpoint, self._server_keys = split_key(address, self._ring)
        self._link = Link()
        self._lock = threading.Lock()
        self._socket = self._connected()

    @property
    def has_room(self) -> bool:
        """True while the peer is connected and the queue is not full."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    @property
    def num_refused(self) -> int:
        """Attempts to connect that were made after a refusal."""
        return self._link.attempt

    def try_send(self, message: Message) -> bool:
        """Hand a message to the socket. Return False if the peer is not connected or has no room. Never blocks.

        True is no promise of arrival: the peer may die with the message.

        Raises:
            MessageTooLargeError: the message is beyond a bound of the receivers.
        """
        with self._lock:
            if self._link.wants_another_try():
                # a refused connection never delivers: messages in the old socket are lost, and sent again like those of
                # a dead peer
                self._socket.close()
                self._socket = self._connected()
            if not self.has_room:
                return False  # asked before encoding, which costs more than the question
        # outside of the lock: encoding a large group takes milliseconds
        frames = [self._sender, *codec.encode(message)]
        with self._lock:
            try:
                send_frames(self._socket, frames)
            except zmq.Again:  # another thread has taken the room, or the connection has ended meanwhile
                return False
        self.counts.add(codec.num_bytes(frames))
        return True

    def close(self) -> None:
        """Close the socket. Messages still in the socket are dropped; their owner keeps copies and sends them again."""
        with self._lock:
            self._socket.close()

    def _connected(self) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        prepare(socket, self._bus.high_water_mark, self._bus.socket_buffer_bytes, limits.DATA_FRAME_BYTES)
        # queue for established connections only: otherwise a peer that can't be reached would take messages, look idle
        # and be sent more. The price: queued messages are dropped when the connection ends, and are sent again like
        # those of a dead peer
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            if self._ring:
                # a new link per socket: the monitor of the old socket may still report a refusal to the old link
                self._link = replace(self._link, refused="")
                secure_client(socket, self._ring, self._server_keys, self._link.attempt)
                watch_link(socket, self._link, self._endpoint, until_heard=False)
            choose_family(socket, self._endpoint, self._bus.host)
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:  # the address came from a peer, and may be anything
            socket.close()
            raise ConfigError(f"address {self.address!r} can't be connected to: {error.strerror}") from error
        return socket
