"""HTTP session to an external server; every failure is one of two errors. For use from a single event loop."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from actors.engines.protocol import EngineStoppedError

CONNECT_SECONDS = 10.0
"""Seconds to connect."""

Json = dict[str, Any]


class RefusedError(ValueError):
    """Error for an answer other than HTTP 200, with the server's message."""

    def __init__(self, server: str, path: str, status: int, words: str) -> None:
        super().__init__(f"{server} answers {status} to {path}: {words}")
        self.status, self.words = status, words


class Upstream:
    """HTTP client of a server. Calls have no time limit: the caller gives up, or the engine finds the server gone.

    Args:
        name: name of the software, for errors.
        url: address of the server.
        headers: headers of every call.
    """

    def __init__(self, name: str, url: str, headers: Mapping[str, str]) -> None:
        self._name, self._url = name, url
        self.session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            # no limit: the server queues and batches requests, which aiohttp's own limit of 100 would hold back.
            # force_close: servers close connections without notice, when idle or after a failure; a call sent there
            # would be lost
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def call(
        self, method: str, path: str, body: Json | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Return the server's answer: parsed if the type is JSON, otherwise text.

        Raises:
            RefusedError: an HTTP status other than 200.
            EngineStoppedError: no connection, or a broken one.
        """
        try:
            async with self.session.request(method, self._url + path, json=body, headers=headers) as response:
                text = await response.text()
                if response.status != 200:
                    raise RefusedError(self._name, path.partition("?")[0], response.status, words_of(text))
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineStoppedError(f"{self._name} at {self._url}: {type(error).__name__}: {error}") from error
        return json.loads(text) if text and response.content_type == "application/json" else text

    async def close(self) -> None:
        """Close all connections."""
        await self.session.close()


def words_of(body: str) -> str:
    """Return the message in the body of an error, or the start of the body. Servers use several shapes."""
    try:
        content = json.loads(body)
        error = next(content[key] for key in ("error", "error_message", "message", "detail") if content.get(key))
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, AttributeError, KeyError, StopIteration):
        # another shape: the HTML page of a proxy, say
        return body[:300]
