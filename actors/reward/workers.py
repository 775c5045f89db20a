"""Reward functions in worker processes, with an interpreter and packages of their own.

The reward actor is threads, and a pool of workers lives on an event loop: one thread runs the loop of all pools. A
scoring thread hands over a call and waits for its future, which always comes to an end. The time limit of a call begins
when a worker gets the call, so a worker that starts again makes no other call late.

A call that hangs costs its worker the life, and with it the other calls there. Whose fault it was decides what follows:

    a call passes its limit             late; the others are called again
    the worker dies, with a single call the attempt fails as `reward_lost`
    the worker dies, with several       each is called again on a worker of its own; the one at fault dies there alone
    the limit passes on a worker that   the same: the call that hangs may be any of them
    has been silent meanwhile
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.environments.errors import EpisodeError
from actors.environments.pool import CLOSE_SECONDS, Worker, WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from actors.environments.worker.wire import BEAT_SECONDS, TooLargeError, pack
from actors.reward.errors import LateError, RewardError, WorkerTracebackError
from bus.threads import start
from schemas.config.data import WorkerProcessConfig
from schemas.errors import ConfigError

PLACES = 1 << 20
"""Calls that a worker may have at the same time: any number. A call that takes all places is alone."""
SILENT_SECONDS = 2 * BEAT_SECONDS
"""Time without a beat after which a function may block its worker: the event loop, or the interpreter's lock.

