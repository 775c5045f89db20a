"""Runner of user functions: sync functions in threads, async functions on an event loop, with a time limit per group.

Functions in worker processes have a time limit of their own for each call (`actors.reward.workers`).

User code in this process can't be killed. A sync function that does not return keeps its thread, so there are more
threads than calls. An async function that blocks the event loop stops all other async functions. If a blocking
function has returned at other times, only its own call fails, and the others wait for the next process.
`FunctionRunner.worn_out` tells when a new process should take over. User code may raise anything, SystemExit included.
"""

import asyncio
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.reward import functions, values
from actors.reward.errors import LateError, RewardError
from actors.reward.functions import NamedReward
from actors.reward.workers import WorkerFunction
from bus.threads import DaemonWorkers, mark, start
from schemas.messages import RolloutGroup

MAX_STUCK_CALLS = 16
"""Limit of calls that never return and keep their threads; above it a new process takes over.

Calls that might be running a second time (`reward.timeout_retries`) come on top.
"""
STANDSTILL_SECONDS = 30.0
"""Seconds for which a machine under load, or a frozen process, may keep the event loop from iterating."""
TICK_SECONDS = 0.1
"""Interval at which the event loop shows that no call blocks it."""
OWN_FILES = (__file__, functions.__file__, values.__file__)
"""Files that stand between the runner and user code in a traceback."""


@dataclass(frozen=True)
class Tried:
    """Result of calling functions once."""

    values: Mapping[int, Any] = field(default_factory=dict)
    """Checked values of the functions that returned in time, by index."""
    late: Sequence[str] = ()
    """Names of the functions that did not return in time."""
    stalled: bool = False
    """True if a late function waited for an event loop that stands still: it would be late again."""
    blocker: str = ""
    """Name of the function that blocks the event loop; empty if unknown, or if nothing stalled."""


