"""A client of any server that speaks OpenAI's chat API, for what needs no weights of ours: a judge of completions.

A request that fails for a reason that may pass (no connection, too late, 408, 429, 5xx) is sent again, after a pause
that doubles; any other answer is an error at once. Every error names server, model and what to change.
"""

import asyncio
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
PASSING = (408, 409, 425, 429)
"""HTTP statuses below 500 that may be others the next time."""

Message = dict[str, Any]


class EndpointError(RuntimeError):
    """The server did not answer, however often it was asked."""


class EndpointRefusedError(ValueError):
    """The server does not want this request, or this key: to ask again would not help."""


@dataclass(frozen=True)
class Endpoint:
    """Where a model is served. As `kwargs` of a reward function: `{url: http://host:8000, model: NAME}`."""

    url: str
    """With or without /v1."""
    model: str
    api_key_env: str = ""
    """Environment variable that holds the key; none is sent where empty."""
    max_concurrent: int = 16
    """Requests under way at once, of one process."""
    timeout: float = 60.0
    """Seconds for one try."""
    retries: int = 3
    """Tries after the first one."""


class ChatClient:
    """One HTTP session to one endpoint. Use it from one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._url = f"{endpoint.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self._slots = asyncio.Semaphore(endpoint.max_concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def chat(self, messages: Sequence[Message], **settings: Any) -> str:
        """The text of an answer.

        Args:
            messages: of the chat so far.
            settings: further fields of the request (`temperature`, `max_tokens`, `seed`).

        Raises:
            EndpointError: no answer after all tries.
            EndpointRefusedError: the request or the key is not taken.
        """
        body = {"model": self._endpoint.model, "messages": list(messages)} | settings
        async with self._slots:
            answer = await self._persistently(body)
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"{self._who} answered no chat completion: {error!r}") from None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def _persistently(self, body: dict[str, Any]) -> Any:
        tries = self._endpoint.retries + 1
        for number in range(tries):
            try:
                return await self._ask(body)
            except EndpointError as error:
                if number + 1 == tries:
                    raise EndpointError(f"{error}; tried {tries} times (retries {self._endpoint.retries})") from None
            await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**number))
        raise AssertionError("the last try returns or raises")

    async def _ask(self, body: dict[str, Any]) -> Any:
        session = self._opened()
        try:
            async with session.post(self._url, json=body) as response:
                if response.status == 200:
                    return await response.json()
                words = f"{self._who}: HTTP {response.status}: {(await response.text())[:300]}"
        except TimeoutError:
            raise EndpointError(f"{self._who} did not answer within {self._endpoint.timeout:g} s (timeout)") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EndpointError(f"{self._who}: {type(error).__name__}: {error}") from None
        if response.status in (401, 403):
            raise EndpointRefusedError(f"{words} (api_key_env {self._endpoint.api_key_env or 'is not set'})")
        if response.status < 500 and response.status not in PASSING:
            raise EndpointRefusedError(words)
        raise EndpointError(words)

    def _opened(self) -> aiohttp.ClientSession:
        """The session, made on the event loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if (key := self._key()) else {},
                timeout=aiohttp.ClientTimeout(total=self._endpoint.timeout),
            )
        return self._session

    def _key(self) -> str:
        variable = self._endpoint.api_key_env
        if variable and not os.environ.get(variable):
            raise EndpointRefusedError(f"{self._who}: api_key_env: the environment has no {variable}")
        return os.environ[variable] if variable else ""

    @property
    def _who(self) -> str:
        return f"{self._endpoint.model} at {self._endpoint.url}"


@functools.cache
def client_of(endpoint: Endpoint) -> ChatClient:
    """The process's client of an endpoint, so that all calls of a reward function share its slots and connections."""
    return ChatClient(endpoint)
