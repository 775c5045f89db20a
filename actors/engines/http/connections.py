"""Closing of idle connections to the completions server: after a while, and the oldest if there are too many.

aiohttp limits the time between two requests of a connection, but not the time until the first request is complete. A
client shows a key only with the first request, so connections before it are limited for every client.

An answer is sent after the handler has returned. A connection with a client still taking bytes of an answer is not
idle, however slowly the bytes go.
"""

import asyncio
import contextlib
import logging
import socket
import struct
import time
from asyncio import selector_events
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from schemas import limits

LOOK_SECONDS = 1.0
"""Seconds between two looks at the connections."""
READ_BYTES = 32 << 10
"""Bytes read from a connection at a time."""
_ACKNOWLEDGED_AT = 120
"""Byte offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""


class Connections:
    """Connections of a server. Sets READ_BYTES for all connections of the process."""

    def __init__(self) -> None:
        # asyncio has no option for it. aiohttp keeps what it has read of a head that never ends until its error is
        # answered, several reads for each connection, and asyncio reads 256 KiB at a time
        selector_events._SelectorSocketTransport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self._busy: dict[Any, int] = {}
        """Number of requests under way, by connection."""
        self._idle: dict[Any, tuple[float, int]] = {}
        """Start of each connection's idle time, and the bytes acknowledged by the client at the start."""

    @property
    def note(self) -> Any:
        """Middleware to record the connections with requests under way."""

        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            connection = request.protocol
            self._busy[connection] = self._busy.get(connection, 0) + 1
            try:
                return await handler(request)  # type: ignore[no-any-return]
            finally:
                self._busy[connection] -= 1
                if not self._busy[connection]:
                    del self._busy[connection]

        return note

    async def watch(self, server: web.Server, stop: asyncio.Event) -> None:
        """Close idle connections of a server every LOOK_SECONDS, until `stop` is set."""
        while not stop.is_set():
            self.close_idle(server.connections, time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_SECONDS)

    def close_idle(self, connections: Iterable[Any], now: float) -> None:
        """Close connections after too long an idle time, and the oldest idle connections if there are too many.

        The limits are `limits.HTTP_CONNECTION_SECONDS` and `limits.HTTP_CONNECTIONS`.

        Args:
            now: seconds on the monotonic clock.
        """
        idle: dict[Any, tuple[float, int]] = {}
        for connection in connections:
            if connection not in self._busy:
                acknowledged = _acknowledged(connection)
                since, then = self._idle.get(connection, (now, acknowledged))
                # a client that has taken bytes since the last look is idle from now on at the earliest
                idle[connection] = (since, then) if acknowledged == then else (now, acknowledged)
        self._idle = idle
        by_age = sorted(((since, connection) for connection, (since, _) in idle.items()), key=lambda item: item[0])
        too_many = len(by_age) - limits.HTTP_CONNECTIONS
        for number, (since, connection) in enumerate(by_age):
            # oldest first, so the first `too_many` are the ones to close
            if number < too_many or now - since > limits.HTTP_CONNECTION_SECONDS:
                if connection.transport is not None:
                    # `close` would wait for a client that does not read
                    connection.transport.abort()
                connection.force_close()


def quiet() -> logging.Logger:
    """Return a logger for aiohttp that leaves out requests that are no HTTP: a client could fill the log with them."""
    logger = logging.getLogger("aiohttp.server.quiet")
    # the same filter again changes nothing
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _acknowledged(connection: Any) -> int:
    """Return the bytes acknowledged by the client; 0 where the system does not tell.

    The kernel is asked because with TLS the transport does not show the bytes still to be sent.
    """
    if connection.transport is None or not hasattr(socket, "TCP_INFO"):
        return 0
    try:
        of_transport = connection.transport.get_extra_info("socket")
        info = of_transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED_AT + 8)
        return int(struct.unpack_from("=Q", info, _ACKNOWLEDGED_AT)[0])
    except (OSError, struct.error):
        return 0
