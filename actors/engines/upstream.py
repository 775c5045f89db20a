"""A server of others over HTTP: one session, and every failure as one of two errors. Use it from one event loop."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from actors.engines.protocol import EngineStoppedError

CONNECT_SECONDS = 10.0

Json = dict[str, Any]


class RefusedError(ValueError):
    """An answer other than 200, in the server's words."""

    def __init__(self, server: str, path: str, status: int, words: str) -> None:
        super().__init__(f"{server} answers {status} to {path}: {words}")
        self.status, self.words = status, words


class Upstream:
    """See the module. No call has an end of its own: whoever waits gives up, or the engine finds the server gone.

    Args:
        name: of the software, for errors.
        url: of the server.
        headers: of every call.
    """

    def __init__(self, name: str, url: str, headers: Mapping[str, str]) -> None:
        self._name, self._url = name, url
        self.session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            # servers hang up without a word, when idle or behind a failure; a call on that connection would be lost
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def call(
        self, method: str, path: str, body: Json | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """What the server answers: JSON where it says so, else text.

        Raises:
            RefusedError: another status than 200.
            EngineStoppedError: no connection, or it broke.
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
    """What an error's body says; servers have several shapes of it."""
    try:
        content = json.loads(body)
        error = next(content[key] for key in ("error", "error_message", "message", "detail") if content.get(key))
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, AttributeError, KeyError, StopIteration):
        return body[:300]
