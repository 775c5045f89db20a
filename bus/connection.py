"""A tcp connection accepted by libzmq: bytes received, bytes of the unfinished message, and a way to reset it.

pyzmq shows no connections. The monitor of the bound socket gives the descriptor; the kernel (`TCP_INFO`, `FIONREAD`)
gives the number of bytes that libzmq has read. libzmq owns the descriptor and may close it at any moment, and the
kernel then gives the same number to another file. So each use compares both addresses first.
"""

import contextlib
import fcntl
import socket as sockets
import struct
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

LOOK_MILLISECONDS = 50
"""Milliseconds between two looks at the size of the process."""
JUST_BEGUN_BYTES = 64 << 10
"""Bytes of an unfinished message before its rate is measured: a new connection may send a greeting and then pause."""

_RECEIVED_AT = 128
"""Offset in bytes of `tcpi_bytes_received` (64 bits) in Linux's `struct tcp_info`."""


@dataclass
class Connection:
    """An accepted connection and its counts of bytes."""

    descriptor: int
    ends: tuple[object, object]
    """Local and remote address, read when the connection was accepted."""
    family: int = -1
    """Family of the addresses; −1: unknown, to be asked at each look."""
    received: int = 0
    """Bytes read by libzmq since the connection was accepted, as of the last look."""
    whole: int = 0
    """Value of `received` at the look after the last whole message."""
    began: float = field(default_factory=time.monotonic)
    """Earliest possible start (`time.monotonic`) of the unfinished message."""
    newest: int = 0
    """Place of the newest whole message, counted over the socket, as of the last look."""
    suspect_since: int | None = None
    """Messages delivered by the socket until this connection was found beyond a bound; None: within all bounds."""
    is_shut: bool = False

    @classmethod
    def accepted(cls, descriptor: int) -> "Connection":
        """Return the connection behind a descriptor from libzmq's monitor.

        Raises:
            OSError: the connection is closed already.
        """
        with _borrowed(descriptor) as borrowed:
            return cls(descriptor, _ends(borrowed), borrowed.family)

    @property
    def unfinished(self) -> int:
        """Bytes read by libzmq since the last whole message; 0 once the connection is shut."""
        return 0 if self.is_shut else self.received - self.whole

    def rate(self, now: float) -> float:
        """Return the mean rate of the unfinished message in bytes per second."""
        # one look is added: without it a connection that was just accepted would divide by almost 0
        return self.unfinished / (now - self.began + LOOK_MILLISECONDS / 1000)

    def look(self, port: int, *, whole: bool) -> int:
        """Ask the kernel for the bytes that libzmq has read, and return the number of new bytes since the last look.

        Bytes in the kernel's own buffer do not count. Linux grows this buffer up to `tcp_rmem`, often 32 MiB: a message
        with all its bytes there would look endless while libzmq's thread waits for a core.

        Args:
            port: local port of the bound socket; 0: unknown.
            whole: True if a whole message has come since the last look. The bytes after this message are unknown, so
                all bytes so far count as finished.
        """
        received: int | None = None
        with contextlib.suppress(OSError), _borrowed(self.descriptor, self.family) as borrowed:
            if self._is_behind(borrowed, port):
                info = borrowed.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _RECEIVED_AT + 8)
                # the buffer is asked second: bytes that come in between are subtracted, and count at the next look
                received = int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0]) - _num_buffered(borrowed)
        # closed, or the kernel has given the number to another connection
        if received is None:
            self.is_shut = True
            return 0
        received = max(received, self.received)
        arrived, self.received = received - self.received, received
        if whole:
            self.whole, self.suspect_since = received, None
        if self.unfinished <= JUST_BEGUN_BYTES:
            self.began = time.monotonic()
        return arrived

    def shut(self, port: int) -> None:
        """Reset the connection; libzmq then closes its end and frees the frames of the unfinished message."""
        self.is_shut = True
        with contextlib.suppress(OSError), _borrowed(self.descriptor, self.family) as borrowed:
            if self._is_behind(borrowed, port):
                # linger 0: on close, bytes on their way are answered by a reset instead of acknowledged for a minute
                borrowed.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
                # not close: the descriptor is libzmq's, which closes it when it reads the end of the stream
                borrowed.shutdown(sockets.SHUT_RDWR)

    def _is_behind(self, borrowed: sockets.socket, port: int) -> bool:
        """Return whether the descriptor still belongs to this connection and to the socket bound to `port`.

        The kernel reuses numbers of descriptors, also between libzmq's accept and the arrival of the monitor's event.
        """
        local, _ = ends = _ends(borrowed)
        return ends == self.ends and (not port or (isinstance(local, tuple) and local[1] == port))


@contextlib.contextmanager
def _borrowed(descriptor: int, family: int = -1) -> Iterator[sockets.socket]:
    """Yield a Python socket on libzmq's own descriptor. No copy is made: a process may have no descriptors left.

    Args:
        descriptor: the descriptor.
        family: family of the socket's addresses; −1: unknown. Each unknown property takes a call of the kernel.
    """
    connection = sockets.socket(family, sockets.SOCK_STREAM, sockets.IPPROTO_TCP, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()  # the descriptor stays open


def _num_buffered(connection: sockets.socket) -> int:
    """Return the number of bytes in the kernel's buffer, not yet read."""
    return int(struct.unpack("=i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0])


def _ends(connection: sockets.socket) -> tuple[object, object]:
    return connection.getsockname(), connection.getpeername()
