"""The data plane: an `Inbox` is a bound PULL, an `Outbox` a PUSH connected to one named peer.

One PUSH per peer and never one for many: PUSH does not say which of its peers took a message (DESIGN §2). A message is
lost here when its receiver dies with it; whoever sent it keeps it until the packer's State says that it is settled.
Order holds per pair of sockets and is relied on nowhere. An inbox never blocks its sender for long, because its owner
always reads (P13, P14); an outbox tells its owner at once when it is full.

On the wire a message has the sender's name in front, so that a bad frame can be logged with the peer that sent it.
"""

import threading
import time

import zmq

from bus import codec
from bus.counts import EdgeCounts
from bus.sockets import drop, peer_of, receive_frames, send_frames
from bus.topology import Addresses, milliseconds, prepare
from schemas.config.services import BusConfig
from schemas.errors import DecodeError
from schemas.messages import Message


class Inbox:
    """Receives typed messages. Use it from one thread."""

    def __init__(self, edge: str, addresses: Addresses, bus: BusConfig, actor: str, boot_id: str) -> None:
        self.counts = EdgeCounts(edge)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        prepare(self._socket, bus.high_water_mark, bus.socket_buffer_bytes, codec.MAX_MESSAGE_BYTES)
        self._socket.bind(addresses.to_bind(actor, boot_id))
        bound: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.address = addresses.advertised(bound)
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
        self._sender = sender.encode()
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        prepare(self._socket, bus.high_water_mark, bus.socket_buffer_bytes, codec.MAX_MESSAGE_BYTES)
        self._socket.connect(address)

    def try_send(self, message: Message) -> bool:
        """Hand the message to the socket if there is room; False when the peer or the queue is full."""
        frames = [self._sender, *codec.encode(message)]
        with self._lock:
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
