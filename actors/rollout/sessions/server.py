"""HTTP server of a rollout actor's sessions: several APIs, one key for each session.

Consumes requests of agents. Waits for a request's body (`limits.HTTP_HEAD_SECONDS`), and for the session's reply as
long as the trajectory lives. A session is named by its key: in the path (`/s/KEY/v1/…`), as `Authorization: Bearer`,
`x-api-key` or `X-Session-ID`. Errors have the form of the API that was asked, and `x-should-retry: false` where asking
again can't help, which OpenAI's and Anthropic's clients obey.
"""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import structlog
from aiohttp import ClientError, web

from actors.engines.http.connections import Connections, quiet
from actors.rollout.sessions.dialects import chat, completions, generate, messages, responses
from actors.rollout.sessions.dialects.calls import Call, CallError, Dialect, Json
from actors.rollout.sessions.session import Session
from actors.rollout.sessions.table import SessionTable
from actors.trajectories.bridges import BridgeError
from actors.trajectories.chat import Chat
from actors.trajectories.images import parts_of
from actors.trajectories.recorder import LONGEST_TOKEN
from schemas import limits

log = structlog.get_logger("sessions")

LARGE_BODY_BYTES = 256 << 10
"""Bytes of a body that is parsed in a thread: the event loop answers all sessions."""
SMALL_BODY_BYTES = 1 << 20
"""Bytes of a body that is read however few tokens a sample has: long messages may be cut (`max_message_tokens`)."""
BASE64 = re.compile(rb"[A-Za-z0-9+/=\\]{1024,}")
"""Run of base64 that is an image, not a word of a text; some writers of JSON escape slashes."""
MOST_NESTING = 100
"""Deepest nesting of lists and objects; Python's own limit would be met anywhere on the way of a call."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MOST_WAIT_SECONDS = 60.0
"""Longest wait of a service for a trajectory to take, in one request."""
SHUTDOWN_SECONDS = 0.2
"""Seconds for answers under way when the server closes."""

COMPLETIONS: Mapping[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/chat/completions/tokens": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/inference/v1/generate": generate,
}
"""APIs by path."""

Count = Callable[[str, str], None]
"""Callback (environment, outcome)."""


class SessionServer:
    """Server, as an asynchronous context.

    Args:
        table: the open sessions.
        chats: language of the model by environment, for token counts.
        model: name of the model in `/v1/models`.
        sequence_len: tokens of the longest sample.
        admin_key: key with which services take sessions; empty admits all.
        count: told of each answered, repeated or refused call.
        image_bytes: bytes of the images that one conversation may show, each as often as it stands there.
    """

    def __init__(
        self,
        table: SessionTable,
        chats: Mapping[str, Chat],
        model: str,
        sequence_len: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: str = "",
        admin_key: str = "",
        tls: ssl.SSLContext | None = None,
        count: Count = lambda environment, outcome: None,
        image_bytes: int = 0,
    ) -> None:
        self._table, self._chats, self._model, self._sequence_len = table, chats, model, sequence_len
        self._host, self._port, self._advertised = host, port, advertised
        self._admin_key, self._tls, self._count = admin_key, tls, count
        # bytes of a text are more than its characters
        tokens = max(SMALL_BODY_BYTES, LONGEST_TOKEN * sequence_len)
        self._text_bytes = min(limits.HTTP_BODY_BYTES, tokens)
        # four characters of base64 are three bytes
        self._most_bytes = min(limits.HTTP_IMAGES_BODY_BYTES, self._text_bytes + image_bytes * 4 // 3)
        self._image_bytes = image_bytes
        self._stop = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()
        self.url = ""
        """Address for agents, without a path."""

    async def __aenter__(self) -> Self:
        """Bind.

        Raises:
            OSError: host and port can't be bound.
        """
        connections = Connections()
        app = web.Application(client_max_size=self._most_bytes, middlewares=[connections.note])
        for path, dialect in COMPLETIONS.items():
            self._route(app, "POST", path, functools.partial(self._complete, dialect=dialect), dialect)
        for path in ("/tokenize", "/v1/tokenize"):
            self._route(app, "POST", path, self._tokenize)
        self._route(app, "POST", "/v1/messages/count_tokens", self._count_tokens, messages)
        self._route(app, "GET", "/v1/models", self._models)
        self._route(app, "POST", "/rl/set_reward", self._set_reward)
        self._route(app, "POST", "/rl/end_session", self._end_session)
        app.router.add_post("/rl/start_session", _guarded(self._start_session, chat))
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=quiet(),
            shutdown_timeout=SHUTDOWN_SECONDS,
            # also of bodies that are refused: they would be unpacked in the event loop
            auto_decompress=False,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, self._host, self._port, ssl_context=self._tls).start()
        assert runner.server is not None
        watch = asyncio.create_task(connections.watch(runner.server, self._stop))
        self._stack.push_async_callback(_ended, watch, self._stop)
        host = self._advertised or self._host
        host = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if self._tls else 'http'}://{host}:{runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def access(self, session: Session) -> Json:
        """Return what an agent needs: `base_url`, as OpenAI's clients take it, and `api_key`."""
        return {"base_url": f"{self.url}/s/{session.key}/v1", "api_key": session.key}

    def _route(
        self,
        app: web.Application,
        method: str,
        path: str,
        handle: Callable[[web.Request, Session], Awaitable[web.StreamResponse]],
        dialect: Dialect = chat,
    ) -> None:
        """Serve a path of a session, with and without its key in front."""

        async def with_session(request: web.Request) -> web.StreamResponse:
            session = self._table.find(_key(request))
            # a body without a length may be of any
            num_bytes = (request.content_length or self._most_bytes) if request.can_read_body else 0
            try:
                with session.served():
                    async with (
                        session.large if num_bytes > LARGE_BODY_BYTES else contextlib.nullcontext(),
                        session.largest if num_bytes > self._text_bytes else contextlib.nullcontext(),
                    ):
                        return await handle(request, session)
            except CallError:
                self._count(session.environment, "refused")
                raise

        for prefix in ("", "/s/{key}"):
            app.router.add_route(method, prefix + path, _guarded(with_session, dialect))

    async def _complete(self, request: web.Request, session: Session, dialect: Dialect) -> web.StreamResponse:
        """Answer a call for a completion."""
        raw, body = await self._body(request)
        call = dialect.call(body)
        given = request.headers.get("Idempotency-Key", "")
        identity = given or hashlib.blake2b(request.path.encode() + b"\n" + raw).hexdigest()
        again = bool(given) or _is_above_zero(request.headers.get("x-stainless-retry-count", ""))
        repeated = session.num_repeated
        taken = await session.answer(
            call, identity, str(body.get("model") or self._model)[: limits.NAME_BYTES], is_repeated=again
        )
        self._count(session.environment, "repeated" if session.num_repeated > repeated else "answered")
        is_taken = False
        try:
            if call.stream:
                response = web.StreamResponse(
                    headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                )
                data = b"".join(dialect.events(body, taken.reply))
            else:
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                data = json.dumps(dialect.whole(body, taken.reply)).encode()
                response.content_length = len(data)
            # a client that has gone: the turn is kept for its next attempt
            with contextlib.suppress(ConnectionError):
                await response.prepare(request)
                await response.write(data)
                await response.write_eof()
                is_taken = True
        finally:
            taken.note(taken=is_taken)
        return response

    async def _body(self, request: web.Request) -> tuple[bytes, Json]:
        """Return the body of a request, as bytes and as JSON.

        Raises:
            CallError: it does not come in time, is larger than any conversation can be, or is no JSON object.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise CallError(415, "Content-Encoding: packed bodies are not read; send it as it is")
        if (request.content_length or 0) > self._most_bytes:
            raise self._too_large(self._most_bytes)
        try:
            async with asyncio.timeout(limits.HTTP_HEAD_SECONDS):
                raw = await request.read()
        except TimeoutError:
            raise CallError(408, f"body: not here within {limits.HTTP_HEAD_SECONDS:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large(self._most_bytes) from None
        except (web.RequestPayloadError, ClientError) as error:
            raise CallError(400, f"body: can't be read: {error}") from None
        if len(raw) > self._text_bytes and await asyncio.to_thread(_without_base64, raw) > self._text_bytes:
            raise self._too_large(self._text_bytes)
        return raw, await asyncio.to_thread(_read, raw) if len(raw) > LARGE_BODY_BYTES else _read(raw)

    def _too_large(self, most: int) -> CallError:
        """Return the refusal of a body with more than so many bytes, or with more than so many besides images."""
        if most in (limits.HTTP_BODY_BYTES, limits.HTTP_IMAGES_BODY_BYTES):
            return CallError(413, f"body: more than {most >> 20} MiB")
        words, keys = f"of any conversation with {self._sequence_len} tokens", "packer.sequence_len"
        if most > self._text_bytes:
            words, keys = f"{words} and {self._image_bytes} bytes of images", f"{keys}, environments[].images"
        return CallError(400, f"body: more than the {most} bytes {words} ({keys})", "context_length_exceeded")

    async def _tokenize(self, request: web.Request, session: Session) -> web.StreamResponse:
        """Count tokens, as vLLM's endpoint does."""
        _, body = await self._body(request)
        language = self._chats[session.environment]
        if isinstance(prompt := body.get("prompt"), str):
            ids = await language.aside(language.encode, prompt)
        else:
            asked = chat.call(body)
            ids = await self._rendered(session, asked, opened=body.get("add_generation_prompt") is not False)
        return web.json_response({"count": len(ids), "max_model_len": self._sequence_len, "tokens": ids})

    async def _count_tokens(self, request: web.Request, session: Session) -> web.StreamResponse:
        """Count tokens, as Anthropic's endpoint does."""
        _, body = await self._body(request)
        return web.json_response({"input_tokens": len(await self._rendered(session, messages.call(body)))})

    async def _rendered(self, session: Session, call: Call, *, opened: bool = True) -> list[int]:
        """Return the tokens of a conversation.

        Raises:
            CallError: the conversation has images, or the chat template refuses it.
        """
        if any(map(parts_of, call.messages)):
            words = "messages: have images, whose tokens are counted in the usage of an answer alone"
            raise CallError(400, words)
        language = self._chats[session.environment]
        render = functools.partial(language.bridges.rendered, add_generation_prompt=opened)
        try:
            return await language.aside(render, call.messages, call.tools)
        except BridgeError as error:
            raise CallError(400, f"messages: {error}") from error

    async def _models(self, request: web.Request, session: Session) -> web.StreamResponse:
        told = {"id": self._model, "object": "model", "created": 0, "owned_by": "grpo-actors"}
        return web.json_response({"object": "list", "data": [told | {"max_model_len": self._sequence_len}]})

    async def _set_reward(self, request: web.Request, session: Session) -> web.StreamResponse:
        """Set the reward of a call, by AReaL's names."""
        _, body = await self._body(request)
        session.set_reward(body.get("interaction_id"), body.get("reward"))
        return web.json_response({"message": "success"})

    async def _end_session(self, request: web.Request, session: Session) -> web.StreamResponse:
        _, body = await self._body(request)
        session.end(body.get("reward"))
        return web.json_response({"message": "success", "session_id": session.id})

    async def _start_session(self, request: web.Request) -> web.StreamResponse:
        """Hand a waiting trajectory to a service."""
        if self._admin_key and not hmac.compare_digest(_bearer(request).encode(), self._admin_key.encode()):
            raise CallError(401, "key: is not the one of services (rollout.sessions.admin_key_env)", "invalid_api_key")
        _, body = await self._body(request)
        seconds = body.get("wait") or 0.0
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MOST_WAIT_SECONDS:
            raise CallError(400, f"wait: must be a number of seconds up to {MOST_WAIT_SECONDS:g}")
        session = await self._table.take(seconds)
        told = {"session_id": session.id, "environment": session.environment, "data": session.data}
        return web.json_response(told | self.access(session))

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})


