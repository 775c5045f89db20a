"""Calling reward functions on one group and checking what they return.

A group is scored whole or not at all: scoring the survivors of a failure would bias the advantages (P11). Every failure
has a countable reason and names the function. User code may raise whatever it likes, SystemExit included.
"""

import asyncio
import inspect
import operator
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages import Steps
from actors.rewards.load import ARGUMENTS, RewardFunction, load_function
from schemas.config.advantages import CustomAdvantageConfig
from schemas.config.data import RewardFunctionConfig, ShapingConfig, StepRewardConfig
from schemas.errors import ConfigError
from schemas.messages import RolloutGroup

MAX_STUCK_CALLS = 16
"""Calls of groups that have failed, or were scored without them, which keep their threads; with more of them a new
process takes over. Those that are called again, and might be at that time, come on top."""
STANDSTILL_SECONDS = 30.0
"""For which a machine under load, or a process that was frozen, may keep the event loop from going round."""
TICK_SECONDS = 0.1
"""The event loop shows this often that nobody blocks it."""
UNSHAPED = ShapingConfig()


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
    shaping: ShapingConfig = UNSHAPED

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

    def arguments(self, group: RolloutGroup) -> dict[str, Any]:
        """What it is called with, by keyword."""
        return call_arguments(self, group)

    def check(self, values: Any, group: RolloutGroup) -> Any:
        """What it returned, as it is used; raises RewardError."""
        return check_values(self.name, values, group.num_completions)


class StepReward(NamedReward):
    """A loaded function that rewards the steps inside completions."""

    def check(self, values: Any, group: RolloutGroup) -> list[Steps]:
        """Its steps of each completion."""
        return check_steps(self.name, values, group.lengths_G.tolist())


class AdvantageFunction(NamedReward):
    """A loaded function that makes advantages of rewards."""

    def on(self, rewards_PG: NDArray[np.float64], lengths_PG: NDArray[np.int64]) -> "AdvantageFunction":
        """It with its two arrays bound, ready to be called."""
        return replace(self, function=partial(self.function, rewards_PG, lengths_PG))

    def arguments(self, group: RolloutGroup) -> dict[str, Any]:
        """Its `kwargs`; the arrays are bound."""
        return self.kwargs

    def check(self, values: Any, group: RolloutGroup) -> Any:
        """As they are: who computes advantages knows their shape."""
        return values


def load_rewards(configs: Sequence[RewardFunctionConfig]) -> list[NamedReward]:
    """The configured functions, loaded; names are the last part of their paths, numbered where they repeat.

    Raises:
        ConfigError: one can't be found, or its kwargs take the name of an argument.
    """
    problems = [
        problem
        for i, config in enumerate(configs)
        for problem in _taken_names(f"reward.functions.{i}.kwargs", config.kwargs)
    ]
    if problems:
        raise ConfigError(*problems)
    names = [config.path.rpartition(":")[2] for config in configs]
    unique = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
    shapings = [ShapingConfig(bias=config.bias, scale=config.scale, clip=config.clip) for config in configs]
    functions = [load_function(config.path, f"reward.functions.{i}.path") for i, config in enumerate(configs)]
    return [
        NamedReward(name, config.weight, config.kwargs, function, shaping)
        for name, config, function, shaping in zip(unique, configs, functions, shapings, strict=True)
    ]


def load_steps(config: StepRewardConfig) -> StepReward:
    """The configured function of `reward.steps`.

    Raises:
        ConfigError: as for reward functions.
    """
    if problems := _taken_names("reward.steps.kwargs", config.kwargs):
        raise ConfigError(*problems)
    name = config.path.rpartition(":")[2]
    return StepReward(name, 0.0, config.kwargs, load_function(config.path, "reward.steps.path"))


def load_advantage(config: CustomAdvantageConfig) -> AdvantageFunction:
    """The configured function of `reward.advantage`.

    Raises:
        ConfigError: it can't be found.
    """
    name = config.path.rpartition(":")[2]
    return AdvantageFunction(name, 0.0, config.kwargs, load_function(config.path, "reward.advantage.path"))


def _taken_names(key: str, kwargs: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}.{name}: is what functions receive of the sampled group; use another name"
        for name in sorted(kwargs.keys() & set(ARGUMENTS))
    ]


