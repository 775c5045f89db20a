"""Service of a worker process: reads calls, plays episodes or scores with the user's code, and answers.

Many episodes run at the same time. The calls of one episode follow each other, all in one task and, where the user's
functions are not async, in one thread. Calls of a reward function run side by side. Time limits are the actor's: it
kills a worker when a call takes too long.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import os
import platform
import sys
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from .loading import load
from .pictures import with_files
from .rewards import check_function, sendable, takes_token_ids
from .shapes import (
    Episode,
    ShapeError,
    Turn,
    accepted,
    episode_maker,
    finite,
    is_agent,
    is_driving,
    named_rewards,
    runner_of,
)
from .target import columns_of, examples_of, group_rewards, group_scorer
from .wire import BEAT_SECONDS, PROTOCOL, SILENCE_SECONDS, TEXT_CHARACTERS, Message, pack, unpack

LINGER_MILLISECONDS = 1000
REWARD_THREADS = 256
"""Most calls of a reward function that is not async at the same time; a thread starts when none is idle."""
OURS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent), str(Path(concurrent.futures.__file__).parent))
"""Folders of the code that stands between a call and the user's code in a traceback."""
FIRST_CALLS = ("reset", "run")
EPISODE_CALLS = (*FIRST_CALLS, "step", "score", "close")


class SampleError(RuntimeError):
    """Failure of a sample that the environment has asked for: no engine, no tokens left, the trajectory is over."""


class SampledMessage(dict[str, Any]):
    """A message of the model, with the number of its turn."""

    turn: int

    def __init__(self, message: Message, turn: int) -> None:
        super().__init__(message)
        self.turn = turn


