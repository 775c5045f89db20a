"""A small server that speaks the dialects of sessions with given replies, and checks what clients send back."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from actors.rollout.sessions.dialects import chat, completions, generate, messages, responses
from actors.rollout.sessions.dialects.calls import Call, CallError, Dialect, Json, Reply
from actors.rollout.sessions.history import History
from actors.trajectories.bridges import Message
from tests.actors.rollout.sessions.replies import reply

PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/completions": completions,
    "/inference/v1/generate": generate,
}
TURNS = [
    reply(
        "Let me add.", "First a sum.", [("c1", "add", '{"a": 1,"b":2}'), ("c2", "add", '{ "a": 3, "b": 4 }')], number=0
    ),
    reply("", "", [("c3", "add", '{"a": 3, "b": 7}')], number=1),
    reply("It is 10.", "Done.", number=2),
]
"""An answer with everything, one with a call alone, and the last one."""
SYSTEM, QUESTION = "You add.", "What is 1 + 2 + 3 + 4?"


@dataclass
class SessionServer:
    """Server with one session, whose answers are given."""

    replies: Sequence[Reply]
    calls: list[Call] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)
    url: str = ""

    history: History = field(default_factory=History)

    @property
    def conversation(self) -> list[Message]:
        """Messages of the newest call, with the answers as they were given."""
        return self.history.restored(self.calls[-1].messages)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with the next reply."""
        dialect, body = PATHS[request.path], await request.json()
        try:
            call = dialect.call(body)
        except CallError as error:
            return web.json_response(dialect.problem(error.status, str(error), error.code), status=error.status)
        reply = self.replies[len(self.calls)]
        self.calls.append(call)
        self.bodies.append(body)
        self.history.add(self.conversation, reply.message)
        if not call.stream:
            return web.json_response(dialect.whole(body, reply))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for event in dialect.events(body, reply):
            await stream.write(event)
        await stream.write_eof()
        return stream


@contextlib.asynccontextmanager
async def serving(replies: Sequence[Reply] = TURNS) -> AsyncIterator[SessionServer]:
    """Serve these replies, one after the other."""
    server = SessionServer(replies)
    app = web.Application()
    app.add_routes([web.post(path, server.answer) for path in PATHS])
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


def add(arguments: dict[str, Any]) -> str:
    """The tool."""
    return str(arguments["a"] + arguments["b"])


def expected(replies: Sequence[Reply] = TURNS[:-1], results: Sequence[str] = ("3", "7", "10")) -> list[Message]:
    """The conversation before the last answer."""
    told: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    left = iter(results)
    for one in replies:
        told.append(one.message)
        told += [
            {"role": "tool", "content": next(left), "tool_call_id": call["id"]} for call in one.message["tool_calls"]
        ]
    return told