class FunctionRunner:
    """Runner of user functions on groups, for any number of calling threads.

    Args:
        timeout: seconds for all functions of a group.
        num_calls: largest number of calls at the same time.
        max_stuck: number of calls that may be stuck before a new process takes over.
    """

    def __init__(self, timeout: float, num_calls: int, max_stuck: int = MAX_STUCK_CALLS) -> None:
        self.timeout = timeout
        """Seconds for all functions of a group."""
        self.num_calls = self.num_late = 0
        """Calls of functions since the start, and the late calls among them."""
        self._max_stuck = max_stuck
        # a stuck call keeps its thread, and must not keep another call waiting
        self._executor = DaemonWorkers(num_calls + max_stuck, "reward")
        self._counting = threading.Lock()
        self._stuck: dict[Future[Any], str] = {}
        """Name of the function for each call that was given up and still runs."""
        self._has_returned: set[str] = set()
        """Names of async functions that have returned at least once, so do not always block."""
        self._on_loop: dict[asyncio.Task[Any] | None, tuple[str, RolloutGroup]] = {}
        """Function and group of each task on the event loop."""
        self._loop = asyncio.new_event_loop()
        # before the thread runs the loop: `call_soon` is not thread-safe
        self._loop.call_soon(self._tick)
        self._ticked = time.monotonic()
        start("reward-async", self._run_loop)

    def run(self, rewards: Mapping[int, NamedReward], group: RolloutGroup) -> Tried:
        """Call functions once, all at the same time. Late calls are given up.

        Raises:
            RewardError: a function raised, or returned invalid values.
        """
        calls = {self.submit(reward, group): i for i, reward in rewards.items()}
        in_workers = {call for call, i in calls.items() if isinstance(rewards[i].function, WorkerFunction)}
        here = calls.keys() - in_workers
        late = wait(here, self.timeout).not_done if here else set()
        # calls that only wait for another group's blocking call get the time that it takes
        while late and self._held_up(group, [rewards[calls[call]] for call in late]):
            late = wait(late, TICK_SECONDS).not_done
            if late and self._blocker() is None:
                # the event loop has only just come to them
                late = wait(late, self.timeout).not_done
        if in_workers:
            # without a limit here: a worker's limit begins when it gets the call, and kills what hangs
            late |= {call for call in wait(in_workers).done if isinstance(_error(call), LateError)}
        with self._counting:
            self.num_calls += len(calls)
            self.num_late += len(late)
        # looked up before the late calls are given up: cancelled tasks leave the loop, the blocking one among them
        stalled, blocker = self._loop_stalls, self._blocker()
        for call, i in calls.items():
            # cancelling works for calls that wait, on the event loop or for a thread, not for a running thread
            if call in late and call not in in_workers and not call.cancel():
                self._stuck[call] = rewards[i].name
                # called at once if the call has returned meanwhile
                call.add_done_callback(self._stuck.pop)
        names = [rewards[calls[call]].name for call in late]
        # a blocked event loop would make the call late again, so what the others returned is of no use
        if stalled and any(rewards[calls[call]].is_async for call in late):
            return Tried(late=names, stalled=True, blocker=blocker[0] if blocker is not None else "")
        return Tried({i: call.result() for call, i in calls.items() if call not in late}, names)

    def submit(self, reward: NamedReward, group: RolloutGroup) -> Future[Any]:
        """Start a call, and return the future of its checked values.

        Raises:
            RuntimeError: the runner is closed.
        """
        arguments = reward.arguments(group)
        if isinstance(reward.function, WorkerFunction):
            return reward.function.submit(arguments, lambda values: reward.check(values, group))
        if reward.is_async:
            call = self._await(reward, group, arguments)
            try:
                return asyncio.run_coroutine_threadsafe(call, self._loop)
            except RuntimeError:
                # the loop is closed. Without `close` Python warns of a coroutine that was never awaited
                call.close()
                raise
        return self._executor.submit(_run, reward, group, arguments)

    @property
    def stuck(self) -> list[str]:
        """Names of the functions of calls that were given up and still run."""
        return list(self._stuck.values())

    @property
    def worn_out(self) -> str:
        """Reason why a new process should take over; empty while this process can call functions."""
        runs_a_task = asyncio.current_task(self._loop) is not None
        # with a running task its function blocks the loop, and has failed by now; without, the machine is most likely
        # at fault and gets more time
        allowed_seconds = self.timeout + (1.0 if runs_a_task else STANDSTILL_SECONDS)
        if time.monotonic() - self._ticked > allowed_seconds:
            name, _ = self._blocker() or ("one of them", None)
            return f"{name} blocks the event loop of all async reward functions; make it a plain def"
        stuck = Counter(self.stuck)
        if stuck.total() >= self._max_stuck:
            names = ", ".join(f"{name} ({count})" for name, count in stuck.items())
            return (
                f"calls of {names} have not returned within reward.timeout {self.timeout:g} s and keep their threads; "
                "give these functions timeouts of their own"
            )
        return ""

    def close(self) -> None:
        """Stop taking work. Threads of stuck calls are left behind."""

        def end_loop() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            # behind the cancelled tasks in the queue, so that they end first
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(end_loop)
        self._executor.shutdown(wait=False, cancel_futures=True)

    # --- the event loop ------------------------------------------------------------------------------------------

    async def _await(self, reward: NamedReward, group: RolloutGroup, arguments: dict[str, Any]) -> Any:
        task = asyncio.current_task()
        self._on_loop[task] = (reward.name, group)
        try:
            values = await reward.function(**arguments)
            self._has_returned.add(reward.name)
            return reward.check(values, group)
        except RewardError:
            raise
        except BaseException as error:
            # the call was given up: user code may turn the cancellation into any error
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            raise _raised(reward.name, error) from error
        finally:
            del self._on_loop[task]

    def _held_up(self, group: RolloutGroup, late: Sequence[NamedReward]) -> bool:
        """Return whether calls are late only because another group's call blocks the event loop, which fails itself."""
        blocker = self._blocker()
        could_return = all(reward.is_async and reward.name in self._has_returned for reward in late)
        return blocker is not None and blocker[1] is not group and could_return

    def _blocker(self) -> tuple[str, RolloutGroup] | None:
        """Return function and group of the call that blocks the event loop.

        None: nothing blocks, or user code itself has made the blocking task.
        """
        return self._on_loop.get(asyncio.current_task(self._loop)) if self._loop_stalls else None

    @property
    def _loop_stalls(self) -> bool:
        # two intervals: a single tick may be late without any call at fault
        return time.monotonic() - self._ticked >= 2 * TICK_SECONDS

    def _tick(self) -> None:
        self._ticked = time.monotonic()
        mark("reward.loop")
        self._loop.call_later(TICK_SECONDS, self._tick)

    def _run_loop(self) -> None:
        async def end_late_tasks() -> None:
            """Cancel calls that were handed over while the loop was ending, and wait a moment for them."""
            late = asyncio.all_tasks() - {asyncio.current_task()}
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=TICK_SECONDS)

        self._loop.run_forever()
        self._loop.run_until_complete(end_late_tasks())
        self._loop.close()


def _run(reward: NamedReward, group: RolloutGroup, arguments: dict[str, Any]) -> Any:
    try:
        mark("reward.function")
        return reward.check(reward.function(**arguments), group)
    except RewardError:
        raise
    except BaseException as error:
        # SystemExit too: a function that calls sys.exit() fails its own group alone
        raise _raised(reward.name, error) from error


def _error(call: "Future[Any]") -> BaseException | None:
    return None if call.cancelled() else call.exception()


def _raised(name: str, error: BaseException) -> RewardError:
    """Return the error for an exception of user code, with the line in the user's file where it was raised."""
    # the runner's frame goes, so that the logged traceback starts in the user's file
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    # checks have frames too if a lazy result (a generator) raises while its values are read
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in OWN_FILES]
    # the last line inside the function's own file: deeper frames are in libraries
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    place = f" ({Path(frames[0].filename).name}, line {lines[-1]})" if frames else ""
    detail = f"{name} raised {type(error).__name__}: {error!s:.500}{place}"
    return RewardError("reward_raised", detail, (name, type(error).__name__, place))
