"""A door in front of an owned server: what changes weights, or the server itself, is for the actor that owns it.

vLLM's endpoints for developers are open to everybody who reaches its port, its own API key notwithstanding. A swap of
weights through them keeps the label by which answers are stamped, so nobody would ever see it; it is refused instead.
What samples stays open. Imports nothing but the standard library.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "GRPO_ACTORS_DOOR_KEY"
HEADER = "x-grpo-actors-key"
MIDDLEWARE = "grpo_actors_door.Door"
"""As `vllm serve --middleware` takes it."""
READS = frozenset({"GET", "HEAD", "OPTIONS"})
SAMPLES = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"}
)
"""Paths that anybody may post to: one that is not here is closed, also in a version of vLLM that has more of them."""

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Door:
    """ASGI middleware."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._key = app, os.environ[KEY_VARIABLE].encode()

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http" or is_open(scope["method"], scope["path"]) or self._is_owner(scope):
            await self._app(scope, receive, send)
            return
        words = f"{scope['method']} {scope['path']} is for the inference actor that owns this server"
        body = json.dumps({"error": {"message": words, "code": 401}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _is_owner(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(HEADER.encode(), b"")
        return hmac.compare_digest(given, self._key)


def is_open(method: str, path: str) -> bool:
    """Whether a request changes nothing but what it is answered."""
    return method in READS or path in SAMPLES
