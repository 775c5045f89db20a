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
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, get_args

import structlog

from actors.environments.errors import EpisodeError
from actors.environments.local import LocalPlace
from actors.environments.place import Place
from actors.environments.remote import RemotePlace
from actors.environments.spec import EnvironmentSpec, Json
from actors.environments.worker.wire import BEAT_SECONDS, PROTOCOL, TEXT_CHARACTERS, Message, pack, unpack
from actors.telemetry.spans import span
from schemas.messages import EnvironmentFailure

log = structlog.get_logger("environments")

SHAPES: dict[str, tuple[str, ...]] = {"environment": ("stepped", "driving"), "reward": ("reward",)}
"""Answers to a load, by use."""
RESTART_SECONDS, LONGEST_RESTART_SECONDS = 0.5, 30.0
"""Pause before a worker is replaced; doubled each time a worker ends before it has proved itself."""
LONGEST_LOST_SECONDS = 5.0
"""Longest pause before a worker is replaced whose environment host was lost."""
PROVED_SECONDS = 60.0
"""Life of a loaded worker after which it has proved itself, as it has by a completed episode."""
FAILED_STARTS = 3
"""Starts of a worker without a loaded environment, one after the other, after which there is no hope for it."""
CLOSE_SECONDS = 10.0
"""Longest wait for killed workers at the end."""
GRACE_SECONDS = 1.0
"""Time for an answer that has come, but that this process has not read yet because it was held up itself."""
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

Rewards = dict[str, float | None]
Examples = dict[str, int | None]
"""Number of examples by split, `train` and `eval`; None for no end."""
Answer = Callable[[list[Json], Json], Awaitable[Json]]
"""Coroutine function that samples the next message of a conversation, with the options of the request."""
NumberedAnswer = Callable[[list[Json], Json], Awaitable[tuple[Json, int]]]
"""As `Answer`, with the number of the turn."""
TurnRewards = list[tuple[int, float]]
"""Turns and their rewards."""


class Worker:
    """A process, from its start to its end. Never used again after `ended`."""

    def __init__(self, name: str, place: Place) -> None:
        self.name, self.identity = name, f"{name}/{secrets.token_hex(4)}".encode()
        self.process = place.process(name, self.identity)
        self.calls: dict[int, asyncio.Future[Message]] = {}
        self.answers: dict[int, NumberedAnswer] = {}
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
        self.heard = time.monotonic()
        self.hello: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.reason = ""
        """Why it was killed, or how it ended."""
        self.has_late_call = False
        """True once a call has passed its limit: the episodes of all other calls are bystanders."""
        self.is_bystander = False
        """True if neither the worker nor the user's code is to blame for its end."""

    def kill(self, reason: str) -> None:
        """Let the process end with everything below it."""
        self.reason = self.reason or reason
        self.process.kill()

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
                future.set_exception(
                    EpisodeError("env_lost", words, is_bystander=self.has_late_call or self.is_bystander)
                )
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
        self._labels = spec.labels
        self._place: Place = (
            LocalPlace(spec, self._receive) if spec.hosts is None else RemotePlace(spec, spec.hosts, self._receive)
        )

    async def __aenter__(self) -> Self:
        """Start the workers. Returns at once; `episode` waits for the first that has loaded the environment."""
        await self._place.__aenter__()
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
                await self._place.__aexit__()

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
        future = one.calls[number] = asyncio.get_running_loop().create_future()
        # of its own: the user's function goes on if the caller is cancelled, and so does its limit
        return await asyncio.shield(self.start_call(self._answered(one, kind, number, data, future)))

    async def _answered(
        self, one: Worker, kind: str, number: int, data: bytes, future: "asyncio.Future[Message]"
    ) -> Message:
        """Send a call and return its answer; kill the worker at the limit. The worker may have ended already."""
        seconds = self.spec.limits.of(kind)
        try:
            await one.process.send(data)
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
            raise EpisodeError(_cause(answer, kind), words, str(answer.get("trace", "")), answer)
        return answer

    def freed(self) -> None:
        """Note that a worker has room again, or that there is one more or less."""
        self._changed.set()

    # --- the life of a worker ------------------------------------------------------------------------------------

    async def _keep_running(self, name: str) -> None:
        """Run a worker, and its successors."""
        pause, failed_starts = RESTART_SECONDS, 0
        while not self._closing.is_set() and not self._unusable:
            one = Worker(name, self._place)
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
            # a host that is away may come back, and the code of the environment may be good
            failed_starts = 0 if one.shape or one.is_bystander else failed_starts + 1
            if one.hopeless or failed_starts >= FAILED_STARTS:
                times = f"no worker could start {FAILED_STARTS} times in a row: {one.reason}"
                self._hopeless[name] = one.hopeless or times
            longest = LONGEST_LOST_SECONDS if one.is_bystander else LONGEST_RESTART_SECONDS
            pause = RESTART_SECONDS if one.is_proved else min(2 * pause, longest)
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
        loading = self.start(self._load(one))
        try:
            end = await one.process.run()
        finally:
            loading.cancel()
            # after a cancellation
            one.process.kill_now()
        one.reason, one.is_bystander = one.reason or end.words, end.is_bystander
        if end.event:
            self._on_event(end.event)

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

    # --- messages ------------------------------------------------------------------------------------------------

    def _receive(self, identity: bytes, data: bytes) -> None:
        one = self.workers.get(identity)
        if one is None:  # of a worker that was given up
            return
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

    async def _sample(self, one: Worker, request: Any, ask: NumberedAnswer | None, message: Message) -> None:
        """Answer the request of an environment that drives. A failure reaches the user's code as SampleError."""
        answer: Message = {"kind": "sampled", "request": request}
        try:
            if ask is None:
                raise RuntimeError("the episode is over")
            sampled, turn = await ask(message["messages"], message.get("options") or {})
            data = pack(answer | {"message": sampled, "turn": turn})
        except Exception as error:  # noqa: BLE001 - told to the user's code, which may go on or raise it
            data = pack(answer | {"error": f"{type(error).__name__}: {error}"[:TEXT_CHARACTERS]})
        await one.process.send(data)

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
        await self._place.look()
        for one in list(self.workers.values()):
            if one.reason:
                continue
            await one.process.send(pack({"kind": "beat"}))
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
        EpisodeError: `env_load`: the environment can't be loaded; `env_lost`: no environment host has answered.
    """
    # on this machine limited by the starts of a worker and the limit of a load; a host may stay away
    seconds = math.inf if spec.hosts is None else FAILED_STARTS * spec.limits.load
    async with WorkerPool(replace(spec, workers=1)) as pool:
        await pool.with_room(time.monotonic() + seconds, seconds)
        return pool.examples


def _cause(answer: Message, kind: str) -> EnvironmentFailure:
    """Return what has failed: an agent's `run` may name it, every other call says it by its kind."""
    named = answer.get("cause") if kind == "run" else None
    return next((one for one in get_args(EnvironmentFailure) if one == named), CAUSES.get(kind, "env_lost"))


