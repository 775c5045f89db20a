"""A transport that loses messages of the control plane at random, for tests of runs and of the bus.

`DroppingTransport.replace_sending` puts the transport between both ends of the control plane and their sockets. A lost
message never reaches its socket; all other messages leave as without the transport.
"""

import random
import threading
from collections import Counter
from collections.abc import Sequence

import msgpack
import pytest
import zmq

from bus.sockets import send_frames


class DroppingTransport:
    """Sender of frames that loses each message with the same probability.

    Args:
        share: probability from 0 to 1 that a message is lost.
        seed: seed of the choice.
    """

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._random = share, random.Random(seed)
        self._lock = threading.Lock()
        self.sent: Counter[str] = Counter()
        """Messages given to a socket, by kind."""
        self.lost: Counter[str] = Counter()
        """Messages lost on purpose, by kind."""

    def replace_sending(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let all control sockets of this process send through this transport until the test ends."""
        for module in ("connection", "server"):
            monkeypatch.setattr(f"bus.control.{module}.send_frames", self.send)

    def send(self, socket: "zmq.Socket[bytes]", frames: Sequence[bytes | memoryview]) -> None:
        """Send a message or lose it; raise as `bus.sockets.send_frames` does."""
        # a ROUTER's first frame is the identity of the receiver
        kind = msgpack.unpackb(frames[socket.type == zmq.ROUTER])[0]
        with self._lock:  # actors of a ring send from their own threads
            if self._random.random() < self._share:
                self.lost[kind] += 1
                return
        send_frames(socket, frames)
        with self._lock:
            self.sent[kind] += 1
