"""Wakes a thread that polls sockets: another thread calls `wake`, and the poll ends."""

import itertools
import threading

import zmq

_NUMBERS = itertools.count()


class Waker:
    """Pair of inproc sockets. The polling thread registers `receiver`."""

    def __init__(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.receiver: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._sender: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        address = f"inproc://waker-{next(_NUMBERS)}"
        self.receiver.bind(address)
        self._sender.connect(address)
        self._lock = threading.Lock()
        self._is_set = False

    def wake(self) -> None:
        """End the poll of the other thread, or its next poll. Thread-safe."""
        with self._lock:  # sockets are not thread-safe
            # at most one message is under way, so that `send` never blocks at the high-water mark
            if not self._is_set and not self._sender.closed:
                self._is_set = True
                self._sender.send(b"")

    def clear(self) -> None:
        """Forget all calls of `wake` so far. For the polling thread."""
        with self._lock:
            while self.receiver.poll(0):
                self.receiver.recv()
            self._is_set = False

    def close(self) -> None:
        """Close both sockets. Later calls of `wake` do nothing."""
        with self._lock:  # another thread may be calling `wake`
            self._sender.close(0)
            self.receiver.close(0)
