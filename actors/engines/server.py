"""HTTP in front of an engine: the OpenAI completions API, with token ids and policies as vLLM-style extensions.

Runs an asyncio loop in a thread of its own. Consumes requests; answers when the engine has; a client that goes away
ends its request. A request that can't be served gets a 400 that says what to change.
"""

import asyncio
import contextlib
import threading
import time
import uuid
from concurrent.futures import Future
from typing import Any, Literal

import prometheus_client
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.engines.protocol import Completion, Engine, EngineStoppedError, RequestError, SampleRequest
from actors.faults import point

log = structlog.get_logger("engine.http")

MAX_REQUEST_BYTES = 64 << 20
SHUTDOWN_SECONDS = 0.2
"""For answers on their way when the server closes; an actor that drains closes it when there are none."""


class CompletionRequest(BaseModel):
    """`POST /v1/completions`. What is not listed is refused by name rather than ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    n: int = Field(1, ge=1)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    logprobs: Literal[0] | None = None
    """0: the sampled token's logprob; alternatives are not offered."""
    return_token_ids: bool = False
    stream: Literal[False] = False
    user: str | None = None


class CompletionServer:
    """Serves one engine until `close`; `registry` is what /metrics shows."""

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        boot_id: str,
        host: str,
        port: int,
        request_timeout: float,
        registry: CollectorRegistry = prometheus_client.REGISTRY,
    ) -> None:
        self._engine, self._model_name, self._boot_id = engine, model_name, boot_id
        self._request_timeout, self._registry = request_timeout, registry
        self._loop = asyncio.new_event_loop()
        self._ready: Future[int] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(host, port), name="http", daemon=True)
        self._thread.start()
        self.port = self._ready.result(30.0)

    def close(self) -> None:
        """Stop serving. May be called again."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5.0)

    def _run(self, host: str, port: int) -> None:
        try:
            self._loop.run_until_complete(self._serve(host, port))
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self, host: str, port: int) -> None:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            self._ready.set_result(int(runner.addresses[0][1]))
            await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        policy = self._engine.status().policy
        return web.json_response({"boot_id": self._boot_id, "policy": policy.model_dump() if policy else None})

    async def _metrics(self, request: web.Request) -> web.Response:
        body = prometheus_client.generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "grpo-actors"}
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.Response:
        asked = await self._parse(request)
        prompts = self._prompts(asked)
        futures: list[Future[list[Completion]]] = []
        try:
            for prompt in prompts:
                futures.append(self._submit(asked, prompt))
            point("inference.request")
            async with asyncio.timeout(self._request_timeout):
                groups = [await asyncio.wrap_future(future) for future in futures]
        except TimeoutError:
            raise _ProblemError(
                504, f"not finished within {self._request_timeout:g} s (inference.request_timeout)"
            ) from None
        finally:
            for future in futures:  # the client is gone or too late, or one prompt was refused: the engine drops it
                future.cancel()
        return web.json_response(self._answer(asked, prompts, groups))

    async def _parse(self, request: web.Request) -> CompletionRequest:
        try:
            asked = CompletionRequest.model_validate_json(await request.read())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = str(first["loc"][0]) if first["loc"] else "body"
            message = "must be a text, token ids, or a list of either" if where == "prompt" else first["msg"]
            raise _ProblemError(400, f"{where}: {message}") from None
        if asked.model != self._model_name:
            raise _ProblemError(404, f"model: {asked.model!r} is not served here, {self._model_name!r} is")
        return asked

    def _prompts(self, asked: CompletionRequest) -> list[list[int]]:
        prompt = asked.prompt
        if isinstance(prompt, str):
            return [self._engine.tokenize(prompt)]
        if all(isinstance(item, int) for item in prompt):
            return [list(prompt)]  # type: ignore[arg-type]
        return [self._engine.tokenize(item) if isinstance(item, str) else list(item) for item in prompt]  # type: ignore[arg-type]

    def _submit(self, asked: CompletionRequest, prompt_ids: list[int]) -> "Future[list[Completion]]":
        seed = asked.seed if asked.seed is not None else uuid.uuid4().int >> 80
        try:
            return self._engine.submit(
                SampleRequest(prompt_ids, asked.n, asked.max_tokens, asked.temperature, asked.top_p, seed)
            )
        except RequestError as error:
            raise _ProblemError(400, str(error)) from None

    def _answer(
        self, asked: CompletionRequest, prompts: list[list[int]], groups: list[list[Completion]]
    ) -> dict[str, Any]:
        completions = [completion for group in groups for completion in group]
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        completion_tokens = sum(len(completion.token_ids) for completion in completions)
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model_name,
            "boot_id": self._boot_id,
            "choices": [self._choice(index, completion, asked) for index, completion in enumerate(completions)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    def _choice(self, index: int, completion: Completion, asked: CompletionRequest) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": self._engine.detokenize(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "logprobs": None,
            "segments": completion.segments,
        }
        if asked.logprobs is not None:
            choice["logprobs"] = {
                "tokens": [f"token_id:{t}" for t in completion.token_ids],
                "token_logprobs": completion.logprobs,
                "top_logprobs": None,
                "text_offset": None,
            }
        if asked.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice


class _ProblemError(Exception):
    """A request that gets no completions."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every error in the shape that OpenAI's client reads."""
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except _ProblemError as error:
        status, message = error.status, str(error)
    except EngineStoppedError as error:
        status, message = 503, str(error)
    except web.HTTPException as error:
        status, message = error.status, error.reason
    except Exception as error:
        log.exception("request failed")
        status, message = 500, f"{type(error).__name__}: {error}"
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
