"""HTTP client of the completions API: sends token ids, receives token ids, logprobs and policies."""

import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from actors.engines.protocol import Completion
from actors.trajectories.forms import AnswerForm
from schemas.messages import EnginePeer, Ticket


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
            connector=aiohttp.TCPConnector(limit=max_connections, ssl=tls or True),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )

    async def sample(
        self,
        engine: EnginePeer,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Sequence[str] = (),
        form: AnswerForm | None = None,
    ) -> list[SampledCompletion]:
        """Return all completions of a ticket, sampled by one engine.

        Args:
            stop: further texts that end a completion.
            form: form that each completion must have.

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
            # the logprob of each sampled token, without alternatives; null would mean no logprobs
            "logprobs": 0,
            "return_token_ids": True,
            **ticket.sampling.model_dump(),
        }
        if stops := list(dict.fromkeys([*ticket.stop, *stop])):
            body["stop"] = stops
        if ticket.ignore_eos:
            body["ignore_eos"] = True
        if form is not None:
            body["answer_form"] = asdict(form)
        answer = await self._post(f"{engine.url}/v1/completions", body, engine.name)
        try:
            if answer["boot_id"] != engine.boot_id:
                raise EngineError(f"{engine.name} at {engine.url} has restarted since it was chosen")
            return [
                SampledCompletion(
                    token_ids=choice["token_ids"],
                    logprobs=choice["logprobs"]["token_logprobs"],
                    segments=[(start, lineage, version) for start, lineage, version in choice["segments"]],
                    finish_reason=choice["finish_reason"],
                    text=choice["text"],
                )
                for choice in answer["choices"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{engine.name} at {engine.url} answered no completions: {error!r}") from None

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _post(self, url: str, body: dict[str, Any], name: str) -> Any:
        try:
            async with self._session.post(url, json=body) as response:
                if response.status >= 500:
                    raise EngineError(f"{name} at {url}: HTTP {response.status}: {(await response.text())[:200]}")
                if response.status >= 400:
                    raise RequestRefusedError(
                        f"{name} at {url}: HTTP {response.status}: {(await response.text())[:300]}"
                    )
                return await response.json()
        except TimeoutError:
            raise EngineError(f"{name} at {url} did not answer in time (inference.request_timeout)") from None
        except (aiohttp.ClientError, ValueError) as error:
            # ValueError: the body is not JSON
            raise EngineError(f"{name} at {url}: {type(error).__name__}: {error}") from None
