"""Worker processes of an environment or a reward function: started, watched, killed when they hang, and replaced.

A pool belongs to an actor and lives on one event loop. Calls of episodes go to workers as msgpack over ZeroMQ
(`worker/wire.py`). Each call has a time limit; a worker that passes one is killed with everything below it, because
nothing else ends a function that hangs. Its other episodes are then lost, which their attempts report as `env_lost`.
A call whose caller has been cancelled keeps its limit: its function goes on all the same.
"""

import asyncio
import contextlib
import itertools
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import structlog
import zmq
import zmq.asyncio

from actors.environments import worker
from actors.environments.errors import EpisodeError
from actors.environments.output import PrintedLines
from actors.environments.worker.guard import TOO_MANY_PROCESSES
from actors.environments.worker.processes import below, kill_all, kill_left, snapshot
from actors.environments.worker.wire import BEAT_SECONDS, PROTOCOL, TEXT_CHARACTERS, Message, pack, unpack
from schemas.messages import EnvironmentFailure

log = structlog.get_logger("environments")

PROGRAM = Path(worker.__file__).parent / "__main__.py"
SHAPES: dict[str, tuple[str, ...]] = {"environment": ("stepped", "driving"), "reward": ("reward",)}
"""Answers to a load, by use."""
RESTART_SECONDS, LONGEST_RESTART_SECONDS = 0.5, 30.0
"""Pause before a worker is replaced; doubled each time a worker ends before it has proved itself."""
PROVED_SECONDS = 60.0
"""Life of a loaded worker after which it has proved itself, as it has by a completed episode."""
FAILED_STARTS = 3
"""Starts of a worker without a loaded environment, one after the other, after which there is no hope for it."""
CLOSE_SECONDS = 10.0
"""Longest wait for killed workers at the end."""
KILL_SECONDS = 15.0
"""Time for a guard to kill everything below it, before this process does it."""
GRACE_SECONDS = 1.0
"""Time for an answer that has come, but that this process has not read yet because it was held up itself."""
FOR_THE_INTERPRETER = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}
"""Variables for the worker alone. The first is as -P, which Python before 3.11 does not know.

The last gives sets one order in all workers: examples that are made of sets would otherwise differ within a group.
"""
READ_BYTES = 1 << 16
CAUSES: dict[str, EnvironmentFailure] = {
    "load": "env_load",
    "reset": "env_reset",
    "step": "env_step",
    "score": "env_score",
    "score_group": "env_score",
    "run": "env_step",
    "close": "env_lost",
    "reward": "env_score",
}

Json = dict[str, Any]
Rewards = dict[str, float | None]
Examples = dict[str, int | None]
"""Number of examples by split, `train` and `eval`; None for no end."""
Answer = Callable[[list[Json], Json], Awaitable[Json]]
"""Coroutine function that samples the next message of a conversation, with the options of the request."""


@dataclass(frozen=True)
class Limits:
    """Seconds of each call, and bounds of a worker process."""

    load: float = 120.0
    reset: float = 60.0
    step: float = 60.0
    score: float = 60.0
    run: float = 3600.0
    """A whole episode of an environment that drives."""
    reward: float = 300.0
    """A call of a reward function."""
    silence: float = 30.0
    """Without a beat: the process is stopped, or an async function blocks its event loop."""
    processes: int = 64
    """Processes of a worker, itself included."""

    def of(self, kind: str) -> float:
        """Return the seconds for a call of this kind."""
        return float(getattr(self, kind.removesuffix("_group"), self.reset))


