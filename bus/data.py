"""The data plane: an `Inbox` is a bound PULL, an `Outbox` a PUSH connected to one named peer.

One PUSH per peer and never one for many: PUSH does not say which of its peers took a message (DESIGN §2). A message is
lost here when its receiver dies with it; whoever sent it keeps it until the packer's State says that it is settled.
Order holds per pair of sockets and is relied on nowhere. An inbox never blocks its sender for long, because its owner
always reads (P13, P14); an outbox tells its owner at once when it is full.

On the wire a message has the sender's name in front, so that a bad frame can be logged with the peer that sent it.
Over tcp, with keys, an inbox makes a pair of its own, and its address names the public half.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import zmq

from bus import codec
from bus.counts import EdgeCounts
from bus.curve import Link, keys_for, lock, split_key, unlock, watch_link, with_key
from bus.keys import new_secret
from bus.sockets import drop, peer_of, receive_frames, send_frames
from bus.topology import Addresses, milliseconds, prepare
from schemas.config.services import BusConfig
from schemas.errors import DecodeError, RunFailedError
from schemas.messages import Message


class Inbox:
    """Receives typed messages. Use it from one thread."""

    def __init__(self, edge: str, addresses: Addresses, bus: BusConfig, actor: str, boot_id: str) -> None:
        self.counts = EdgeCounts(edge)
        address = addresses.to_bind(actor, boot_id)
        ring = keys_for(address, bus)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        prepare(self._socket, bus.high_water_mark, bus.socket_buffer_bytes, codec.MAX_FRAME_BYTES)
        public = lock(self._socket, ring, new_secret(), self.counts) if ring else b""
        self._socket.bind(address)
        bound: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.address = with_key(addresses.advertised(bound), public)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def receive(self, timeout: float) -> Message | None:
        """The next good message, or None after `timeout` seconds; bad frames are counted, logged and dropped."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                frames = receive_frames(self._socket)
            except zmq.Again:
                if not self._poller.poll(milliseconds(deadline - time.monotonic())):
                    return None
                continue
            try:
                message = codec.decode(frames[1:])
            except DecodeError as error:
                drop(self.counts, error, peer_of(frames[0]))
                if time.monotonic() >= deadline:
                    return None
                continue
            self.counts.add(codec.num_bytes(frames))
            return message

    def close(self) -> None:
        """Stop receiving; what is queued is dropped and will be sent again."""
        self._socket.close()


class Outbox:
    """Sends typed messages to one peer. Thread-safe."""

    def __init__(self, edge: str, address: str, bus: BusConfig, sender: str) -> None:
        self.counts = EdgeCounts(edge)
        self.address = address
        self._bus, self._sender = bus, sender.encode()
        self._ring = keys_for(address, bus)
        self._endpoint, self._server_keys = split_key(address, self._ring)
        self._link = Link()
        self._lock = threading.Lock()
        self._socket = self._connected()

    def try_send(self, message: Message) -> bool:
        """Hand the message to the socket if there is room; False when the peer or the queue is full.

        Raises:
            RunFailedError: an array of it is larger than a receiver takes.
        """
        frames = [self._sender, *codec.encode(message)]
        _check_sizes(frames, message)
        with self._lock:
            if self._link.wants_another_try():
                self._socket.close()  # nobody will ever take what it holds; it is sent again as from a dead peer
                self._socket = self._connected()
            try:
                send_frames(self._socket, frames)
            except zmq.Again:
                return False
        self.counts.add(codec.num_bytes(frames))
        return True

    def close(self) -> None:
        """Close the socket; what it still holds is dropped and will be sent again."""
        with self._lock:
            self._socket.close()

    def _connected(self) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        prepare(socket, self._bus.high_water_mark, self._bus.socket_buffer_bytes, codec.MAX_FRAME_BYTES)
        if self._ring:
            self._link = replace(self._link, refused="")  # what is still heard of a socket before is not of this one
            unlock(socket, self._ring, self._server_keys, self._link.attempt)
            watch_link(socket, self._link, self._endpoint, until_heard=False)
        socket.connect(self._endpoint)
        return socket


def _check_sizes(frames: Sequence[bytes | memoryview], message: Message) -> None:
    largest = max(map(len, frames))
    if largest > codec.MAX_FRAME_BYTES:
        raise RunFailedError(
            f"a {message.kind} has {largest} bytes in one array, and {codec.MAX_FRAME_BYTES} are the most that travel; "
            "lower packer.groups_per_step, rollout.group_size or rollout.max_tokens"
        )
