"""Client for any server with OpenAI's chat API: for reward functions with another model, for example as a judge.

Requests that fail for a passing reason (no connection, timeout, 408, 409, 425, 429, 5xx) are sent again after a pause,
which doubles. Any other failure is an error at once. Errors name the server, the model and the key to change.
"""

import asyncio
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Pause before the first retry, and the limit of its doubling."""
PASSING = (408, 409, 425, 429)
"""HTTP statuses below 500 that may pass: the request is sent again."""

Message = dict[str, Any]


class EndpointError(RuntimeError):
    """The server has not answered any of the tries."""


class EndpointRefusedError(ValueError):
    """The server refuses the request or the key. A retry would not help."""


@dataclass(frozen=True)
class Endpoint:
    """Server of a model. As `kwargs` of a reward function: `{url: http://host:8000, model: NAME}`."""

    url: str
    """URL of the server, with or without /v1."""
    model: str
    api_key_env: str = ""
    """Environment variable with the API key. Empty: no key is sent."""
    max_concurrent: int = 16
    """Largest number of requests at the same time, per process."""
    timeout: float = 60.0
    """Time limit of each try, in seconds."""
    retries: int = 3
    """Number of tries after the first."""


class ChatClient:
    """Client of an endpoint, with its own connections. Use from a single event loop; waits when all slots are taken."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._url = f"{endpoint.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self._slots = asyncio.Semaphore(endpoint.max_concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def chat(self, messages: Sequence[Message], **settings: Any) -> str:
        """Return the text of the model's answer; empty if the answer has no text.

        Args:
            messages: messages of the chat so far, as `{"role": ..., "content": ...}`.
            settings: further fields of the request, such as `temperature`, `max_tokens`, `seed`.

        Raises:
            EndpointError: no answer after all tries, or an answer without a chat completion.
            EndpointRefusedError: the server refuses the request or the key.
        """
        body = {"model": self._endpoint.model, "messages": list(messages)} | settings
        tries = self._endpoint.retries + 1
        # a request keeps its slot through its pauses: a server in trouble gets fewer requests
        async with self._slots:
            for number in range(tries):
                try:
                    # EndpointRefusedError is not caught: a retry would not help
                    answer = await self._ask(body)
                    break
                except EndpointError as error:
                    if number + 1 == tries:
                        retries = self._endpoint.retries
                        raise EndpointError(f"{error}; tried {tries} times (retries {retries})") from None
                await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**number))
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"{self._who} answered no chat completion: {error!r}") from None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, body: dict[str, Any]) -> Any:
        # opened at the first request, not in the constructor: a session belongs to the running event loop
        if self._session is None:
            variable = self._endpoint.api_key_env
            key = os.environ.get(variable, "") if variable else ""
            if variable and not key:
                raise EndpointRefusedError(f"{self._who}: api_key_env: the environment has no {variable}")
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(total=self._endpoint.timeout),
            )
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status == 200:
                    return await response.json()
                words = f"{self._who}: HTTP {response.status}: {(await response.text())[:300]}"
        except TimeoutError:
            raise EndpointError(f"{self._who} did not answer within {self._endpoint.timeout:g} s (timeout)") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EndpointError(f"{self._who}: {type(error).__name__}: {error}") from None
        # the key's fault, so its variable is named
        if response.status in (401, 403):
            raise EndpointRefusedError(f"{words} (api_key_env {self._endpoint.api_key_env or 'is not set'})")
        if response.status < 500 and response.status not in PASSING:
            raise EndpointRefusedError(words)
        raise EndpointError(words)

    @property
    def _who(self) -> str:
        return f"{self._endpoint.model} at {self._endpoint.url}"


@functools.cache
def client_of(endpoint: Endpoint) -> ChatClient:
    """Return the process's client of an endpoint. All calls of a reward function share its slots and connections."""
    return ChatClient(endpoint)
