"""HTTP server in front of an engine: OpenAI's completions and chat completions, with vLLM's extensions.

Runs an asyncio loop in a separate thread. Answers a request once the engine has finished, or per token (`stream`). A
disconnecting client cancels the request. A request that can't be served gets HTTP 4xx, and the message says how to
change the request. `requests` defines the bodies, `images` those with images, `answers` the responses, `binary` those
to rollout actors.
"""

import asyncio
import contextlib
import functools
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import prometheus_client
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from actors.engines.http import binary, images
from actors.engines.http.access import only_with
from actors.engines.http.answers import Answer, ChatAnswer, TextAnswer
from actors.engines.http.connections import Connections, quiet
from actors.engines.http.requests import ChatRequest, CompletionRequest, Request, Sampling, parse
from actors.engines.protocol import Completion, Engine, EngineStoppedError, RequestError, SamplingError
from actors.engines.text import text_of
from actors.process.fault_points import point
from actors.trajectories.forms import AnswerForm
from bus import threads
from schemas import limits

log = structlog.get_logger("engine.http")

SHUTDOWN_SECONDS = 0.2
"""Seconds for answers under way when the server closes. A draining actor has no requests left when it closes the
server."""
JOIN_SECONDS = 5.0
"""Longest wait of `close` for the end of the server's thread."""

OnPiece = Callable[[int, int, Completion], None]
"""Callback (first choice of the prompt, number of the completion, piece)."""


class CompletionServer:
    """HTTP server of an engine, from construction until `close`.

    Args:
        model_name: name by which actors request the model: `model.path`.
        request_timeout: seconds for a request, `inference.request_timeout`.
        registry: metrics for /metrics.
        api_key: key required in requests; empty admits requests without a key.
        run_name: second name of the model, for people: the name of the run.

    Raises:
        OSError: host and port can't be bound.
    """

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
        run_name: str = "",
    ) -> None:
        self._names = tuple(dict.fromkeys(filter(None, (model_name, run_name))))
        self._engine, self._model_name, self._boot_id = engine, model_name, boot_id
        # an answer with alternatives names the same tokens many times
        self._token_text = functools.cache(engine.token_text)
        self._request_timeout, self._registry = request_timeout, registry
        self._api_key, self._tls = api_key, tls
        self._loop = asyncio.new_event_loop()
        self._ready: Future[int] = Future()
        self._stop = asyncio.Event()
        threads.tick(self._loop, "inference.http")
        self._thread = threads.start("http", self._run, host, port)
        # raises the error of a port that is taken
        self.port = self._ready.result(30.0)

    def close(self) -> None:
        """Stop serving. May be called again."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(JOIN_SECONDS)

    def _run(self, host: str, port: int) -> None:
        try:
            self._loop.run_until_complete(self._serve(host, port))
        except Exception as error:
            # before the server is ready the constructor waits for the error; afterwards nobody does
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self, host: str, port: int) -> None:
        connections = Connections()
        # the first is the outermost: it also sees requests that are refused
        guards = [connections.note, _errors_as_json, only_with(self._api_key)]
        app = web.Application(client_max_size=limits.HTTP_BODY_BYTES, middlewares=guards)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post(
                    "/v1/completions", functools.partial(self._respond, kind=CompletionRequest, make_answer=TextAnswer)
                ),
                web.post(
                    "/v1/chat/completions", functools.partial(self._respond, kind=ChatRequest, make_answer=ChatAnswer)
                ),
            ]
        )
        # handler_cancellation: otherwise aiohttp lets a handler, and so the engine, go on after the client has gone
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=quiet(), shutdown_timeout=SHUTDOWN_SECONDS
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=self._tls).start()
            self._ready.set_result(int(runner.addresses[0][1]))
            assert runner.server is not None
            await connections.watch(runner.server, self._stop)
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        policy = self._engine.status().policy
        return web.json_response({"boot_id": self._boot_id, "policy": policy.model_dump() if policy else None})

    async def _metrics(self, request: web.Request) -> web.Response:
        body = prometheus_client.generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _models(self, request: web.Request) -> web.Response:
        same = {"object": "model", "created": 0, "owned_by": "grpo-actors"}
        return web.json_response({"object": "list", "data": [{"id": name} | same for name in self._names]})

    async def _respond(
        self, http: web.Request, kind: type[Request], make_answer: type[Answer[Request]]
    ) -> web.StreamResponse:
        asked = await self._read(http, kind)
        if asked.model not in self._names:
            served = " or ".join(map(repr, self._names))
            raise _ProblemError(404, f"model: {asked.model!r} is not served here, {served} is")
        prompts: list[list[int]] = []
        for prompt in asked.prompts:
            if isinstance(prompt, str) or (prompt and isinstance(prompt[0], dict)):
                # in a thread, since the first chat loads the template, and a long text takes long
                options = (asked.template_tools, asked.chat_template_kwargs) if isinstance(asked, ChatRequest) else ()
                prompts.append(await asyncio.to_thread(self._engine.tokenize, prompt, *options))
            else:
                prompts.append(prompt)  # type: ignore[arg-type]
        engine = self._engine
        form = asked.answer_form if isinstance(asked, CompletionRequest) else None
        if isinstance(asked, ChatRequest) and asked.demand is not None:
            form = await asyncio.to_thread(engine.form_of, prompts[0], asked.demand)
        answer = make_answer(asked, prompts, self._boot_id, engine.detokenize, self._token_text, engine.read_message)
        if asked.stream:
            return await self._stream(http, asked, prompts, answer, form)
        with self._submitted(asked, prompts, form) as futures:
            async with self._in_time():
                groups = [await asyncio.wrap_future(future) for future in futures]
        completions = [completion for group in groups for completion in group]
        if kind is CompletionRequest and binary.CONTENT_TYPE in http.headers.get("Accept", ""):
            encoded = await asyncio.to_thread(self._encode, completions)
            return web.Response(body=encoded, content_type=binary.CONTENT_TYPE)
        # in a thread, since thousands of choices with alternatives, or with tool calls to read, take long
        return web.json_response(await asyncio.to_thread(answer.whole, completions))

    async def _read(self, http: web.Request, kind: type[Request]) -> Request:
        """Return the request in a body; that of a rollout actor may have images."""
        if kind is CompletionRequest and http.content_type == images.CONTENT_TYPE:
            larger = http.clone(client_max_size=limits.HTTP_IMAGES_BODY_BYTES)
            async with self._in_time():
                body = await larger.read()
            # in a thread, since a digest of many megabytes takes long
            return await asyncio.to_thread(images.ImagesRequest.of_body, body)  # type: ignore[arg-type]
        async with self._in_time():
            body = await http.read()
        return parse(kind, body)

    def _encode(self, completions: list[Completion]) -> bytes:
        texts = [text_of(completion, self._engine.detokenize) for completion in completions]
        return binary.encode(self._boot_id, completions, texts)

    @contextlib.contextmanager
    def _submitted(
        self,
        asked: Sampling,
        prompts: list[list[int]],
        form: AnswerForm | None,
        on_piece: "OnPiece | None" = None,
    ) -> Iterator[list["Future[list[Completion]]"]]:
        """Submit all prompts; yield the futures.

        On exit cancel the requests still running: the client is gone, or the engine has refused a prompt.
        """
        futures: list[Future[list[Completion]]] = []
        try:
            for number, prompt in enumerate(prompts):
                listener = on_piece and functools.partial(on_piece, number * asked.n)
                futures.append(self._engine.submit(asked.sample_request(prompt, listener, form)))
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
        self,
        http: web.Request,
        asked: Request,
        prompts: list[list[int]],
        answer: Answer[Request],
        form: AnswerForm | None,
    ) -> web.StreamResponse:
        """Send server-sent events, a chunk per token. An error after the first byte becomes a separate event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        pieces = _Pieces()
        with self._submitted(asked, prompts, form, pieces.put) as futures:
            pieces.end_with(futures)
            await response.prepare(http)
            try:
                async with self._in_time():
                    async for index, piece in pieces:
                        await response.write(b"".join(map(_event, answer.chunks(index, piece))))
                if asked.include_usage:
                    await response.write(_event(answer.last_chunk()))
            except ConnectionError:
                # the client has gone between two tokens
                return response
            except Exception as error:  # noqa: BLE001 - reported to the client, and logged if unexpected
                await response.write(_event(_problem(error)[1]))
            await response.write(b"data: [DONE]\n\n")
        return response


