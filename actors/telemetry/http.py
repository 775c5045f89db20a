"""Server of /metrics: prometheus_client's application, with a limited number of threads and connections.

A connection without a request within HTTP_HEAD_SECONDS is closed. Above HTTP_METRICS_CONNECTIONS the oldest connection
is closed for the newest, so idle connections keep no other client out.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import WSGIApplication

from prometheus_client import CollectorRegistry, make_wsgi_app

from bus import threads
from schemas import limits
from schemas.config import RunConfig
from schemas.config.services import bracketed, is_wildcard, without_brackets
from schemas.errors import ConfigError


class _Handler(WSGIRequestHandler):
    timeout = limits.HTTP_HEAD_SECONDS
    """Time limit of each read; the server limits the life of a connection."""

    def log_message(self, *_: Any) -> None:
        """Keep requests out of the log."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a thread per connection, up to HTTP_METRICS_CONNECTIONS."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._open: dict[socket.socket, float] = {}
        """Start of each open connection, oldest first."""
        self._changing = threading.Lock()
        super().__init__(*arguments, **named)

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Make room for a connection, and serve it in a thread."""
        with self._changing:
            self._open[request] = time.monotonic()
        # before the thread of the new connection starts: the oldest connection makes room
        self._close_oldest(limits.HTTP_METRICS_CONNECTIONS)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that are too old. Called twice a second, since a slow client may never time out."""
        threads.mark("metrics")
        self._close_oldest(None)

    def _close_oldest(self, room: int | None) -> None:
        """Shut connections older than HTTP_CONNECTION_SECONDS, and the oldest if there are more than `room`."""
        late = time.monotonic() - limits.HTTP_CONNECTION_SECONDS
        with self._changing:
            too_many = 0 if room is None else len(self._open) - room
            for number, (request, since) in enumerate(list(self._open.items())):
                # the dict is in the order of arrival, so the first are the oldest
                if number < too_many or since < late:
                    del self._open[request]
                    with contextlib.suppress(OSError):
                        # the connection's own thread reads the end and closes the socket; closed here, the
                        # descriptor's number could be another connection's before that thread notices
                        request.shutdown(socket.SHUT_RDWR)


class _MetricsServer6(MetricsServer):
    address_family = socket.AF_INET6


def serve_metrics(port: int, host: str, registry: CollectorRegistry) -> MetricsServer:
    """Serve a registry at /metrics, in threads, until `shutdown` is called.

    Raises:
        OSError: the address can't be bound.
    """
    family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    kind = _MetricsServer6 if family == socket.AF_INET6 else MetricsServer
    server = make_server(host, port, make_wsgi_app(registry), kind, handler_class=_Handler)
    threads.start("metrics", server.serve_forever)
    return server


def serve_as_configured(
    config: RunConfig, registry: CollectorRegistry, wrap: Callable[[WSGIApplication], WSGIApplication]
) -> tuple[MetricsServer, str]:
    """Serve a registry at the configured address; return the server, and the URL for the heartbeat.

    Args:
        config: configuration of the run.
        registry: metrics to serve.
        wrap: function that adds further paths to the application.

    Raises:
        ConfigError: the address can't be bound.
    """
    host = without_brackets(config.telemetry.metrics_host)
    try:
        server = serve_metrics(config.telemetry.metrics_port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"telemetry.metrics_port: {host}:{config.telemetry.metrics_port} can't be bound: {error.strerror}; "
            "0 takes any free port (`actors up` gives its actors one port after the other, from the configured one on)"
        ) from error
    app = server.get_app()
    assert app is not None
    server.set_app(wrap(app))
    reached_at = (config.bus.advertise_host or socket.gethostname()) if is_wildcard(host) else host
    return server, f"http://{bracketed(reached_at)}:{server.server_port}/metrics"