def _guarded(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], dialect: Dialect
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answer each error in the words of an API."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            return await handle(request)
        except CallError as error:
            # 503: another engine may answer; everything else is the same again
            again = "true" if error.status == 503 else "false"
            content = dialect.problem(error.status, str(error), error.code)
            return web.json_response(content, status=error.status, headers={"x-should-retry": again})
        except web.HTTPException as error:
            return web.json_response(dialect.problem(error.status, error.reason, "refused"), status=error.status)
        except Exception as error:
            log.exception("a call failed", path=request.path.rpartition("/")[2])
            content = dialect.problem(500, f"internal: {type(error).__name__}: {error}", "internal")
            return web.json_response(content, status=500)

    return guarded


def _without_base64(raw: bytes) -> int:
    """Return the bytes of a body besides long base64: other JSON may take a hundred times its size in memory."""
    return len(raw) - sum(len(found[0]) for found in BASE64.finditer(raw))


def _read(raw: bytes) -> Json:
    """Return the JSON object of a body.

    Raises:
        CallError: it is no JSON object, or has what can't be a text of a message.
    """
    try:
        text = raw.decode()
        body = json.loads(text, parse_constant=_refuse_constant) if text else {}
    except (ValueError, RecursionError) as error:
        raise CallError(400, f"body: is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise CallError(400, "body: must be a JSON object")
    # brackets are counted first, since few bodies have many
    if text.count("[") + text.count("{") > MOST_NESTING and _is_deeper(body, MOST_NESTING):
        raise CallError(400, f"body: lists and objects are nested deeper than {MOST_NESTING}")
    if SURROGATE.search(text) and (place := _with_surrogate(body)) is not None:
        raise CallError(
            400, f"body: a text has half a character (a lone surrogate), and no tokens: …{ascii(place)[1:-1]}…"
        )
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested deeper."""
    level = [value]
    for _ in range(most):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _with_surrogate(value: Any) -> str | None:
    """Return the place of a lone surrogate, as the characters around it; None if there is none."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[max(0, error.start - 20) : error.start + 1]
    return None


def _key(request: web.Request) -> str:
    """Return the key of a request; a key in the path counts more than headers, which clients fill with anything."""
    in_path = request.match_info.get("key", "")
    headers: Mapping[str, Any] = request.headers
    return in_path or headers.get("X-Session-ID", "") or headers.get("x-api-key", "") or _bearer(request)


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def _is_above_zero(count: str) -> bool:
    return count.isascii() and count.isdigit() and int(count[:9]) > 0


async def _ended(watch: "asyncio.Task[None]", stop: asyncio.Event) -> None:
    stop.set()
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
