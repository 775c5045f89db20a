"""Service of a worker process: reads calls, plays episodes with the user's code, and answers.

Many episodes run at the same time. Async functions of the user run on the event loop, others in threads; the calls of
one episode follow each other. Time limits are the rollout actor's: it kills a worker whose call takes too long.
"""

import asyncio
import inspect
import itertools
import os
import platform
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from .loading import load
from .shapes import Episode, ShapeError, episode_maker, is_driving
from .wire import BEAT_SECONDS, PROTOCOL, SILENCE_SECONDS, TEXT_CHARACTERS, Message, pack, unpack

MOST_THREADS = 256
"""Calls of functions that are not async, at the same time."""
LINGER_MILLISECONDS = 1000


class SampleError(RuntimeError):
    """Failure of a sample that the environment has asked for: no engine, no tokens left, the trajectory is over."""


class Policy:
    """The model, for an environment that drives: `message = await policy.sample(messages)`."""

    def __init__(self, episode: int, ask: Callable[[Message], Awaitable[Message]]) -> None:
        self._episode, self._ask = episode, ask

    async def sample(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """Return the model's next message.

        Args:
            messages: the whole conversation. Messages sampled before are passed back unchanged, so that their tokens
                continue; any other history begins a branch.
            options: `tools`, `max_tokens`, `stop`.

        Raises:
            SampleError: there is no answer; the text says why.
        """
        answer: Message = await self._ask(
            {"kind": "sample", "episode": self._episode, "messages": messages, "options": options}
        )
        if "error" in answer:
            raise SampleError(answer["error"])
        return dict(answer["message"])


class Service:
    """Server of calls.

    Args:
        socket: connected to the rollout actor.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._threads = ThreadPoolExecutor(MOST_THREADS, "episode")
        self._target: Any = None
        self._options: dict[str, Any] = {}
        self._make: Callable[..., Any] | None = None
        self._episodes: dict[int, Episode] = {}
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._requests = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard = time.monotonic()

    async def serve(self) -> None:
        """Answer calls until a `stop`, or until the rollout actor has been silent for SILENCE_SECONDS."""
        await self._send(
            {"kind": "hello", "protocol": PROTOCOL, "pid": os.getpid(), "python": platform.python_version()}
        )
        beat = asyncio.create_task(self._beat())
        while time.monotonic() - self._heard < SILENCE_SECONDS:
            if not await self._socket.poll(1000 * BEAT_SECONDS):
                continue
            message = unpack(await self._socket.recv())
            self._heard = time.monotonic()
            if message["kind"] == "stop":
                break
            if message["kind"] == "sampled":
                future = self._asked.pop(message["request"], None)
                if future is not None and not future.done():
                    future.set_result(message)
            elif message["kind"] != "beat":
                task = asyncio.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        beat.cancel()

    async def _beat(self) -> None:
        # from the event loop on purpose: an async function that blocks the loop holds up all episodes, and is seen
        while True:
            await self._send({"kind": "beat"})
            await asyncio.sleep(BEAT_SECONDS)

    async def _answer(self, call: Message) -> None:
        """Run a call and send its answer. Whatever the user's code raises becomes a `failed` with its text."""
        number = call.get("call")
        try:
            handler = getattr(self, f"_on_{call['kind']}", None)
            if handler is None:
                raise ValueError(f"{call['kind']!r} is no kind of call in version {PROTOCOL} of the protocol")
            data = pack({"kind": "answer", "call": number, **await handler(call)})
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - sys.exit in user code, too, is a failure of the call alone
            words = f"{type(error).__name__}: {error}"[:TEXT_CHARACTERS]
            trace = "".join(traceback.format_exception(error))[-TEXT_CHARACTERS:]
            data = pack({"kind": "failed", "call": number, "error": words, "trace": trace})
        await self._socket.send(data)

    async def _on_load(self, call: Message) -> Message:
        self._options = call.get("options") or {}
        self._target = await self._run(load, call["path"])
        driving = is_driving(self._target)
        if not driving:
            self._make = episode_maker(self._target, self._options)
        return {"shape": "driving" if driving else "stepped"}

    async def _on_reset(self, call: Message) -> Message:
        if self._make is None:
            raise ShapeError("a reset, but no environment that is stepped has been loaded")
        episode = await self._make(self._run)
        self._episodes[call["episode"]] = episode
        return asdict(await episode.reset(call["row"], call["seed"]))

    async def _on_step(self, call: Message) -> Message:
        return asdict(await self._episode(call).step(call["message"]))

    async def _on_score(self, call: Message) -> Message:
        return {"rewards": await self._episode(call).score()}

    async def _on_close(self, call: Message) -> Message:
        await self._episode(call).close()
        del self._episodes[call["episode"]]
        return {}

    async def _on_run(self, call: Message) -> Message:
        """Let the user's coroutine drive an episode. It returns a reward, rewards by name, or None."""
        target = self._target if inspect.isfunction(self._target) else self._target(**self._options).run
        result = await target(call["row"] | {"seed": call["seed"]}, Policy(call["episode"], self._ask))
        if result is None or isinstance(result, dict):
            rewards = result or {}
        else:
            rewards = {getattr(self._target, "__name__", "run"): result}
        return {"rewards": {name: None if value is None else float(value) for name, value in rewards.items()}}

    def _episode(self, call: Message) -> Episode:
        try:
            return self._episodes[call["episode"]]
        except KeyError:
            raise LookupError(f"there is no episode {call['episode']} here") from None

    async def _ask(self, request: Message) -> Message:
        """Send a request for a sample, and return its answer."""
        number = next(self._requests)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        await self._send({**request, "request": number})
        return await future

    async def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run a function of the user: on the event loop if it is async, otherwise in a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        work = partial(_caught, function, arguments, named)
        result, error = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result

    async def _send(self, message: Message) -> None:
        await self._socket.send(pack(message))


def _caught(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, BaseException | None]:
    """Return a function's result, or its exception: a future can hold neither SystemExit nor StopIteration."""
    try:
        return function(*arguments, **named), None
    except StopIteration as error:
        return None, RuntimeError(f"StopIteration: {error}")
    except BaseException as error:  # noqa: BLE001 - raised again on the event loop
        return None, error


def run(address: str, name: str) -> None:
    """Serve the rollout actor at an address until told to stop."""

    async def main() -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name.encode())
        socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        socket.connect(address)
        try:
            await Service(socket).serve()
        finally:
            context.destroy(LINGER_MILLISECONDS)

    asyncio.run(main())
    sys.stdout.flush()
    sys.stderr.flush()
    # not by the interpreter's own end, which waits for every thread of the user's
    os._exit(0)
