"""Access to an engine's HTTP server: an API key from the environment, and TLS from two files.

Requests carry the key as `Authorization: Bearer KEY`, as OpenAI's client sends it. Without TLS anybody on the network
path can read the key.
"""

import hmac
import os
import ssl
from typing import TYPE_CHECKING, Any

from schemas.config.actors import SessionsConfig
from schemas.config.inference import InferenceConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

OPEN_PATHS = ("/health",)
"""Paths open without a key, for probes that only check whether the process lives."""


def secret(variable: str, key: str) -> str:
    """Return the value of an environment variable; empty if `variable` is empty.

    Args:
        key: configuration key with the variable's name, for the error.

    Raises:
        ConfigError: the variable is not set, or empty.
    """
    if variable and not os.environ.get(variable):
        raise ConfigError(f"{key}: the environment variable {variable} is not set, or empty")
    return os.environ[variable] if variable else ""


def api_key(config: InferenceConfig) -> str:
    """Return the API key for requests; empty if requests need no key.

    Raises:
        ConfigError: the variable named by `inference.api_key_env` is not set, or empty.
    """
    return secret(config.api_key_env, "inference.api_key_env")


def server_tls(config: InferenceConfig | SessionsConfig, section: str = "inference") -> ssl.SSLContext | None:
    """Return a server's certificate and key; None for plain HTTP.

    Args:
        config: section with `tls_cert` and `tls_key`.
        section: its name, for the error.

    Raises:
        ConfigError: certificate and key can't be used.
    """
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:
        # ssl.SSLError is a subclass
        raise ConfigError(f"{section}.tls_cert, {section}.tls_key: can't be used: {error}") from None
    return context


def client_tls(config: InferenceConfig) -> ssl.SSLContext | None:
    """Return the client's side of TLS; None without TLS.

    A client trusts this certificate, or a certificate signed by it, under the host name for which it was made.
    """
    if not config.tls_cert:
        return None
    try:
        return ssl.create_default_context(cafile=config.tls_cert)
    except OSError as error:
        raise ConfigError(f"inference.tls_cert: {config.tls_cert} can't be used: {error}") from None


def only_with(key: str) -> Any:
    """Return a middleware to answer 401 to requests without the key. An empty key lets all requests pass."""
    from aiohttp import web  # imported here: checks of a configuration run without aiohttp

    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check(request: "web.Request", handler: Any) -> "web.StreamResponse":
        # a header may hold any bytes, and must be refused as wrong, not fail with 500
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        # in constant time: `!=` would tell how many characters are right
        if key and request.path not in OPEN_PATHS and not hmac.compare_digest(given, expected):
            raise web.HTTPUnauthorized(reason="Authorization: Bearer KEY is missing or wrong (inference.api_key_env)")
        return await handler(request)  # type: ignore[no-any-return]

    return check