Use = Literal["environment", "reward"]
"""What the user's object is used as: an environment, or a reward function."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """Code that workers run, their number and their limits.

    Args:
        name: for messages, logs and metrics.
        path: `my_env.py:Env` or `package.module:Env`.
        options: keyword arguments of the class or factory.
        python: interpreter; empty for the present one.
        workers: number of processes.
        episodes: most episodes of a worker at the same time.
        directory: working directory; empty for the present one.
        variables: further environment variables.
        use: what the user's object is used as.
    """

    name: str
    path: str
    options: Json = field(default_factory=dict)
    python: str = ""
    workers: int = 1
    episodes: int = 32
    directory: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    use: Use = "environment"

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"reward function {self.name}" if self.use == "reward" else f"environment {self.name}"

    def __post_init__(self) -> None:
        """Refuse numbers with which no episode could ever begin."""
        for name in ("workers", "episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.title}: {name} is {getattr(self, name)}, but must be at least 1")


class Worker:
    """A process, from its start to its end. Never used again after `ended`."""

    def __init__(self, name: str) -> None:
        self.name, self.identity = name, f"{name}/{secrets.token_hex(4)}".encode()
        self.process: asyncio.subprocess.Process | None = None
        self.calls: dict[int, asyncio.Future[Message]] = {}
        self.answers: dict[int, Answer] = {}
        """Samplers for environments that drive, by episode."""
        self.samples: dict[int, set[asyncio.Task[None]]] = {}
        """Samples under way, by episode."""
        self.num_episodes = 0
        self.shape = ""
        """`stepped`, `driving` or `reward`; empty until the user's object has been loaded."""
        self.loaded_at: float | None = None
        self.has_completed = False
        """True once an episode has been closed."""
        self.hopeless = ""
        """Why no successor can do better; empty if one may."""
        self.seen: dict[int, int] = {}
        """Processes at the last look, with their starts."""
        self.heard = time.monotonic()
        self.hello: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.reason = ""
        """Why it was killed, or how it ended."""
        self.has_late_call = False
        """True once a call has passed its limit: the episodes of all other calls are bystanders."""

    def kill(self, reason: str) -> None:
        """Let the guard kill the worker with everything below it, and do it ourselves if that takes too long."""
        self.reason = self.reason or reason
        if self.process is None or self.process.returncode is not None:
            return
        if not self.hello.done():
            # there may be no guard yet
            self.kill_now()
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
            # the user's code may have stopped it
            self.process.send_signal(signal.SIGCONT)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self.kill_now)

    def kill_now(self) -> None:
        """Kill the guard and the worker with everything below them, if they have not ended."""
        if self.process is not None and self.process.returncode is None:
            kill_all(self.process.pid, self.seen)

    @property
    def is_proved(self) -> bool:
        """Whether it has worked, so that its end is no reason for a longer pause."""
        is_old = self.loaded_at is not None and time.monotonic() - self.loaded_at > PROVED_SECONDS
        return self.has_completed or is_old

    def fail_calls(self) -> None:
        """Fail all calls under way."""
        for future in [*self.calls.values(), self.hello]:
            if not future.done():
                words = f"worker {self.name} {self.reason}"
                future.set_exception(EpisodeError("env_lost", words, is_bystander=self.has_late_call))
                # a hello that nobody waits for any more
                future.exception()
        self.calls.clear()


