"""Who may use an engine's HTTP: a key that the environment holds, and TLS from two files.

The key goes as `Authorization: Bearer KEY`, as OpenAI's client sends it. Without TLS it can be read on the way.
"""

import hmac
import os
import ssl
from typing import TYPE_CHECKING, Any

from schemas.config.actors import InferenceConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

OPEN_PATHS = ("/health",)
"""For those who only ask whether the process lives."""


def secret(variable: str, key: str) -> str:
    """What an environment variable holds; empty where none is configured.

    Raises:
        ConfigError: the variable that `key` names is not set, or empty.
    """
    if variable and not os.environ.get(variable):
        raise ConfigError(f"{key}: the environment variable {variable} is not set, or empty")
    return os.environ[variable] if variable else ""


def api_key(config: InferenceConfig) -> str:
    """The key that requests carry; empty where none is asked for.

    Raises:
        ConfigError: the variable that shall hold it does not.
    """
    return secret(config.api_key_env, "inference.api_key_env")


def server_tls(config: InferenceConfig) -> ssl.SSLContext | None:
    """What the server shows; None: it speaks plain HTTP.

    Raises:
        ConfigError: certificate and key can't be used.
    """
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"inference.tls_cert, inference.tls_key: can't be used: {error}") from None
    return context


def client_tls(config: InferenceConfig) -> ssl.SSLContext | None:
    """What a client trusts: this certificate, or one signed by it, under the name that it was made for.

    Raises:
        ConfigError: the certificate can't be used.
    """
    if not config.tls_cert:
        return None
    try:
        return ssl.create_default_context(cafile=config.tls_cert)
    except OSError as error:
        raise ConfigError(f"inference.tls_cert: {config.tls_cert} can't be used: {error}") from None


def only_with(key: str) -> Any:
    """A middleware that answers 401 to requests without the key."""
    from aiohttp import web  # here: whoever only checks a configuration needs none of it

    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check(request: "web.Request", handler: Any) -> "web.StreamResponse":
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if key and request.path not in OPEN_PATHS and not hmac.compare_digest(given, expected):
            raise web.HTTPUnauthorized(reason="Authorization: Bearer KEY is missing or wrong (inference.api_key_env)")
        return await handler(request)  # type: ignore[no-any-return]

    return check
