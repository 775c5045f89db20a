"""HTTP client of the completions API: sends token ids, receives token ids, logprobs and policies."""

import asyncio
import io
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from actors.engines.http import binary
from actors.engines.http import images as with_images
from actors.engines.protocol import Completion, PromptImage
from actors.trajectories.forms import AnswerForm
from bus.topology import KEEPALIVE_PROBES, KEEPALIVE_SECONDS
from schemas.messages import EnginePeer, Ticket

MAX_BYTES_AT_ONCE = 1 << 16
"""Largest answer that is read on the event loop. A larger one is read in a thread, so that other requests go on."""


class EngineError(Exception):
    """Failure of an engine to answer, or to answer correctly.

    The request may be repeated, there or at another engine.
    """


class RequestRefusedError(Exception):
    """Refusal of the request itself by an engine (HTTP 4xx): repeating the request would not help."""


@dataclass
class SampledCompletion(Completion):
    """Completion with text."""

    text: str = ""


class CompletionClient:
    """HTTP session to all engines. For use from a single event loop.

    Args:
        model_name: name of the model in requests.
        request_timeout: seconds for a whole request, `inference.request_timeout`.
        max_connections: limit of open connections, all engines together.
    """

    def __init__(
        self,
        model_name: str,
        request_timeout: float,
        max_connections: int,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._model_name = model_name
        self._session = aiohttp.ClientSession(
            # 10 seconds to connect: a machine that is gone must not take up the whole request_timeout
            timeout=aiohttp.ClientTimeout(total=request_timeout, connect=10.0),
            connector=aiohttp.TCPConnector(limit=max_connections, ssl=tls or True, socket_factory=_watched_socket),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )

    async def sample(
        self,
        engine: EnginePeer,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Sequence[str] = (),
        form: AnswerForm | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[SampledCompletion]:
        """Return all completions of a ticket, sampled by one engine.

        Args:
            stop: further texts that end a completion.
            form: form that each completion must have.
            images: images of the prompt in the order of their places.

        Raises:
            EngineError: connection, timeout, HTTP 5xx, an answer without completions, or an answer from another boot of
                the engine, with an unknown policy: P25 (a group states the policy of each segment as the engine did).
            RequestRefusedError: HTTP 4xx.
        """
        body = {
            "model": self._model_name,
            "prompt": prompt_ids,
            "n": ticket.num_completions,
            "max_tokens": ticket.max_tokens,
            "seed": ticket.seed,
            **ticket.sampling.model_dump(),
        }
        if stops := list(dict.fromkeys([*ticket.stop, *stop])):
            body["stop"] = stops
        if ticket.ignore_eos:
            body["ignore_eos"] = True
        if form is not None:
            body["answer_form"] = asdict(form)
        who = f"{engine.name} at {engine.url}"
        content: dict[str, Any] = {"json": body}
        if images:
            content = {
                "data": io.BytesIO(await asyncio.to_thread(with_images.encode, body, images)),
                "headers": {"Content-Type": with_images.CONTENT_TYPE},
            }
        answer = await self._post(f"{engine.url}/v1/completions", content, engine.name)
        try:
            if len(answer) > MAX_BYTES_AT_ONCE:
                boot_id, completions = await asyncio.to_thread(binary.decode, answer)
            else:
                boot_id, completions = binary.decode(answer)
        except ValueError as error:
            raise EngineError(f"{who} answered no completions: {error}") from None
        if boot_id != engine.boot_id:
            raise EngineError(f"{who} has restarted since it was chosen")
        return [
            SampledCompletion(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                segments=completion.segments,
                finish_reason=completion.finish_reason,
                routed_experts=completion.routed_experts,
                text=text,
            )
            for completion, text in completions
        ]

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _post(self, url: str, content: dict[str, Any], name: str) -> bytes:
        headers = {"Accept": binary.CONTENT_TYPE} | content.pop("headers", {})
        try:
            async with self._session.post(url, **content, headers=headers) as response:
                if response.status >= 500:
                    raise EngineError(f"{name} at {url}: HTTP {response.status}: {(await response.text())[:200]}")
                if response.status >= 400:
                    raise RequestRefusedError(
                        f"{name} at {url}: HTTP {response.status}: {(await response.text())[:300]}"
                    )
                if response.content_type != binary.CONTENT_TYPE:
                    raise EngineError(f"{name} at {url} answered {response.content_type}, not {binary.CONTENT_TYPE}")
                return await response.read()
        except TimeoutError:
            raise EngineError(f"{name} at {url} did not answer in time (inference.request_timeout)") from None
        except (aiohttp.ClientError, ValueError) as error:
            # ValueError: text of an error in no known encoding
            raise EngineError(f"{name} at {url}: {type(error).__name__}: {error}") from None


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a new socket that fails once its connection leads nowhere, as after a change of the engine's address.

    An answer may take minutes, so no timeout of the request would notice.
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        # for a request that was never acknowledged: the kernel sends no probes then
        unanswered = 1000 * KEEPALIVE_SECONDS * (1 + KEEPALIVE_PROBES)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unanswered)
    return made