class _Pieces:
    """Queue of pieces from the engine's threads to the event loop.

    No piece is lost, and the pieces of a choice stay in order.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Completion] | Future[list[Completion]]] = asyncio.Queue()
        self._num_running = 0

    def put(self, first: int, number: int, piece: Completion) -> None:
        """Queue a piece of completion `number` of the prompt with the first choice `first`. For any thread."""
        self._put((first + number, piece))

    def end_with(self, futures: list["Future[list[Completion]]"]) -> None:
        """Stop the iteration when all futures are done.

        An engine passes all pieces of a request before the future is done.
        """
        self._num_running = len(futures)
        for future in futures:
            future.add_done_callback(self._put)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Completion]]:
        """Yield the index of the choice and the piece; raise the error of a failed request."""
        while self._num_running:
            item = await self._queue.get()
            if isinstance(item, Future):
                item.result()
                self._num_running -= 1
            else:
                yield item

    def _put(self, item: "tuple[int, Completion] | Future[list[Completion]]") -> None:
        # through the loop: an asyncio.Queue is not thread-safe, and pieces come from the engine's threads
        with contextlib.suppress(RuntimeError):  # the server has just been closed: no reader is left
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


class _ProblemError(Exception):
    """Error that is answered with this HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer every error in the shape known to OpenAI's client."""
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001 - reported to the client, and logged if unexpected
        status, content = _problem(error)
    return web.json_response(content, status=status)


def _problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body for an error."""
    status, message = 500, f"{type(error).__name__}: {error}"
    if isinstance(error, _ProblemError):
        status, message = error.status, str(error)
    elif isinstance(error, RequestError):
        status, message = 400, str(error)
    elif isinstance(error, SamplingError):
        message = str(error)
    elif isinstance(error, EngineStoppedError):
        status, message = 503, str(error)
    elif isinstance(error, web.HTTPException):
        status, message = error.status, error.reason
    else:
        log.error("request failed", exc_info=error)
    return status, {"error": {"message": message, "code": status}}
