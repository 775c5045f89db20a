"""HTTP in front of an engine: OpenAI's completions and chat completions, as vLLM extends them.

Runs an asyncio loop in a thread of its own. Consumes requests; answers when the engine has, or with each token
(`stream`); a client that goes away ends its request. A request that can't be served gets a 4xx that says what to
change. What may be asked for is in `requests`, what is answered in `answers`.
"""

import asyncio
import contextlib
import functools
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import prometheus_client
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from actors.engines.access import only_with
from actors.engines.answers import Answer, ChatAnswer, TextAnswer
from actors.engines.protocol import Completion, Engine, EngineStoppedError, RequestError
from actors.engines.requests import ChatRequest, CompletionRequest, Request, Sampling, parse
from actors.faults import point
from schemas.messages import Prompt

log = structlog.get_logger("engine.http")

MAX_REQUEST_BYTES = 64 << 20
SHUTDOWN_SECONDS = 0.2
"""For answers on their way when the server closes; an actor that drains closes it when there are none."""

OnPiece = Callable[[int, int, Completion], None]


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
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._engine, self._model_name, self._boot_id = engine, model_name, boot_id
        self._token_text = functools.cache(engine.token_text)
        self._request_timeout, self._registry = request_timeout, registry
        self._api_key, self._tls = api_key, tls
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
        guards = [_errors_as_json, only_with(self._api_key)]
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=guards)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=self._tls).start()
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

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, CompletionRequest, TextAnswer)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, ChatRequest, ChatAnswer)

    async def _respond(
        self, http: web.Request, kind: type[Request], make_answer: type[Answer[Request]]
    ) -> web.StreamResponse:
        asked = parse(kind, await http.read())
        if asked.model != self._model_name:
            raise _ProblemError(404, f"model: {asked.model!r} is not served here, {self._model_name!r} is")
        prompts = [await self._token_ids(prompt) for prompt in asked.prompts]
        answer = make_answer(asked, prompts, self._boot_id, self._engine.detokenize, self._token_text)
        if asked.stream:
            return await self._stream(http, asked, prompts, answer)
        with self._submitted(asked, prompts) as futures:
            async with self._in_time():
                groups = [await asyncio.wrap_future(future) for future in futures]
        return web.json_response(answer.whole([completion for group in groups for completion in group]))

    async def _token_ids(self, prompt: Prompt | list[int]) -> list[int]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], dict)):
            # in a thread, since the first chat loads the template, and a long text takes long
            return await asyncio.to_thread(self._engine.tokenize, prompt)
        return prompt  # type: ignore[return-value]

    @contextlib.contextmanager
    def _submitted(
        self, asked: Sampling, prompts: list[list[int]], on_piece: "OnPiece | None" = None
    ) -> Iterator[list["Future[list[Completion]]"]]:
        """Futures of all prompts; what still runs when the client is gone or one prompt is refused, is dropped."""
        futures: list[Future[list[Completion]]] = []
        try:
            for number, prompt in enumerate(prompts):
                listener = on_piece and functools.partial(on_piece, number * asked.n)
                futures.append(self._engine.submit(asked.sample_request(prompt, listener)))
            point("inference.request")
            yield futures
        finally:
            for future in futures:
                future.cancel()

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._request_timeout):
                yield
        except TimeoutError:
            raise _ProblemError(
                504, f"not finished within {self._request_timeout:g} s (inference.request_timeout)"
            ) from None

    async def _stream(
        self, http: web.Request, asked: Request, prompts: list[list[int]], answer: Answer[Request]
    ) -> web.StreamResponse:
        """Server-sent events, a chunk per token. A problem after the first byte becomes an event of its own."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        pieces = _Pieces()
        with self._submitted(asked, prompts, pieces.put) as futures:
            pieces.end_with(futures)
            await response.prepare(http)
            try:
                async with self._in_time():
                    async for index, piece in pieces:
                        await response.write(b"".join(map(_event, answer.chunks(index, piece))))
                if asked.include_usage:
                    await response.write(_event(answer.last_chunk()))
            except ConnectionError:  # the client has gone between two tokens
                return response
            except Exception as error:  # noqa: BLE001 - told to the client, and logged where it is new
                await response.write(_event(_problem(error)[1]))
            await response.write(b"data: [DONE]\n\n")
        return response


class _Pieces:
    """Pieces on their way from the engine's threads to the event loop; none is lost and each choice keeps its order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Completion] | Future[list[Completion]]] = asyncio.Queue()
        self._num_running = 0

    def put(self, first: int, number: int, piece: Completion) -> None:
        """From any thread: a piece of completion `number` of the prompt whose choices begin at `first`."""
        self._put((first + number, piece))

    def end_with(self, futures: list["Future[list[Completion]]"]) -> None:
        """End when these are done, since an engine tells all pieces of a request before its end."""
        self._num_running = len(futures)
        for future in futures:
            future.add_done_callback(self._put)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Completion]]:
        """Index of the choice and piece; raises what a request has failed with."""
        while self._num_running:
            item = await self._queue.get()
            if isinstance(item, Future):
                item.result()
                self._num_running -= 1
            else:
                yield item

    def _put(self, item: "tuple[int, Completion] | Future[list[Completion]]") -> None:
        with contextlib.suppress(RuntimeError):  # the server has just been closed: nobody waits for it
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


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
    except Exception as error:  # noqa: BLE001 - told to the client, and logged where it is new
        status, content = _problem(error)
    return web.json_response(content, status=status)


def _problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body."""
    status, message = 500, f"{type(error).__name__}: {error}"
    if isinstance(error, _ProblemError):
        status, message = error.status, str(error)
    elif isinstance(error, RequestError):
        status, message = 400, str(error)
    elif isinstance(error, EngineStoppedError):
        status, message = 503, str(error)
    elif isinstance(error, web.HTTPException):
        status, message = error.status, error.reason
    else:
        log.error("request failed", exc_info=error)
    return status, {"error": {"message": message, "code": status}}