A machine under load is silent as well. Then calls are repeated one by one, which costs time alone.
"""
MOST_REPEATS = 3
"""Times that a call is repeated among others, because another one was late; after that it gets a worker of its own."""
T = TypeVar("T")


@dataclass(eq=False)
class _Placed:
    """Place of a call on a worker."""

    worker: Worker
    had_company: bool = False
    """True if another call was on the worker at any time of this one."""


class WorkerFunction:
    """User function in worker processes, for any number of calling threads.

    Args:
        pool: its workers.
        host: owner of the event loop on which the pool lives.
        timeout: seconds of a call, on a worker.
        load_timeout: seconds of a worker's start.
    """

    def __init__(self, pool: WorkerPool, host: "WorkerHost", timeout: float, load_timeout: float) -> None:
        self._pool, self._host, self._timeout = pool, host, timeout
        # for a worker that starts, and that has another call to end before
        self._wait_seconds = load_timeout + timeout
        self._placed: dict[bytes, set[_Placed]] = {}
        """Calls under way, by worker."""
        self._num_waiting_alone = 0
        self._nobody_waits_alone = asyncio.Event()
        self._nobody_waits_alone.set()

    @property
    def takes_token_ids(self) -> bool:
        """True if the function accepts `completion_ids`."""
        return self._pool.takes_token_ids

    def __call__(self, **arguments: Any) -> Any:
        """Call the function and return its values, not checked; raise as `submit`."""
        return self.submit(arguments, lambda values: values).result()

    def submit(self, arguments: Mapping[str, Any], check: Callable[[Any], T]) -> "Future[T]":
        """Start a call, and return the future of its values.

        The future fails with a LateError for a call that took too long, and with a RewardError for any other failure.

        Args:
            arguments: keyword arguments.
            check: returns the values in the form in which they are used; raises RewardError.

        Raises:
            RuntimeError: the workers have been ended.
        """
        return self._host.submit(self._call(arguments, check))

    async def _call(self, arguments: Mapping[str, Any], check: Callable[[Any], T]) -> T:
        is_alone, num_repeats = False, 0
        while True:
            async with self._place(is_alone) as placed:
                try:
                    answer = await self._pool.call(placed.worker, "reward", arguments=arguments)
                    placed.worker.has_completed = True
                    if "values" not in answer:
                        returned = answer.get("type")
                        words = f"{self._name} returned {returned}, expected a list with a value for each completion"
                        raise RewardError("reward_invalid", words)
                    return check(answer["values"])
                except EpisodeError as error:
                    self._raise_if_its_own(error, placed)
                    num_repeats += 1
                    is_alone = self._is_suspect(placed) or num_repeats >= MOST_REPEATS

    @property
    def _name(self) -> str:
        return self._pool.spec.name

    def _raise_if_its_own(self, error: EpisodeError, placed: _Placed) -> None:
        """Raise what a call's own function has done; return if the failure may be another call's.

        Raises:
            RewardError, LateError: as `submit`.
        """
        if error.said:
            placed.worker.has_completed = True
            raise _raised(self._name, error.said) from WorkerTracebackError(error.trace)
        if error.cause not in ("env_timeout", "env_lost"):
            reason = "too_large" if isinstance(error.__cause__, TooLargeError) else "reward_raised"
            raise RewardError(reason, f"{self._name}: its arguments can't be sent: {error.__cause__}") from error
        if placed.had_company and self._is_suspect(placed):
            return
        if error.cause == "env_timeout":
            raise LateError(str(error)) from error
        if not placed.worker.has_late_call:
            words = f"{self._name}: worker {placed.worker.name} {placed.worker.reason} during a call"
            raise RewardError("reward_lost", words) from error

    def _is_suspect(self, placed: _Placed) -> bool:
        """Return whether any call of a worker may be to blame for its end.

        A late call alone is to blame, unless something has blocked the worker: then the others are late through it.
        """
        worker = placed.worker
        return not worker.has_late_call or time.monotonic() - worker.heard > SILENT_SECONDS

    @contextlib.asynccontextmanager
    async def _place(self, is_alone: bool) -> AsyncIterator[_Placed]:
        """Wait for a place on a worker, and hold it.

        Raises:
            RewardError: no worker has been ready in time, or the workers have been ended.
        """
        size = PLACES if is_alone else 1
        placed = _Placed(await self._with_room(is_alone, size))
        worker = placed.worker
        worker.num_episodes += size
        others = self._placed.setdefault(worker.identity, set())
        for one in others:
            one.had_company = placed.had_company = True
        others.add(placed)
        try:
            yield placed
        finally:
            others.discard(placed)
            if not others:
                self._placed.pop(worker.identity, None)
            worker.num_episodes -= size
            self._pool.freed()

    async def _with_room(self, is_alone: bool, size: int) -> Worker:
        try:
            if not is_alone:
                # or a call that needs a worker of its own would never see one without calls
                async with asyncio.timeout(self._wait_seconds):
                    await self._nobody_waits_alone.wait()
                return await self._room(size)
            self._num_waiting_alone += 1
            self._nobody_waits_alone.clear()
            try:
                return await self._room(size)
            finally:
                self._num_waiting_alone -= 1
                if not self._num_waiting_alone:
                    self._nobody_waits_alone.set()
        except (EpisodeError, TimeoutError) as error:
            last = f"; the last one {self._pool.last_end}" if self._pool.last_end else ""
            words = f"{self._name}: no worker was ready for {self._wait_seconds:g} s (load_timeout + reward.timeout)"
            raise RewardError("reward_lost", words + last) from error

    async def _room(self, size: int) -> Worker:
        return await self._pool.with_room(time.monotonic() + self._wait_seconds, self._wait_seconds, size)


class WorkerHost:
    """Owner of the workers of all reward functions, and of the thread with their event loop.

    Args:
        timeout: seconds of a call (reward.timeout).
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = asyncio.Event()
        self._functions: dict[str, WorkerPool] = {}
        """Workers by the key of the function's path."""

    def add(
        self,
        name: str,
        path: str,
        key: str,
        config: WorkerProcessConfig,
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> WorkerFunction:
        """Start the workers of a function. `wait_until_loaded` tells whether they can use it.

        Args:
            name: name of the function, for messages and logs.
            path: path of the function.
            key: configuration key with the path; named in errors.
            config: interpreter and number of workers.
            kwargs: keyword arguments of each call.
            options: arguments of a class, whose instance is then the function; None for a function.

        Raises:
            ConfigError: the keyword arguments can't be sent to a worker.
        """
        try:
            pack({"kind": "reward", "arguments": dict(kwargs)})
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{key.removesuffix('.path')}.kwargs: can't be sent to a worker process: {error}; write texts, "
                "numbers, lists and maps"
            ) from None
        # silence for as long as a call may take: a function in C may keep the interpreter to itself
        limits = Limits(load=config.load_timeout, reward=self._timeout, silence=max(Limits.silence, 2 * self._timeout))
        given = dict(options or {})
        spec = EnvironmentSpec(
            name, path, given, config.other_python, config.workers, PLACES, limits=limits, use="reward"
        )
        pool = WorkerPool(spec)
        if self._thread is None:
            self._start()
        self.submit(pool.__aenter__()).result()
        self._functions[key] = pool
        return WorkerFunction(pool, self, self._timeout, config.load_timeout)

    def wait_until_loaded(self) -> None:
        """Wait until a worker of each function has loaded it.

        Raises:
            ConfigError: functions can't be loaded.
        """
        problems = []
        for key, pool in self._functions.items():
            try:
                self.submit(pool.with_room(float("inf"), float("inf"))).result()
            except EpisodeError as error:
                problems.append(f"{key}: {error}")
        if problems:
            raise ConfigError(*problems)

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the event loop, from another thread.

        Raises:
            RuntimeError: the host is closed.
        """
        try:
            if self._loop is None:
                raise RuntimeError("no workers have been started")
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            # without `close` Python warns of a coroutine that was never awaited
            work.close()
            raise

    def close(self) -> None:
        """Kill all workers and end the thread; calls under way fail. May be called again."""
        if self._thread is None or self._loop is None:
            return
        # RuntimeError: the loop has ended already
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closing.set)
        # a pool gives up waiting after CLOSE_SECONDS; nothing may hold up the exit for longer
        self._thread.join(2 * CLOSE_SECONDS)

    def _start(self) -> None:
        is_running = threading.Event()

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            is_running.set()
            try:
                await self._closing.wait()
            finally:
                ending = [pool.__aexit__(None, None, None) for pool in self._functions.values()]
                await asyncio.gather(*ending, return_exceptions=True)

        self._thread = start("reward-workers", lambda: asyncio.run(main()))
        if not is_running.wait(CLOSE_SECONDS):
            raise ConfigError(f"the event loop of reward workers did not start within {CLOSE_SECONDS:g} s; start again")


def _raised(name: str, said: Mapping[str, Any]) -> RewardError:
    """Return the error for an exception of the user's code, from the worker's message about it."""
    error, place = str(said.get("error", "")), str(said.get("place") or "")
    shown = f" ({place})" if place else ""
    return RewardError("reward_raised", f"{name} raised {error:.500}{shown}", (name, error.partition(":")[0], shown))
