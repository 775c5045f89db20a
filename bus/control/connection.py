"""Connection of an actor to the packer's control socket: keys, the packer's name, new attempts after refusals."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import zmq

from bus.control.waker import Waker
from bus.counts import EdgeCounts
from bus.encryption import Link, keys_for, secure_client, watch_link
from bus.hosts import HostResolver, choose_family, own_address
from bus.sockets import MAX_IN_A_ROW, send_frames, waiting
from bus.topology import CLOSE_LINGER_MILLISECONDS, CONTROL_HWM, milliseconds, prepare
from schemas import limits
from schemas.config.services import BusConfig


class PackerConnection:
    """DEALER connected to the packer. For a single thread, but for `wake` and `num_refused`.

    Args:
        address: address of the packer's control socket.
        identity: ZeroMQ identity of this process.
        bus: keys and limits of the run's bus.

    Raises:
        ConfigError: the keys can't be used.
    """

    def __init__(self, address: str, identity: bytes, bus: BusConfig) -> None:
        self.counts = EdgeCounts("control")
        self._ring = keys_for(address, bus)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        prepare(self._socket, CONTROL_HWM, None, limits.CONTROL_FRAME_BYTES)
        # before connecting: the ROUTER addresses directives by it
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._waker = Waker()
        self._link = Link(self._waker.wake)
        if self._ring:
            # before connecting: libzmq reports no refusal that happened before the monitor
            watch_link(self._socket, self._link, address, until_heard=True)
        self._resolver, self._endpoint = HostResolver(address, self._waker.wake), ""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker.receiver, zmq.POLLIN)
        self._connect()

    @property
    def num_refused(self) -> int:
        """Attempts to connect that were made after a refusal."""
        return self._link.attempt

    @property
    def way(self) -> tuple[str, str]:
        """Addresses of the packer and of this machine on the way to it; empty if unknown."""
        return self._endpoint, own_address(self._endpoint)

    def wake(self) -> None:
        """End a wait. Thread-safe."""
        self._waker.wake()

    def renew(self, last_heard: float, patience: float) -> None:
        """Connect again after a refusal, or if the packer's name has another address now (P0: discovery).

        Args:
            last_heard: monotonic time at which the packer was heard last.
            patience: seconds of silence after which the name is resolved again.
        """
        if self._link.wants_another_try():
            self._connect_again()
        # a new connection has this time too, before it counts as silent
        if time.monotonic() - max(last_heard, self._connected_at) > patience:
            self._resolver.look()
        if self._resolver.endpoint != self._endpoint:
            self._connect_again()

    def wait(self, seconds: float) -> bool:
        """Wait for a message or `wake`; return whether a message is there."""
        ready = dict(self._poller.poll(milliseconds(seconds)))
        if self._waker.receiver in ready:
            self._waker.clear()
        return self._socket in ready

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message; drop the message if the packer is away and the queue is full."""
        # nothing is lost: the next heartbeat carries the same values
        with contextlib.suppress(zmq.Again):
            send_frames(self._socket, frames)

    def received(self) -> Iterator[list[zmq.Frame]]:
        """Yield the frames of each message that is there, MAX_IN_A_ROW messages at most."""
        yield from waiting(self._socket, MAX_IN_A_ROW)

    def accepted(self) -> None:
        """Note that the packer has answered: a refusal of an earlier attempt, told late, no longer counts."""
        # otherwise the next turn would cut the connection that has just proved good
        self._link.refused = ""

    def close(self) -> None:
        """Close the sockets once the messages under way have left."""
        self._resolver.close()
        # LINGER is 0 otherwise, and the last heartbeat would be dropped
        self._socket.close(linger=CLOSE_LINGER_MILLISECONDS)
        self._waker.close()

    def _connect_again(self) -> None:
        """Connect with the newest keys: the packer's or this actor's may have been rotated."""
        if self._endpoint:
            with contextlib.suppress(zmq.ZMQError):  # libzmq may have given the connection up already
                self._socket.disconnect(self._endpoint)
        self._connect()

    def _connect(self) -> None:
        if self._ring:
            # again at each connection: libzmq reads the keys when it connects, and they may have been rotated
            secure_client(self._socket, self._ring, self._ring.current().server_publics, self._link.attempt)
        self._endpoint, self._connected_at = self._resolver.endpoint, time.monotonic()
        if self._endpoint:  # empty until the packer's name is resolved
            choose_family(self._socket, self._endpoint)
            self._socket.connect(self._endpoint)
