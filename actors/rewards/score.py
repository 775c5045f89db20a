"""Calling reward functions on one group and checking what they return.

A group is scored whole or not at all: scoring the survivors of a failure would bias the advantages (P11). Every failure
has a countable reason and names the function. User code may raise whatever it likes, SystemExit included.
"""

import asyncio
import inspect
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.rewards.load import RewardFunction, load_function
from schemas.config.data import RewardFunctionConfig
from schemas.errors import ConfigError
from schemas.messages import RolloutGroup

ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What functions get from us, as from TRL: neither a column nor `kwargs` may take one of these names."""
MAX_STUCK_CALLS = 16
"""Calls that have been given up and keep their threads; with more of them a new process takes over."""
TICK_SECONDS = 0.1
"""The event loop shows this often that nobody blocks it."""


class RewardError(Exception):
    """A group could not be scored. `reason` is one of `reward_raised`, `reward_timeout`, `reward_invalid`.

    `origin` tells what user code raises apart: function, type, file and line. The traceback is that of the cause.
    """

    def __init__(self, reason: str, detail: str, origin: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.reason, self.origin = reason, origin


@dataclass(frozen=True)
class NamedReward:
    """A loaded reward function."""

    name: str
    weight: float
    kwargs: dict[str, Any]
    function: RewardFunction

    @cached_property
    def takes_token_ids(self) -> bool:
        """Whether it may be called with `completion_ids`."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # written in C
            return False
        return any(p.name == "completion_ids" or p.kind is p.VAR_KEYWORD for p in parameters)

    @property
    def is_async(self) -> bool:
        """Whether it runs on the event loop."""
        return inspect.iscoroutinefunction(self.function)


def load_rewards(configs: Sequence[RewardFunctionConfig]) -> list[NamedReward]:
    """The configured functions, loaded; names are the last part of their paths, numbered where they repeat.

    Raises:
        ConfigError: one can't be found, or its kwargs take the name of an argument.
    """
    problems = [
        f"reward.functions.{i}.kwargs.{name}: is what functions receive of the sampled group; use another name"
        for i, config in enumerate(configs)
        for name in sorted(config.kwargs.keys() & set(ARGUMENTS))
    ]
    if problems:
        raise ConfigError(*problems)
    names = [config.path.rpartition(":")[2] for config in configs]
    unique = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
    return [
        NamedReward(name, config.weight, config.kwargs, load_function(config.path, f"reward.functions.{i}.path"))
        for i, (name, config) in enumerate(zip(unique, configs, strict=True))
    ]