class Scorer:
    """Runs functions, sync ones in threads and async ones on one event loop, each group under one timeout.

    Those that are late are called again, `retries` times. What is still late counts as `on_timeout` says, in train
    groups; an evaluation is not given values that nobody measured, so there it fails.

    User code can't be killed. A sync function that does not return keeps its thread, so there are more threads than
    calls at once. An async one that blocks keeps the loop from all others; where it does not always do so, it fails
    alone, and they wait for the next process. `worn_out` says when that is due.

    Args:
        timeout: seconds for the functions of one group, each time that they are called.
        num_calls: calls at once.
        retries: further calls of a function that is late.
        on_timeout: what becomes of one that is late to the last.
        note_late: told of functions that are late, in words, and of what comes next: `retried`, or the outcome.
    """

    def __init__(
        self,
        timeout: float,
        num_calls: int,
        retries: int = 0,
        on_timeout: Literal["none", "zero", "fail"] = "fail",
        note_late: Callable[[RolloutGroup, str, str], None] = lambda group, words, outcome: None,
    ) -> None:
        self._timeout, self._retries = timeout, retries
        self._on_timeout, self._note_late = on_timeout, note_late
        self._max_stuck = MAX_STUCK_CALLS + retries * num_calls
        self._pool = ThreadPoolExecutor(num_calls + self._max_stuck, thread_name_prefix="reward")
        self._stuck: dict[Future[Any], str] = {}
        self._has_returned: set[str] = set()
        """Async functions that do not always hang."""
        self._on_loop: dict[asyncio.Task[Any] | None, tuple[str, RolloutGroup]] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._tick)
        self._ticked = time.monotonic()
        threading.Thread(target=self._run_loop, name="reward-async", daemon=True).start()

    def score(self, rewards: Sequence[NamedReward], group: RolloutGroup) -> NDArray[np.float64]:
        """Rewards of one group, (F, G); NaN where a function returned None, or was late and counts as None.

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
        stand_in = [0.0 if self._on_timeout == "zero" else np.nan] * group.num_completions
        rows = self.call(rewards, group, required=group.purpose == "eval")
        return np.array([stand_in if row is None else row for row in rows], np.float64)

    def call(self, functions: Sequence[NamedReward], group: RolloutGroup, *, required: bool) -> list[Any]:
        """What each returned, checked; None for one that was late, where `on_timeout` allows that.

        Args:
            required: it does not.

        Raises:
            RewardError: as for `score`.
        """
        found: dict[int, Any] = {}
        for retries_left in range(self._retries, -1, -1):
            missing = {i: function for i, function in enumerate(functions) if i not in found}
            found |= self._attempt(missing, group)
            late = [function.name for i, function in missing.items() if i not in found]
            if late:
                outcome = "retried" if retries_left else "fail" if required else self._on_timeout
                self._conclude(group, late, outcome)
            else:
                break
        return [found.get(i) for i in range(len(functions))]

    def _attempt(self, functions: Mapping[int, NamedReward], group: RolloutGroup) -> dict[int, Any]:
        """What those returned that did in time; the others are given up."""
        calls = {self._call(function, group): i for i, function in functions.items()}
        late = wait(calls, self._timeout).not_done
        while late and self._held_up(group, [functions[calls[call]] for call in late]):
            late = wait(late, TICK_SECONDS).not_done
        stalled, blocker = self._loop_stalls, self._blocker()
        self._give_up({call: functions[i].name for call, i in calls.items() if call in late})
        if stalled and any(functions[calls[call]].is_async for call in late):  # no use in calling it again
            words = self._words([functions[calls[call]].name for call in late])
            if blocker is not None:
                words += f"; {blocker[0]} blocks the event loop of all async reward functions, make it a plain def"
            self._note_late(group, words, "fail")
            raise RewardError("reward_timeout", words)
        return {i: call.result() for call, i in calls.items() if call not in late}

    def _conclude(self, group: RolloutGroup, late: Sequence[str], outcome: str) -> None:
        words = self._words(late)
        self._note_late(group, words, outcome)
        if outcome == "fail":
            times = f" {1 + self._retries} times (reward.timeout_retries)" if self._retries else ""
            raise RewardError("reward_timeout", words + times)

    def _words(self, late: Sequence[str]) -> str:
        return f"{', '.join(late)} took more than {self._timeout:g} s (reward.timeout)"

    @property
    def worn_out(self) -> str:
        """Why a new process should take over; empty while this one can score."""
        runs_a_task = asyncio.current_task(self._loop) is not None
        # with one by now the call that blocks has failed; with none it is most likely the machine that stood still
        allowed_seconds = self._timeout + (1.0 if runs_a_task else STANDSTILL_SECONDS)
        if time.monotonic() - self._ticked > allowed_seconds:
            name, _ = self._blocker() or ("one of them", None)
            return f"{name} blocks the event loop of all async reward functions; make it a plain def"
        stuck = Counter(list(self._stuck.values()))
        if stuck.total() >= self._max_stuck:
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

    def _call(self, reward: NamedReward, group: RolloutGroup) -> Future[Any]:
        arguments = reward.arguments(group)
        if reward.is_async:
            call = self._await(reward, group, arguments)
            try:
                return asyncio.run_coroutine_threadsafe(call, self._loop)
            except RuntimeError:  # the loop is closed
                call.close()
                raise
        return self._pool.submit(_run, reward, group, arguments)

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
            if task is not None and task.cancelling():  # it has been given up
                raise asyncio.CancelledError from error
            raise _raised(reward.name, error) from error
        finally:
            del self._on_loop[task]

    def _give_up(self, late: dict[Future[Any], str]) -> None:
        for call, name in late.items():
            if not call.cancel():
                self._stuck[call] = name
                call.add_done_callback(self._stuck.pop)

    def _held_up(self, group: RolloutGroup, late: Sequence[NamedReward]) -> bool:
        """Whether these calls are late only because a call for another group blocks the loop, and fails for that."""
        blocker = self._blocker()
        could_return = all(reward.is_async and reward.name in self._has_returned for reward in late)
        return blocker is not None and blocker[1] is not group and could_return

    def _blocker(self) -> tuple[str, RolloutGroup] | None:
        """The call that blocks the loop; None where nothing does, or a task that a function has made."""
        return self._on_loop.get(asyncio.current_task(self._loop)) if self._loop_stalls else None

    @property
    def _loop_stalls(self) -> bool:
        return time.monotonic() - self._ticked >= 2 * TICK_SECONDS

    def _tick(self) -> None:
        self._ticked = time.monotonic()
        self._loop.call_later(TICK_SECONDS, self._tick)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_end_late_tasks())
        self._loop.close()

    def _end_loop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)  # behind the cancelled tasks, so that they end first


async def _end_late_tasks() -> None:
    """Those handed over while the loop was ending, which nothing has cancelled yet."""
    late = asyncio.all_tasks() - {asyncio.current_task()}
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=TICK_SECONDS)


def _run(reward: NamedReward, group: RolloutGroup, arguments: dict[str, Any]) -> Any:
    try:
        return reward.check(reward.function(**arguments), group)
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
    items = _one_each(name, values, size)
    return [_number(name, i, item) for i, item in enumerate(items)]


def check_steps(name: str, values: Any, lengths: Sequence[int]) -> list[Steps]:
    """What a function of `reward.steps` returned, None as no steps.

    Args:
        lengths: tokens of each completion.

    Raises:
        RewardError: wrong length, or something else than pairs of a place in the completion and a finite number.
    """
    items = _one_each(name, values, len(lengths))
    return [
        _steps(name, i, () if item is None else item, length)
        for i, (item, length) in enumerate(zip(items, lengths, strict=True))
    ]


def _steps(name: str, i: int, item: Any, length: int) -> Steps:
    try:
        pairs = [(operator.index(end), float(reward)) for end, reward in item]
    except (TypeError, ValueError):
        raise RewardError(
            "reward_invalid", f"{name} returned {item!r:.60} for completion {i}, expected (end, reward) pairs"
        ) from None
    for end, reward in pairs:
        if not 1 <= end <= length or not np.isfinite(reward):
            raise RewardError(
                "reward_invalid",
                f"{name} returned the step ({end}, {reward}) for completion {i}; an end is from 1 to {length}, its "
                "number of tokens, and a reward is finite",
            )
    return pairs


def _one_each(name: str, values: Any, size: int) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        raise RewardError("reward_invalid", f"{name} returned {type(values).__name__}, expected a list of {size}")
    items = list(values)
    if len(items) != size:
        raise RewardError("reward_invalid", f"{name} returned {len(items)} values for {size} completions")
    return items


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