class WorkerPool:
    """Workers of one environment, as an asynchronous context.

    Args:
        spec: what to run.
        on_event: called with the name of each event to count: `restart`, `timeout`, `silent`, `processes`.
    """

    def __init__(self, spec: EnvironmentSpec, on_event: Callable[[str], None] = lambda event: None) -> None:
        self.spec, self._on_event = spec, on_event
        self.workers: dict[bytes, Worker] = {}
        """Living workers, by identity."""
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._hopeless: dict[str, str] = {}
        """Reasons why workers can't load the environment, by name."""
        self._has_loaded, self._unusable, self.last_end = False, "", ""
        self.examples: Examples | None = None
        """Number of the environment's own examples by split, once it has been loaded; None if it has none."""
        self.has_group_scores = False
        """True if the environment scores the episodes of a group together, once it has been loaded."""
        self.takes_token_ids = False
        """True for a reward function that takes `completion_ids`, once it has been loaded."""
        self._closing = asyncio.Event()
        self._noun = "reward function" if spec.use == "reward" else "environment"
        self._labels = {spec.use: spec.name}
        """What a line of the log is about."""

    async def __aenter__(self) -> Self:
        """Start the workers. Returns at once; `episode` waits for the first that has loaded the environment."""
        # a short path: addresses of ipc have at most 107 bytes
        self._folder = tempfile.TemporaryDirectory(prefix="env-", ignore_cleanup_errors=True)
        self._address = f"ipc://{self._folder.name}/w"
        # the context of the process: ending one of our own waits without a limit for the threads of libzmq
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self._address)
        self.start(self._receive())
        self.start(self._watch())
        names = [f"{self.spec.name}-{number}" for number in range(self.spec.workers)]
        self._keepers = [self.start(self._keep_running(name)) for name in names]
        return self

    async def __aexit__(self, *error: object) -> None:
        """Kill all workers."""
        self._closing.set()
        self.freed()
        try:
            for one in list(self.workers.values()):
                one.kill("was ended with its actor")
            await asyncio.wait(self._keepers, timeout=CLOSE_SECONDS)
        finally:
            # also after a cancellation of this
            for one in list(self.workers.values()):
                one.reason = one.reason or "was ended with its actor"
                one.fail_calls()
            for task in self._tasks - self._calls:
                task.cancel()
            try:
                # the calls have failed, and tell their callers so
                await asyncio.gather(*self._tasks, return_exceptions=True)
            finally:
                self._socket.close(0)
                self._folder.cleanup()

    @property
    def num_ready(self) -> int:
        """Number of workers that have loaded the environment."""
        return sum(bool(one.shape) for one in self.workers.values())

    async def episode(self, timeout: float) -> "EpisodeCalls":
        """Return a new episode, to be entered by `async with`, once a worker has room for it.

        Args:
            timeout: seconds to wait.

        Raises:
            EpisodeError: `env_load`: the environment can't be loaded; `env_lost`: no worker has had room in time, or
                the pool has ended.
        """
        deadline = time.monotonic() + timeout
        one = await self.with_room(deadline, timeout)
        return EpisodeCalls(self, one, next(self._numbers), partial(self.with_room, deadline, timeout))

    async def group(self, size: int, timeout: float) -> "GroupCalls":
        """Return new episodes on one worker, to be entered together by `async with`, once one has room for all.

        Args:
            size: number of episodes.
            timeout: seconds to wait.

        Raises:
            EpisodeError: as `episode`.
            ValueError: no worker may have so many episodes.
        """
        if size < 1:
            raise ValueError(f"{self.spec.title}: a group of {size}; it needs at least one episode")
        if size > self.spec.episodes:
            raise ValueError(
                f"{self.spec.title}: a group of {size} needs as many places on one worker, but episodes "
                f"is {self.spec.episodes}; raise episodes to at least {size}"
            )
        deadline = time.monotonic() + timeout
        one = await self.with_room(deadline, timeout, size)
        room = partial(self.with_room, deadline, timeout, size)
        return GroupCalls(self, [EpisodeCalls(self, one, next(self._numbers)) for _ in range(size)], room)

    async def with_room(self, deadline: float, timeout: float, size: int = 1) -> Worker:
        """Return the worker with the fewest episodes, once one has room for `size` more; raise as `episode`."""
        while True:
            if self._unusable:
                raise EpisodeError("env_load", self._unusable)
            if self._closing.is_set():
                raise EpisodeError("env_lost", f"{self.spec.title}: its workers were ended")
            ready = [one for one in self.workers.values() if one.shape and not one.reason]
            free = [one for one in ready if one.num_episodes + size <= self.spec.episodes]
            if free:
                return min(free, key=lambda one: one.num_episodes)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                busy = sum(one.num_episodes for one in ready)
                last = f"; the last worker to end {self.last_end}" if self.last_end and not ready else ""
                more = f" for {size} episodes" if size > 1 else ""
                raise EpisodeError(
                    "env_lost",
                    f"{self.spec.title}: no worker had room{more} for {timeout:g} s: {len(ready)} of "
                    f"{self.spec.workers} are ready, with {busy} episodes; raise workers or episodes{last}",
                ) from None

    async def call(self, one: Worker, kind: str, **content: Any) -> Message:
        """Return the answer to a call. A call that takes too long costs the worker its life.

        Raises:
            EpisodeError: the user's code has raised, the call took too long, can't be sent, or the worker is gone.
        """
        if one.identity not in self.workers or one.reason:
            # whatever has ended it, it was not what this episode does
            raise EpisodeError("env_lost", f"worker {one.name} {one.reason}", is_bystander=True)
        number = next(self._numbers)
        try:
            data = pack({"kind": kind, "call": number, **content})
        except (TypeError, ValueError, OverflowError) as error:
            # a date in a row, say
            words = f"{self.spec.title}: a {kind} can't be sent: {error}"
            raise EpisodeError(CAUSES.get(kind, "env_lost"), words) from error
        one.calls[number] = asyncio.get_running_loop().create_future()
        # of its own: the user's function goes on if the caller is cancelled, and so does its limit
        return await asyncio.shield(self.start_call(self._answered(one, kind, number, data)))

    async def _answered(self, one: Worker, kind: str, number: int, data: bytes) -> Message:
        """Send a call and return its answer; kill the worker at the limit."""
        future, seconds = one.calls[number], self.spec.limits.of(kind)
        try:
            await self._send(one, data)
            if not await _comes(future, seconds):
                self._on_event("timeout")
                one.has_late_call = True
                one.kill(f"was killed: a {kind} took more than {seconds:g} s")
                raise EpisodeError(
                    "env_timeout",
                    f"{self.spec.title}: a {kind} took more than {seconds:g} s (limit of {kind}); "
                    f"worker {one.name} was killed",
                )
            answer = future.result()
        finally:
            one.calls.pop(number, None)
        if answer["kind"] == "failed":
            words = f"{self.spec.title}, {kind}: {answer.get('error')}"
            raise EpisodeError(CAUSES.get(kind, "env_lost"), words, str(answer.get("trace", "")), answer)
        return answer

    def freed(self) -> None:
        """Note that a worker has room again, or that there is one more or less."""
        self._changed.set()

    async def _send(self, one: Worker, data: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the worker is gone, which fails its calls
            await self._socket.send_multipart([one.identity, data])

    # --- the life of a worker ------------------------------------------------------------------------------------

    async def _keep_running(self, name: str) -> None:
        """Run a worker, and its successors."""
        pause, failed_starts = RESTART_SECONDS, 0
        while not self._closing.is_set() and not self._unusable:
            one = Worker(name)
            self.workers[one.identity] = one
            try:
                await self._run(one)
            except Exception as error:  # noqa: BLE001 - a keeper that ends without a word leaves a pool that only waits
                one.hopeless = one.reason = f"can't be run: {type(error).__name__}: {error}"
            finally:
                del self.workers[one.identity]
                one.reason = self.last_end = one.reason or "ended"
                one.fail_calls()
                self.freed()
            if self._closing.is_set():
                return
            failed_starts = 0 if one.shape else failed_starts + 1
            if one.hopeless or failed_starts >= FAILED_STARTS:
                times = f"no worker could start {FAILED_STARTS} times in a row: {one.reason}"
                self._hopeless[name] = one.hopeless or times
            pause = RESTART_SECONDS if one.is_proved else min(2 * pause, LONGEST_RESTART_SECONDS)
            self._on_event("restart")
            log.warning("worker ended", **self._labels, worker=name, reason=one.reason, pause=pause)
            # what has been loaded once is no wrong path, and while another worker still tries it may be right
            if not self._has_loaded and len(self._hopeless) == self.spec.workers:
                self._give_up(self._hopeless[name])
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)

    async def _run(self, one: Worker) -> None:
        """Start a process, let it load the environment, and wait for its end."""
        numbers = [str(os.getpid()), str(self.spec.limits.processes)]
        arguments = [str(PROGRAM), self._address, one.identity.decode(), *numbers]
        variables = {**os.environ, **self.spec.variables}
        ours = {name: value for name, value in FOR_THE_INTERPRETER.items() if name not in variables}
        async with _printed() as streams:
            try:
                one.process = await asyncio.create_subprocess_exec(
                    self.spec.python or sys.executable,
                    *arguments,
                    *ours,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=streams["stdout"].write_end,
                    stderr=streams["stderr"].write_end,
                    cwd=self.spec.directory or None,
                    env=variables | ours,
                    start_new_session=True,
                )
            except OSError as error:
                one.reason = f"can't be started: {error}"
                return
            printing = [self.start(self._print(one, name, stream)) for name, stream in streams.items()]
            await self._until_over(one)
            await asyncio.wait(printing, timeout=1.0)

    async def _until_over(self, one: Worker) -> None:
        """Let a new process load the environment, and wait for its end."""
        assert one.process is not None
        if self._closing.is_set():
            one.kill("was ended with its actor")
        try:
            loading = self.start(self._load(one))
            code = await one.process.wait()
            loading.cancel()
            if code == TOO_MANY_PROCESSES:
                self._on_event("processes")
                one.reason = f"was killed: it had more than {self.spec.limits.processes} processes (limit of processes)"
            one.reason = one.reason or (f"was killed by signal {-code}" if code < 0 else f"ended with status {code}")
        finally:
            # after a cancellation
            one.reason = one.reason or "was ended with its actor"
            one.kill_now()
            if one.process.returncode is not None:
                kill_left(one.process.pid, one.seen)

    async def _load(self, one: Worker) -> None:
        seconds = self.spec.limits.load
        try:
            if not await _comes(one.hello, seconds):
                one.kill(f"has not said hello within {seconds:g} s (limit of load)")
                return
            hello = one.hello.result()
            if hello.get("protocol") != PROTOCOL:
                one.kill(f"speaks version {hello.get('protocol')} of the protocol, not {PROTOCOL}")
                return
            use, shapes = self.spec.use, SHAPES[self.spec.use]
            answer = await self.call(one, "load", use=use, path=self.spec.path, options=self.spec.options)
            if answer.get("shape") not in shapes:
                one.kill(f"answered a load with the shape {answer.get('shape')!r}")
                return
            if not _are_counts(examples := answer.get("examples")):
                one.kill(f"answered a load with the examples {examples!r}")
                return
            self.examples, self.has_group_scores = examples, answer.get("group_scores") is True
            self.takes_token_ids = answer.get("completion_ids") is True
            one.shape, one.loaded_at, self._has_loaded = answer["shape"], time.monotonic(), True
            self._hopeless.clear()
            self.freed()
        except EpisodeError as failure:
            if failure.cause == "env_load":
                # the same file fails everywhere
                one.hopeless = str(failure)
            one.kill(f"can't load the {self._noun}: {failure}")

    def _give_up(self, why: str) -> None:
        self._unusable = f"{self.spec.title} can't be used: {why}"
        log.error("workers unusable", **self._labels, reason=why)
        self.freed()

    async def _print(self, one: Worker, name: str, stream: "_Stream") -> None:
        """Log what a worker prints."""
        stream.close_write_end()
        lines = PrintedLines()
        while data := await stream.reader.read(READ_BYTES):
            for text in lines.add(data):
                log.info(text, **self._labels, worker=one.name, stream=name)
        for text in lines.end():
            log.info(text, **self._labels, worker=one.name, stream=name)

    # --- messages ------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            identity, data = (await self._socket.recv_multipart())[:2]
            one = self.workers.get(identity)
            if one is None:  # of a worker that was given up
                continue
            try:
                self._take(one, unpack(data))
            except Exception as error:  # noqa: BLE001 - nothing that one worker sends may end the messages of all
                one.kill(f"was killed: it sent what is no message of the protocol: {type(error).__name__}: {error}")

    def _take(self, one: Worker, message: Message) -> None:
        one.heard = time.monotonic()
        if message["kind"] == "hello":
            if not one.hello.done():
                one.hello.set_result(message)
        elif message["kind"] in ("answer", "failed"):
            future = one.calls.get(message["call"])
            if future is not None and not future.done():
                future.set_result(message)
        elif message["kind"] == "sample":
            number = message["episode"]
            task = self.start(self._sample(one, message["request"], one.answers.get(number), message))
            if (samples := one.samples.get(number)) is not None:
                samples.add(task)
                task.add_done_callback(samples.discard)
        elif message["kind"] != "beat":
            raise ValueError(f"kind {message['kind']!r}")

    async def _sample(self, one: Worker, request: Any, ask: Answer | None, message: Message) -> None:
        """Answer the request of an environment that drives. A failure reaches the user's code as SampleError."""
        answer: Message = {"kind": "sampled", "request": request}
        try:
            if ask is None:
                raise RuntimeError("the episode is over")
            sampled = await ask(message["messages"], message.get("options") or {})
            data = pack(answer | {"message": sampled})
        except Exception as error:  # noqa: BLE001 - told to the user's code, which may go on or raise it
            data = pack(answer | {"error": f"{type(error).__name__}: {error}"[:TEXT_CHARACTERS]})
        await self._send(one, data)

    async def _watch(self) -> None:
        """Send beats; kill workers that are silent."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            # after a pause of this process the beats of the workers are still to be read
            was_held_up, last = now - last > 2 * BEAT_SECONDS, now
            try:
                await self._look(may_be_silent=not was_held_up)
            except Exception as error:  # noqa: BLE001 - without this task no limit of a process would hold
                log.error("workers not watched", **self._labels, reason=f"{type(error).__name__}: {error}")

    async def _look(self, may_be_silent: bool) -> None:
        """Send a beat to each worker, note the processes below it, and kill it if it is silent."""
        limits = self.spec.limits
        # one search for all, in a thread: it takes milliseconds for each thousand processes of the machine
        processes = await asyncio.to_thread(snapshot)
        for one in list(self.workers.values()):
            if one.process is None or one.reason:
                continue
            await self._send(one, pack({"kind": "beat"}))
            # with those of the last look: they are no longer below a worker that has just ended
            before = [n for n, started in one.seen.items() if n in processes and processes[n].started == started]
            one.seen = below([one.process.pid, *before], processes)
            silent = time.monotonic() - one.heard
            if may_be_silent and one.hello.done() and silent > limits.silence:
                self._on_event("silent")
                one.kill(
                    f"was killed: not a beat for {silent:.0f} s (limit of silence); the process was stopped, or an "
                    "async function blocks its event loop"
                )

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine beside its caller, until the end of the pool."""
        task = asyncio.get_running_loop().create_task(work)
        # asyncio itself holds only a weak reference to a running task
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def start_call(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine that ends by itself at the end of the pool, because its worker has ended."""
        task = self.start(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, EpisodeError):
            # an EpisodeError is its caller's; without one, nobody is left to hear of it
            log.error("task failed", **self._labels, reason=f"{type(error).__name__}: {error}")


async def describe(spec: EnvironmentSpec) -> Examples | None:
    """Return the number of the environment's own examples by split; None if it has none. A worker is asked, and ended.

    Raises:
        EpisodeError: `env_load`: the environment can't be loaded.
    """
    async with WorkerPool(replace(spec, workers=1)) as pool:
        # limited by the starts of a worker and the limit of a load
        await pool.with_room(math.inf, math.inf)
        return pool.examples


def _are_counts(examples: Any) -> bool:
    """Return whether a worker's answer about its examples is one: nothing, or a count or None for each split."""
    if not isinstance(examples, dict):
        return examples is None
    return examples.keys() == {"train", "eval"} and all(
        count is None or (isinstance(count, int) and count >= 0) for count in examples.values()
    )


async def _comes(future: "asyncio.Future[Message]", seconds: float) -> bool:
    """Wait for a future; return whether it is done. If this process was held up, what has come is still to be read."""
    for wait in (seconds, GRACE_SECONDS):
        await asyncio.wait([future], timeout=wait)
    return future.done()


class _Stream:
    """Pipe from a worker. Of our own: asyncio's wait for a process also waits for all who hold its pipes."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, write_end: int) -> None:
        self.reader, self._transport, self.write_end = reader, transport, write_end

    @classmethod
    async def open(cls) -> Self:
        """Return a new pipe."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        pipe = os.fdopen(read_end, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        return cls(reader, transport, write_end)

    def close_write_end(self) -> None:
        """Close our copy of the worker's end, so that the stream ends with the worker."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_write_end()
        self._transport.close()


@contextlib.asynccontextmanager
async def _printed() -> AsyncIterator[dict[str, _Stream]]:
    """Open the streams of a worker by name, and close them."""
    streams = {name: await _Stream.open() for name in ("stdout", "stderr")}
    try:
        yield streams
    finally:
        for stream in streams.values():
            stream.close()


class EpisodeCalls:
    """Calls of one episode, on the worker that holds it. To be entered and closed by `async with`.

    Args:
        room: waits for a worker with room; None for an episode of a group, for which the group takes a place.
    """

    def __init__(
        self, pool: WorkerPool, one: Worker, number: int, room: Callable[[], Awaitable[Worker]] | None = None
    ) -> None:
        self._pool, self._worker, self._room = pool, one, room
        self.number = number
        self.columns: Json = {}
        """Further columns of the example for reward functions, after `reset` or `run`."""
        self._open = self._has_place = False
        self.is_abandoned = False
        """True once a call was cancelled: the user's function may still run, and further calls stand behind it."""

    @property
    def is_driving(self) -> bool:
        """True if the environment drives: `run` in place of `reset` and `step`."""
        return self._worker.shape == "driving"

    async def __aenter__(self) -> Self:
        """Take a place on a worker, from now on: an episode that is never entered holds none.

        Raises:
            EpisodeError: as `WorkerPool.episode`.
            RuntimeError: the episode belongs to a group that has not been entered, or was closed.
        """
        if self._has_place:
            # with its group; who leaves first closes it
            return self
        if self._room is None:
            raise RuntimeError("an episode of a group is entered with its group: async with await pool.group(…)")
        self.take_place(await self._room())
        return self

    def take_place(self, one: Worker) -> None:
        """Be on a worker, which has room."""
        self._worker, self._has_place = one, True
        one.num_episodes += 1

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close the episode. Who was cancelled, or has given up a call, does not wait for what the user's code does."""
        if not self._has_place:
            return
        self._has_place = False
        closing = self._pool.start_call(self._close())
        if not self.is_abandoned and not isinstance(error, asyncio.CancelledError):
            await asyncio.shield(closing)

    async def _close(self) -> None:
        """Give the place back once the user's code has ended; its failure is logged, as the rewards are there."""
        try:
            if self._open:
                await self._call("close")
                self._worker.has_completed = True
        except EpisodeError as failure:
            log.warning("episode not closed", reason=str(failure))
        finally:
            self._worker.num_episodes -= 1
            self._pool.freed()

    async def reset(self, row: Json, seed: int) -> Message:
        """Begin; return the first messages, and the tools.

        Raises:
            EpisodeError: as `WorkerPool.call`, here and in all methods.
        """
        self._open = True
        turn = await self._call("reset", row=row, seed=seed)
        self.columns = turn.get("columns") or {}
        return turn

    async def step(self, message: Json) -> Message:
        """Return the environment's answer to the model's message: `shapes.Turn` as a map."""
        return await self._call("step", message=message)

    async def score(self) -> Rewards:
        """Return the environment's own rewards by name."""
        rewards: Rewards = (await self._call("score"))["rewards"]
        return rewards

    async def run(self, row: Json, seed: int, answer: Answer) -> Rewards:
        """Let the environment drive the episode; return its rewards by name.

        Args:
            answer: samples each message that the environment asks for.
        """
        self._open = True
        samples: set[asyncio.Task[None]] = set()
        self._worker.answers[self.number], self._worker.samples[self.number] = answer, samples
        try:
            ended = await self._call("run", row=row, seed=seed)
            self.columns = ended.get("columns") or {}
            rewards: Rewards = ended["rewards"]
            return rewards
        finally:
            del self._worker.answers[self.number], self._worker.samples[self.number]
            # what the user's code has asked for and not awaited must not sample for an episode that is over
            under_way = list(samples)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _call(self, kind: str, **content: Any) -> Message:
        try:
            return await self._pool.call(self._worker, kind, episode=self.number, **content)
        except asyncio.CancelledError:
            self.is_abandoned = True
            raise


class GroupCalls:
    """Episodes on one worker, of environments that score a group together. To be entered by `async with`.

    `async with await pool.group(4, timeout) as group: …` takes all places at once, and closes all episodes at its end;
    an episode may be closed before, by an `async with` of its own.
    """

    def __init__(
        self, pool: WorkerPool, episodes: Sequence[EpisodeCalls], room: Callable[[], Awaitable[Worker]]
    ) -> None:
        self._pool, self._room = pool, room
        self.episodes = list(episodes)

    def __len__(self) -> int:
        return len(self.episodes)

    def __iter__(self) -> Iterator[EpisodeCalls]:
        return iter(self.episodes)

    def __getitem__(self, index: int) -> EpisodeCalls:
        return self.episodes[index]

    async def __aenter__(self) -> Self:
        """Take a place for each episode on one worker: a group that is never entered holds none.

        Raises:
            EpisodeError: as `WorkerPool.episode`.
        """
        self._worker = await self._room()
        for episode in self.episodes:
            episode.take_place(self._worker)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close the episodes."""
        closing = [self._pool.start_call(episode.__aexit__(kind, error, trace)) for episode in self.episodes]
        if closing and not isinstance(error, asyncio.CancelledError):
            await asyncio.shield(asyncio.gather(*closing, return_exceptions=True))

    async def score(self, episodes: Sequence[EpisodeCalls] | None = None) -> list[Rewards]:
        """Return the rewards by name of each episode, from the environment's `score_group`.

        Args:
            episodes: those that have ended and not failed; all by default.

        Raises:
            EpisodeError: as `WorkerPool.call`.
        """
        numbers = [episode.number for episode in (self.episodes if episodes is None else episodes)]
        rewards: list[Rewards] = (await self._pool.call(self._worker, "score_group", episodes=numbers))["rewards"]
        return rewards