class Scorer:
    """Runs functions, sync ones in threads and async ones on one event loop, each group under one timeout.

    User code can't be killed. A sync function that does not return keeps its thread, so there are MAX_STUCK_CALLS
    threads more than `num_calls`, the calls at once. An async one that blocks keeps the loop from all others; where
    it does not always do so, it fails alone, and they wait for the next process. `worn_out` says when that is due.
    """

    def __init__(self, timeout: float, num_calls: int) -> None:
        self._timeout = timeout
        self._pool = ThreadPoolExecutor(num_calls + MAX_STUCK_CALLS, thread_name_prefix="reward")
        self._stuck: dict[Future[list[float]], str] = {}
        self._has_returned: set[str] = set()
        """Async functions that do not always hang."""
        self._on_loop: dict[asyncio.Task[Any] | None, tuple[str, RolloutGroup]] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._tick)
        self._ticked = time.monotonic()
        threading.Thread(target=self._run_loop, name="reward-async", daemon=True).start()

    def score(self, rewards: Sequence[NamedReward], group: RolloutGroup) -> NDArray[np.float64]:
        """Rewards of one group, (F, G); NaN where a function returned None.

        Raises:
            RewardError: a function raised, took too long, or returned something else than one finite number or None
                each.
            ConfigError: a column of the data has the name of an argument.
        """
        if taken := sorted(group.columns.keys() & set(ARGUMENTS)):
            raise ConfigError(
                f"environments[].path: {group.environment} has a column {taken[0]!r}, but under that name reward "
                "functions receive what was sampled; rename the column"
            )
        calls = {self._call(reward, group): reward for reward in rewards}
        late = wait(calls, self._timeout).not_done
        while late and self._held_up(group, [calls[call] for call in late]):
            late = wait(late, TICK_SECONDS).not_done
        if late:
            raise self._give_up({call: reward.name for call, reward in calls.items() if call in late})
        return np.array([call.result() for call in calls], np.float64)

    @property
    def worn_out(self) -> str:
        """Why a new process should take over; empty while this one can score."""
        if time.monotonic() - self._ticked > self._timeout + 1.0:  # by now the call that blocks has failed
            name, _ = self._blocker() or ("one of them", None)
            return f"{name} blocks the event loop of all async reward functions; make it a plain def"
        stuck = Counter(list(self._stuck.values()))
        if stuck.total() >= MAX_STUCK_CALLS:
            names = ", ".join(f"{name} ({count})" for name, count in stuck.items())
            return (
                f"calls of {names} have not returned within reward.timeout {self._timeout:g} s and keep their threads; "
                "give these functions timeouts of their own"
            )
        return ""

    def close(self) -> None:
        """Stop taking work; a stuck thread is left behind."""
        self._loop.call_soon_threadsafe(self._end_loop)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(self, reward: NamedReward, group: RolloutGroup) -> Future[list[float]]:
        arguments = call_arguments(reward, group)
        if reward.is_async:
            return asyncio.run_coroutine_threadsafe(self._await(reward, group, arguments), self._loop)
        return self._pool.submit(_run, reward, arguments, group.num_completions)

    async def _await(self, reward: NamedReward, group: RolloutGroup, arguments: dict[str, Any]) -> list[float]:
        task = asyncio.current_task()
        self._on_loop[task] = (reward.name, group)
        try:
            values = await reward.function(**arguments)
            self._has_returned.add(reward.name)
            return check_values(reward.name, values, group.num_completions)
        except RewardError:
            raise
        except BaseException as error:
            if task is not None and task.cancelling():  # it has been given up
                raise asyncio.CancelledError from error
            raise _raised(reward.name, error) from error
        finally:
            del self._on_loop[task]

    def _give_up(self, late: dict[Future[list[float]], str]) -> RewardError:
        detail = f"{', '.join(late.values())} took more than {self._timeout:g} s (reward.timeout)"
        blocker = self._blocker()
        if blocker is not None:
            detail += f"; {blocker[0]} blocks the event loop of all async reward functions, make it a plain def"
        for call, name in late.items():
            if not call.cancel():
                self._stuck[call] = name
                call.add_done_callback(self._stuck.pop)
        return RewardError("reward_timeout", detail)

    def _held_up(self, group: RolloutGroup, late: Sequence[NamedReward]) -> bool:
        """Whether these calls are late only because a call for another group blocks the loop, and fails for that."""
        blocker = self._blocker()
        could_return = all(reward.is_async and reward.name in self._has_returned for reward in late)
        return blocker is not None and blocker[1] is not group and could_return

    def _blocker(self) -> tuple[str, RolloutGroup] | None:
        """The call that blocks the loop; None where nothing does, or a task that a function has made."""
        if time.monotonic() - self._ticked < 2 * TICK_SECONDS:
            return None
        return self._on_loop.get(asyncio.current_task(self._loop))

    def _tick(self) -> None:
        self._ticked = time.monotonic()
        self._loop.call_later(TICK_SECONDS, self._tick)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _end_loop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)  # behind the cancelled tasks, so that they end first


def _run(reward: NamedReward, arguments: dict[str, Any], size: int) -> list[float]:
    try:
        return check_values(reward.name, reward.function(**arguments), size)
    except RewardError:
        raise
    except BaseException as error:
        raise _raised(reward.name, error) from error


def _raised(name: str, error: BaseException) -> RewardError:
    """What a function raised, and at which line of its file; the cause's traceback begins there."""
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    place = f" ({Path(frames[0].filename).name}, line {lines[-1]})" if frames else ""
    detail = f"{name} raised {type(error).__name__}: {error!s:.500}{place}"
    return RewardError("reward_raised", detail, (name, type(error).__name__, place))


def call_arguments(reward: NamedReward, group: RolloutGroup) -> dict[str, Any]:
    """Keyword arguments as TRL gives them: lists with one item per completion; chat prompts get chat completions.

    What the run gives wins over `kwargs`, and those over columns of the data.
    """
    as_chat, size = not isinstance(group.prompt, str), group.num_completions
    arguments: dict[str, Any] = {name: [value] * size for name, value in group.columns.items()} | reward.kwargs
    arguments["prompts"] = [group.prompt] * size
    arguments["completions"] = [
        [{"role": "assistant", "content": text}] if as_chat else text for text in group.completions
    ]
    if reward.takes_token_ids:
        parts = np.split(group.token_ids, group.completion_offsets[1:-1])
        arguments["completion_ids"] = [part.tolist() for part in parts]
    return arguments


def check_values(name: str, values: Any, size: int) -> list[float]:
    """What a function returned, None as NaN.

    Raises:
        RewardError: wrong length, or something that is neither None nor a finite number.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        raise RewardError("reward_invalid", f"{name} returned {type(values).__name__}, expected a list of {size}")
    items = list(values)
    if len(items) != size:
        raise RewardError("reward_invalid", f"{name} returned {len(items)} values for {size} completions")
    return [_number(name, i, item) for i, item in enumerate(items)]


def _number(name: str, i: int, item: Any) -> float:
    if item is None:
        return float("nan")
    try:
        number = None if isinstance(item, str | bytes) else float(item)  # which would read "1"
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise RewardError("reward_invalid", f"{name} returned {item!r:.60} for completion {i}")
    if not np.isfinite(number):
        raise RewardError(
            "reward_invalid", f"{name} returned {number} for completion {i}; use None for 'not applicable'"
        )
    return number
