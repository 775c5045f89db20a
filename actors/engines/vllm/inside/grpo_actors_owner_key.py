"""Key of the owner in front of an owned server: only the owning actor may change the server or its weights.

vLLM's development endpoints are open to everybody who reaches the port, even with an API key set. A swap of weights
through these endpoints keeps the label on answers, so nobody would notice; the middleware refuses it. Sampling stays
open. Imports only the standard library.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "GRPO_ACTORS_OWNER_KEY"
HEADER = "x-grpo-actors-key"
MIDDLEWARE = "grpo_actors_owner_key.OwnerKeyMiddleware"
"""Value for `vllm serve --middleware`."""
READS = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing
SAMPLES = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"}
)
"""Paths open for POST. All other paths are closed, also new endpoints of a later vLLM."""

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class OwnerKeyMiddleware:
    """ASGI middleware: passes on open requests and requests with the owner's key."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._key = app, os.environ[KEY_VARIABLE].encode()

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] == "http" and not is_open(scope["method"], scope["path"]):
            given = dict(scope["headers"]).get(HEADER.encode(), b"")
            # in constant time: `!=` would tell how many bytes are right
            if not hmac.compare_digest(given, self._key):
                words = f"{scope['method']} {scope['path']} is for the inference actor that owns this server"
                body = json.dumps({"error": {"message": words, "code": 401}}).encode()
                headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": body})
                return
        await self._app(scope, receive, send)


def is_open(method: str, path: str) -> bool:
    """Return whether a request changes nothing in the server."""
    return method in READS or path in SAMPLES