class Policy:
    """The model, for an environment that drives: `message = await policy.sample(messages)`."""

    def __init__(self, episode: int, ask: Callable[[Message], Awaitable[Message]]) -> None:
        self._episode, self._ask = episode, ask
        self._num_turns = 0
        self.turn_rewards: dict[int, float] = {}
        """Rewards given so far, by turn."""

    async def sample(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """Return the model's next message.

        Args:
            messages: the whole conversation. Messages sampled before are passed back unchanged, so that their tokens
                continue; any other history begins a branch.
            options: `tools`, `max_tokens`, `stop`, `response_format`, `tool_choice`.

        Raises:
            SampleError: there is no answer; the text says why.
        """
        answer: Message = await self._ask(
            {"kind": "sample", "episode": self._episode, "messages": with_files(messages), "options": options}
        )
        if "error" in answer:
            raise SampleError(answer["error"])
        turn = answer["turn"]
        self._num_turns = max(self._num_turns, turn + 1)
        return SampledMessage(answer["message"], turn)

    def reward(self, message: Any, reward: float | None) -> None:
        """Give a turn a reward, at any time up to the end of the episode. A later reward takes the place of an earlier.

        Args:
            message: what `sample` returned, or its `turn`.
            reward: a finite number; None takes back what was given.

        Raises:
            ShapeError: the message is none of this episode's, or the reward is not finite.
        """
        turn = getattr(message, "turn", message)
        if not isinstance(turn, int) or isinstance(turn, bool) or not 0 <= turn < self._num_turns:
            raise ShapeError(
                f"policy.reward: {str(turn)[:200]!r} is no turn of this episode; pass what policy.sample returned, or "
                "its attribute turn: a copy of the message has none"
            )
        if (number := finite(reward, f"the reward of turn {turn}")) is None:
            self.turn_rewards.pop(turn, None)
        else:
            self.turn_rewards[turn] = number


class _Thread:
    """Thread, or threads, for functions of the user that are not async; started with the first of them."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._executor = ThreadPoolExecutor(count, name)

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run a function of the user: on the event loop if it is async, otherwise in the thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        work = partial(_caught, function, arguments, named)
        result, error = await asyncio.get_running_loop().run_in_executor(self._executor, work)
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result

    def end(self) -> None:
        """Let the thread end once it has nothing more to do."""
        self._executor.shutdown(wait=False)


class _Line:
    """Calls of one episode in a row: one task runs them, with one thread.

    A connection of sqlite3 may be used only by the thread that opened it, a session with a cancel scope only by its
    task. And no call may find the object in the middle of another one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: asyncio.Queue[Message] = asyncio.Queue()
        self.lock = asyncio.Lock()
        """Held by a call that runs: of this episode, or of a group that it belongs to."""
        self.thread = _Thread(f"episode-{number}")
        self.task: asyncio.Task[None] | None = None
        self.under_way = ""
        """Kind of the call that runs."""
        self.is_over = False
        """True once a `close` has come."""
        self.episode: Episode | None = None
        self.driver: Any = None
        """The user's object that drives this episode."""
        self.policy: Policy | None = None
        """The model of an environment that drives; an agent has a session in its place."""

    @property
    def turn_rewards(self) -> list[tuple[int, float]]:
        """Turns of this episode with their rewards, where an environment that drives has given any."""
        return [] if self.policy is None else sorted(self.policy.turn_rewards.items())

    @property
    def environment(self) -> Any:
        """The user's object; None if no episode has begun, or if a function drives."""
        return self.driver if self.episode is None else self.episode.environment

    def add(self, call: Message) -> None:
        """Append a call. A `close` cancels a `run` under way: nobody waits for it any more."""
        self.calls.put_nowait(call)
        if call["kind"] == "close":
            self.is_over = True
            if self.under_way == "run" and self.task is not None:
                self.task.cancel()


class Service:
    """Server of calls.

    Args:
        socket: connected to the rollout actor.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._loader = _Thread("load")
        self._rewards = _Thread("reward", REWARD_THREADS)
        self._target: Any = None
        self._options: dict[str, Any] = {}
        self._make: Callable[..., Awaitable[Episode]] | None = None
        self._score_group: Callable[..., Any] | None = None
        self._lines: dict[int, _Line] = {}
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._requests = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer calls until a `stop`, or until the rollout actor has been silent for SILENCE_SECONDS."""
        await self._send(
            {"kind": "hello", "protocol": PROTOCOL, "pid": os.getpid(), "python": platform.python_version()}
        )
        beat = asyncio.create_task(self._beat())
        # counted, not measured: after a pause of this process its messages are still to be read
        silent = 0.0
        while silent < SILENCE_SECONDS:
            if not await self._socket.poll(1000 * BEAT_SECONDS):
                silent += BEAT_SECONDS
                continue
            silent = 0.0
            message = unpack(await self._socket.recv())
            if message["kind"] == "stop":
                break
            if message["kind"] == "sampled":
                future = self._asked.pop(message["request"], None)
                if future is not None and not future.done():
                    future.set_result(message)
            elif message["kind"] != "beat":
                self._accept(message)
        beat.cancel()

    async def _beat(self) -> None:
        # from the event loop on purpose: an async function that blocks the loop holds up all episodes, and is seen
        while True:
            await self._send({"kind": "beat"})
            await asyncio.sleep(BEAT_SECONDS)

    def _accept(self, call: Message) -> None:
        """Give a call to the line of its episode; one without an episode is run by itself."""
        kind = call["kind"]
        if kind not in EPISODE_CALLS:
            self._start(self._answer(call, None))
            return
        number = call["episode"]
        line = self._lines.get(number)
        if line is None and kind not in FIRST_CALLS:
            # of no episode, which the handler says
            self._start(self._answer(call, _Line(number)))
            return
        if line is None:
            line = self._lines[number] = _Line(number)
            line.task = self._start(self._serve(line))
        line.add(call)
        if kind == "close":
            del self._lines[number]

    async def _serve(self, line: _Line) -> None:
        """Run the calls of an episode, in their order, up to its `close`. No cancellation by the user ends this."""
        call: Message | None = None
        while call or not (line.is_over and line.calls.empty()):
            try:
                call = call or await line.calls.get()
                await line.lock.acquire()
            except asyncio.CancelledError:
                _uncancel()
                continue
            line.under_way = call["kind"]
            await self._answer(call, line)
            line.under_way, call = "", None
            line.lock.release()
            _uncancel()
        line.thread.end()

    async def _answer(self, call: Message, line: _Line | None) -> None:
        """Run a call and send its answer. Whatever the user's code raises becomes a `failed` with its text.

        Also sys.exit, which is a failure of the call alone, and a cancellation: a call without an answer would cost the
        worker its life.
        """
        number = call.get("call")
        try:
            handler = getattr(self, f"_on_{call['kind']}", None)
            if handler is None:
                raise ValueError(f"{call['kind']!r} is no kind of call in version {PROTOCOL} of the protocol")
            data = pack({"kind": "answer", "call": number, **await (handler(call, line) if line else handler(call))})
        except BaseException as error:  # noqa: BLE001 - see above
            data = _failed(number, error, line.turn_rewards if line else [])
        while True:
            try:
                await self._socket.send(data)
            except asyncio.CancelledError:
                _uncancel()
            else:
                return

    async def _on_load(self, call: Message) -> Message:
        self._options = call.get("options") or {}
        self._target = await self._loader.run(load, call["path"])
        if call.get("use") == "reward":
            if self._options and inspect.isclass(self._target):
                self._target = await self._loader.run(self._target, **self._options)
            check_function(self._target)
            return {"shape": "reward", "completion_ids": takes_token_ids(self._target)}
        driving = is_driving(self._target)
        if not driving:
            self._make = episode_maker(self._target, self._options)
        self._score_group = group_scorer(self._target)
        answer = {"shape": "driving" if driving else "stepped", "group_scores": self._score_group is not None}
        examples = await examples_of(self._target, self._options, self._loader.run)
        return answer if examples is None else answer | {"examples": examples}

    async def _on_reward(self, call: Message) -> Message:
        if self._target is None:
            raise ShapeError("a reward, but no reward function has been loaded")
        result = await self._rewards.run(self._target, **call["arguments"])
        # in the thread as well: a lazy result (a generator) runs the user's code while its values are read
        answer: Message = await self._rewards.run(sendable, result)
        return answer

    async def _on_reset(self, call: Message, line: _Line) -> Message:
        if self._make is None:
            raise ShapeError("a reset, but no environment that is stepped has been loaded")
        line.episode = await self._make(line.thread.run, call["row"])
        turn = await line.episode.reset(call["row"], call["seed"])
        turn.columns = await line.thread.run(columns_of, line.environment)
        return _sent(turn)

    async def _on_step(self, call: Message, line: _Line) -> Message:
        return _sent(await _episode(line).step(call["message"]))

    async def _on_score(self, call: Message, line: _Line) -> Message:
        return {"rewards": await _episode(line).score()}

    async def _on_score_group(self, call: Message) -> Message:
        """Score episodes together, once no call of theirs is under way; meanwhile none begins."""
        numbers = call["episodes"]
        if self._score_group is None:
            raise ShapeError("a score_group, but the environment that has been loaded has no score_group(environments)")
        lines = [self._lines.get(number) or _Line(number) for number in numbers]
        async with contextlib.AsyncExitStack() as locks:
            # in one order for all groups, so that no two wait for each other
            for line in sorted(set(lines), key=lambda line: line.number):
                await locks.enter_async_context(line.lock)
            environments = [_environment(line) for line in lines]
            thread = _Thread("group")
            try:
                results = await thread.run(self._score_group, environments)
            finally:
                thread.end()
        name = f"{getattr(self._target, '__name__', 'environment')}_group"
        turn_rewards = [line.turn_rewards for line in lines]
        return {"rewards": group_rewards(results, len(numbers), name), "turn_rewards": turn_rewards}

    async def _on_close(self, call: Message, line: _Line) -> Message:
        if line.episode is not None:
            await line.episode.close()
        if hasattr(line.driver, "close"):
            await line.thread.run(line.driver.close)
        return {}

    async def _on_run(self, call: Message, line: _Line) -> Message:
        """Let the user's code drive an episode. It returns a reward, rewards by name, or None."""
        if line.is_over:
            raise RuntimeError("the episode is over")
        target, session = self._target, call.get("session")
        if is_agent(target) != (session is not None):
            words = "is an agent, run(data, base_url, api_key): set type: agent"
            if session is not None:
                words = "is no agent; an agent is a function or a method run(data, base_url, api_key)"
            raise ShapeError(f"{getattr(target, '__name__', target)} {words}")
        if inspect.isclass(target):
            line.driver = await line.thread.run(target, **self._options)
            target = line.driver
        run, row = runner_of(target), call["row"] | {"seed": call["seed"]}
        if session is None:
            line.policy = Policy(call["episode"], self._ask)
            result = await run(row, line.policy)
        else:
            result = await self._agent(run, row, session, line)
        rewards = {} if result is None else named_rewards(result, getattr(self._target, "__name__", "run"))
        columns = {} if line.driver is None else await line.thread.run(columns_of, line.driver)
        return {"rewards": rewards, "columns": columns, "turn_rewards": line.turn_rewards}

    async def _agent(self, run: Callable[..., Any], row: Message, session: Message, line: _Line) -> Any:
        """Run an agent. One that is not async runs in the episode's thread."""
        # options of a class are for its constructor
        given = {**session, **({} if line.driver is not None else self._options)}
        async with contextlib.AsyncExitStack() as stack:
            if "http_client" in accepted(run, {"http_client": None}) and (made := _http_client()) is not None:
                # as AReaL passes it
                given["http_client"] = await stack.enter_async_context(made)
            return await line.thread.run(run, row, **accepted(run, given))

    async def _ask(self, request: Message) -> Message:
        """Send a request for a sample, and return its answer."""
        number = next(self._requests)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            await self._send({**request, "request": number})
            return await future
        finally:
            self._asked.pop(number, None)

    async def _send(self, message: Message) -> None:
        await self._socket.send(pack(message))

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        # asyncio itself holds only a weak reference to a running task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _http_client() -> Any:
    """Return a client of httpx without limits of time, for agents that take one; None where httpx is not installed."""
    try:
        import httpx  # type: ignore[import-not-found,unused-ignore]  # of the agent's interpreter
    except ImportError:
        return None
    return httpx.AsyncClient(timeout=httpx.Timeout(None))


def _sent(turn: Turn) -> Message:
    """Return a turn as it is sent, with the bytes of its images."""
    return asdict(replace(turn, messages=with_files(turn.messages)))


def _episode(line: _Line) -> Episode:
    """Return the episode of a line; raise if no `reset` has made one."""
    if line.episode is None:
        raise LookupError(f"there is no episode {line.number} here")
    return line.episode


def _environment(line: _Line) -> Any:
    """Return the user's object of an episode; raise if there is none."""
    if line.environment is None:
        raise LookupError(f"there is no episode {line.number} here, or it has not begun")
    return line.environment


def _uncancel() -> None:
    """Take back the cancellations of the present task, which later timeouts of the user would take for their own."""
    task: Any = asyncio.current_task()
    # Python before 3.11 does not count them
    while getattr(task, "cancelling", int)():
        task.uncancel()


def _failed(number: Any, error: BaseException, turn_rewards: list[tuple[int, float]]) -> bytes:
    """Return the message on a failure, whatever the error's own methods do."""
    name, place = type(error).__name__, ""
    cause = getattr(type(error), "cause", None)
    try:
        words = f"{name}: {error}"[:TEXT_CHARACTERS]
    except BaseException as second:  # noqa: BLE001 - __str__ is the user's as well
        words = f"{name} (its text can't be made: {type(second).__name__})"
    try:
        frames = _frames_of_user(error)
        # formatted from the user's first line on; without such a line, whole
        error = error.with_traceback(frames) if frames else error
        trace = "".join(traceback.format_exception(error))[-TEXT_CHARACTERS:]
        place = _place(frames)
    except BaseException:  # noqa: BLE001 - as above
        trace = ""
    try:
        told = {"error": words, "trace": trace, "place": place, "turn_rewards": turn_rewards}
        told |= {"cause": cause} if isinstance(cause, str) else {}
        return pack({"kind": "failed", "call": number, **told})
    except Exception:  # noqa: BLE001 - a call without an answer would hang
        return pack({"kind": "failed", "call": number, "error": "a failure whose text can't be sent", "trace": ""})


def _frames_of_user(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the first line on that is not of this package."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(OURS):
        frames = frames.tb_next
    return frames


def _place(frames: types.TracebackType | None) -> str:
    """Return file and line where an exception was raised: the last line inside the file of the user's first."""
    lines = traceback.extract_tb(frames)
    if not lines:
        return ""
    file = lines[0].filename
    return f"{Path(file).name}, line {[line.lineno for line in lines if line.filename == file][-1]}"


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
        code = 0
        try:
            await Service(socket).serve()
        except BaseException:  # noqa: BLE001 - told in the log of the worker
            traceback.print_exc()
            code = 1
        context.destroy(LINGER_MILLISECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        # not by the end of the loop and of the interpreter, which wait for every task and thread of the user's
        os._exit(code)

    asyncio.run(main())