def _are_counts(examples: Any) -> bool:
    """Return whether a worker's answer about its examples is one: nothing, or a count or None for each split."""
    if not isinstance(examples, dict):
        return examples is None
    return examples.keys() == {"train", "eval"} and all(
        count is None or (isinstance(count, int) and count >= 0) for count in examples.values()
    )


def turn_rewards_of(answer: Mapping[str, Any]) -> TurnRewards:
    """Return the rewards of turns in a worker's message; none where the message has none.

    Raises:
        EpisodeError: `env_score`: these are no pairs of a turn and a finite number.
    """
    try:
        pairs = [(int(turn), float(reward)) for turn, reward in answer.get("turn_rewards") or []]
    except (TypeError, ValueError) as error:
        raise EpisodeError("env_score", f"the worker's rewards of turns are no pairs of numbers: {error}") from error
    if bad := [pair for pair in pairs if pair[0] < 0 or not math.isfinite(pair[1])]:
        raise EpisodeError("env_score", f"turn {bad[0][0]} has the reward {bad[0][1]}; it must be a finite number")
    return pairs


async def _comes(future: "asyncio.Future[Message]", seconds: float) -> bool:
    """Wait for a future; return whether it is done. If this process was held up, what has come is still to be read."""
    for wait in (seconds, GRACE_SECONDS):
        await asyncio.wait([future], timeout=wait)
    return future.done()


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
        self.turn_rewards: TurnRewards = []
        """Rewards that an environment that drives has given to turns, after `run`, also after one that has failed."""
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

    async def run(self, row: Json, seed: int, answer: Answer, session: Json | None = None) -> Rewards:
        """Let the environment drive the episode; return its rewards by name.

        Args:
            answer: samples each message that the environment asks for.
            session: address and key of an agent's session.
        """
        self._open = True
        samples: set[asyncio.Task[None]] = set()
        turns = itertools.count()

        async def numbered(messages: list[Json], options: Json) -> tuple[Json, int]:
            message = await answer(messages, options)
            # nothing else has run since the turn came: turns are counted as the recorder counts them
            return message, next(turns)

        self._worker.answers[self.number], self._worker.samples[self.number] = numbered, samples
        try:
            agent = {} if session is None else {"session": session}
            ended = await self._call("run", row=row, seed=seed, **agent)
            self.turn_rewards = turn_rewards_of(ended)
            self.columns = ended.get("columns") or {}
            rewards: Rewards = ended["rewards"]
            return rewards
        except EpisodeError as error:
            self.turn_rewards = turn_rewards_of(error.said)
            raise
        finally:
            del self._worker.answers[self.number], self._worker.samples[self.number]
            # what the user's code has asked for and not awaited must not sample for an episode that is over
            under_way = list(samples)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _call(self, kind: str, **content: Any) -> Message:
        try:
            with span(f"environment {kind}", waits=True):
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
        scored = list(self.episodes if episodes is None else episodes)
        numbers = [episode.number for episode in scored]
        answer = await self._pool.call(self._worker, "score_group", episodes=numbers)
        for episode, given in zip(scored, answer.get("turn_rewards") or [], strict=False):
            episode.turn_rewards = turn_rewards_of({"turn_rewards": given})
        rewards: list[Rewards] = answer["rewards"]
        return rewards
