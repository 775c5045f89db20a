"""HTTP server of an inference actor: opened as the configuration says, with the URL for other processes."""

from prometheus_client import CollectorRegistry

from actors.engines.http.access import api_key, server_tls
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import Engine
from schemas.config import RunConfig
from schemas.config.services import bracketed, is_wildcard, without_brackets
from schemas.errors import ConfigError


def listen(
    config: RunConfig, engine: Engine, boot_id: str, port: int, registry: CollectorRegistry
) -> tuple[CompletionServer, str]:
    """Open the HTTP server of an engine; return the server and its URL.

    Args:
        config: configuration of the run.
        engine: engine behind the server.
        boot_id: id of this process, which the server tells.
        port: HTTP port; 0: any free port.
        registry: metrics for /metrics.

    Raises:
        ConfigError: the HTTP address can't be bound, or key or certificate can't be used.
    """
    settings = config.inference
    try:
        server = CompletionServer(
            engine,
            config.model.path,
            boot_id,
            without_brackets(settings.host),
            port,
            settings.request_timeout,
            registry=registry,
            api_key=api_key(settings),
            tls=server_tls(settings),
            run_name=config.name,
        )
    except OSError as error:
        raise ConfigError(
            f"inference.host, inference.port: {settings.host}:{port} can't be bound: "
            f"{error.strerror}; port 0 takes any free one"
        ) from error
    host = settings.advertise_host or settings.host
    if not settings.advertise_host and is_wildcard(host):
        # no peer can connect to a wildcard, and without an advertised name all peers are on this machine
        host = "::1" if ":" in host else "127.0.0.1"
    scheme = "https" if settings.tls_cert else "http"
    return server, f"{scheme}://{bracketed(host)}:{server.port}"
