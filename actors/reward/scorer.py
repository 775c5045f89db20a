"""Calls of reward functions on a group, and checks of the returned values.

P11 (a failed completion fails the whole attempt): a group is scored as a whole or not at all, since scoring only the
survivors of a failure would bias the advantages. Every failure has a countable reason and names the function. User
code may raise anything, SystemExit included.
"""

import asyncio
import inspect
import operator
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages import Steps
from actors.reward.functions import ARGUMENTS, RewardFunction, load_function
from bus.threads import Workers, pass_by, start
from schemas.config.advantages import CustomAdvantageConfig
from schemas.config.data import RewardFunctionConfig, ShapingConfig, StepRewardConfig
from schemas.errors import ConfigError
from schemas.messages import RolloutGroup

MAX_STUCK_CALLS = 16
"""Limit of calls that never return and keep their threads; above it a new process takes over.

Calls that might be running a second time (`reward.timeout_retries`) come on top.
"""
STANDSTILL_SECONDS = 30.0
"""Seconds for which a machine under load, or a frozen process, may keep the event loop from iterating."""
TICK_SECONDS = 0.1
"""Interval at which the event loop shows that no call blocks it."""
UNSHAPED = ShapingConfig()


class RewardError(Exception):
    """A group could not be scored.

    Args:
        reason: `reward_raised`, `reward_timeout` or `reward_invalid`.
        detail: text with the function's name.
        origin: function, error type, and place in the user's file, to tell errors apart; empty for other reasons.
    """

    def __init__(self, reason: str, detail: str, origin: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.reason, self.origin = reason, origin


@dataclass(frozen=True)
class NamedReward:
    """Reward function, loaded."""

    name: str
    weight: float
    kwargs: dict[str, Any]
    function: RewardFunction
    shaping: ShapingConfig = UNSHAPED

    @cached_property
    def takes_token_ids(self) -> bool:
        """True if the function accepts `completion_ids`."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # a function written in C has no signature
            return False
        return any(p.name == "completion_ids" or p.kind is p.VAR_KEYWORD for p in parameters)

    @property
    def is_async(self) -> bool:
        """True for an `async def` function, which runs on the event loop."""
        return inspect.iscoroutinefunction(self.function)

    def arguments(self, group: RolloutGroup) -> dict[str, Any]:
        """Return the keyword arguments for a group."""
        return call_arguments(self, group)

    def check(self, values: Any, group: RolloutGroup) -> Any:
        """Return the function's values in the form in which they are used.

        Raises:
            RewardError: the values are invalid.
        """
        return check_values(self.name, values, group.num_completions)


class StepReward(NamedReward):
    """Function of `reward.steps`, loaded: rewards steps inside completions."""

    def check(self, values: Any, group: RolloutGroup) -> list[Steps]:
        """Return the steps of each completion, as (end, reward) pairs. Raises RewardError for invalid ones."""
        return check_steps(self.name, values, group.lengths_G.tolist())


class AdvantageFunction(NamedReward):
    """Function of `reward.advantage`, loaded: computes advantages from rewards."""

    def on(self, rewards_PG: NDArray[np.float64], lengths_PG: NDArray[np.int64]) -> "AdvantageFunction":
        """Return a copy with the two arrays bound as the first arguments, of shape (P, G)."""
        return replace(self, function=partial(self.function, rewards_PG, lengths_PG))

    def arguments(self, group: RolloutGroup) -> dict[str, Any]:
        """Return the function's `kwargs`; the arrays are bound already."""
        return self.kwargs

    def check(self, values: Any, group: RolloutGroup) -> Any:
        """Return the values unchanged: the caller knows the shape of advantages and checks it."""
        return values


def load_rewards(configs: Sequence[RewardFunctionConfig]) -> list[NamedReward]:
    """Load the configured reward functions. Names are the last part of each path, with a number where repeated.

    Raises:
        ConfigError: a function can't be found, or its kwargs have the name of an argument.
    """
    problems = [
        problem
        for i, config in enumerate(configs)
        for problem in _taken_names(f"reward.functions.{i}.kwargs", config.kwargs)
    ]
    if problems:
        raise ConfigError(*problems)
    names = [config.path.rpartition(":")[2] for config in configs]
    # repeated names get their position in the configuration, also in the columns of metrics.jsonl
    unique = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
    shapings = [ShapingConfig(bias=config.bias, scale=config.scale, clip=config.clip) for config in configs]
    functions = [load_function(config.path, f"reward.functions.{i}.path") for i, config in enumerate(configs)]
    return [
        NamedReward(name, config.weight, config.kwargs, function, shaping)
        for name, config, function, shaping in zip(unique, configs, functions, shapings, strict=True)
    ]


def load_steps(config: StepRewardConfig) -> StepReward:
    """Load the function of `reward.steps`.

    Raises:
        ConfigError: the function can't be found, or its kwargs have the name of an argument.
    """
    if problems := _taken_names("reward.steps.kwargs", config.kwargs):
        raise ConfigError(*problems)
    name = config.path.rpartition(":")[2]
    return StepReward(name, 0.0, config.kwargs, load_function(config.path, "reward.steps.path"))


def load_advantage(config: CustomAdvantageConfig) -> AdvantageFunction:
    """Load the function of `reward.advantage`.

    Raises:
        ConfigError: the function can't be found.
    """
    name = config.path.rpartition(":")[2]
    return AdvantageFunction(name, 0.0, config.kwargs, load_function(config.path, "reward.advantage.path"))


def _taken_names(key: str, kwargs: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}.{name}: is what functions receive of the sampled group; use another name"
        for name in sorted(kwargs.keys() & set(ARGUMENTS))
    ]


class Scorer:
    """Runner of user functions: sync functions in threads, async functions on an event loop, with a timeout per group.

    Late functions are called again `retries` times. A function still late then counts as `on_timeout` says. A group of
    an evaluation fails instead, since an evaluation must not contain values that were never measured.

    User code can't be killed. A sync function that does not return keeps its thread, so there are more threads than
    calls. An async function that blocks the event loop stops all other async functions. If a blocking function has
    returned at other times, only its own call fails, and the others wait for the next process. `worn_out` tells when a
    new process should take over.

    Args:
        timeout: seconds for all functions of a group, for each try.
        num_calls: largest number of calls at the same time.
        retries: further calls of a late function.
        on_timeout: value of a function late in the last try: "none", "zero", or "fail" for the whole group.
        note_late: called with the group, a text on the late functions, and the outcome: `retried` or `on_timeout`.
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
        self._pool = Workers(num_calls + self._max_stuck, "reward")
        self.num_calls = self.num_late = 0
        """Calls of functions since the start, and the late calls among them."""
        self._counting = threading.Lock()
        self._stuck: dict[Future[Any], str] = {}
        """Name of the function for each call that was given up and still runs."""
        self._has_returned: set[str] = set()
        """Names of async functions that have returned at least once, so do not always block."""
        self._on_loop: dict[asyncio.Task[Any] | None, tuple[str, RolloutGroup]] = {}
        """Function and group of each task on the event loop."""
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._tick)
        self._ticked = time.monotonic()
        start("reward-async", self._run_loop)

    def score(self, rewards: Sequence[NamedReward], group: RolloutGroup) -> NDArray[np.float64]:
        """Return the rewards of a group, shape (F, G); NaN: a function returned None, or was late and counts as None.

        Raises:
            RewardError: a function raised, was late, or returned anything but a finite number or None per completion.
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
        """Call functions on a group and return the checked values of each; None for a late one if `on_timeout` allows.

        Args:
            functions: functions to call, all at the same time.
            group: the sampled group.
            required: True: a late function fails the group, whatever `on_timeout` says.

        Raises:
            RewardError: as `score`.
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
        """Call functions once. Return the values of those in time, by index; give up the late ones."""
        calls = {self._call(function, group): i for i, function in functions.items()}
        late = wait(calls, self._timeout).not_done
        # calls that only wait for another group's blocking call get the time that it takes
        while late and self._held_up(group, [functions[calls[call]] for call in late]):
            late = wait(late, TICK_SECONDS).not_done
        with self._counting:
            self.num_calls += len(calls)
            self.num_late += len(late)
        stalled, blocker = self._loop_stalls, self._blocker()
        self._give_up({call: functions[i].name for call, i in calls.items() if call in late})
        # a blocked event loop would make the call late again, so it fails without a retry
        if stalled and any(functions[calls[call]].is_async for call in late):
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
        """Reason why a new process should take over; empty while this process can score."""
        runs_a_task = asyncio.current_task(self._loop) is not None
        # with a running task its function blocks the loop, and has failed by now; without, the machine is most likely
        # at fault and gets more time
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
        """Stop taking work. Threads of stuck calls are left behind."""
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
            if task is not None and task.cancelling():  # the call was given up: user code may turn that into any error
                raise asyncio.CancelledError from error
            raise _raised(reward.name, error) from error
        finally:
            del self._on_loop[task]

    def _give_up(self, late: dict[Future[Any], str]) -> None:
        for call, name in late.items():
            # cancelling works for calls that wait, on the event loop or for a thread, not for a running thread
            if not call.cancel():
                self._stuck[call] = name
                call.add_done_callback(self._stuck.pop)

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
        return time.monotonic() - self._ticked >= 2 * TICK_SECONDS

    def _tick(self) -> None:
        self._ticked = time.monotonic()
        pass_by("reward.loop")
        self._loop.call_later(TICK_SECONDS, self._tick)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_end_late_tasks())
        self._loop.close()

    def _end_loop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)  # after the cancelled tasks in the queue, so that they end first


async def _end_late_tasks() -> None:
    """Cancel calls that were handed over while the loop was ending, and wait a moment for them."""
    late = asyncio.all_tasks() - {asyncio.current_task()}
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=TICK_SECONDS)


def _run(reward: NamedReward, group: RolloutGroup, arguments: dict[str, Any]) -> Any:
    try:
        pass_by("reward.function")
        return reward.check(reward.function(**arguments), group)
    except RewardError:
        raise
    except BaseException as error:
        raise _raised(reward.name, error) from error


def _raised(name: str, error: BaseException) -> RewardError:
    """Return the error for an exception of user code, with the line in the user's file where it was raised."""
    # our own frame goes, so that the logged traceback starts in the user's file
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    # the last line inside the function's own file: deeper frames are in libraries
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    place = f" ({Path(frames[0].filename).name}, line {lines[-1]})" if frames else ""
    detail = f"{name} raised {type(error).__name__}: {error!s:.500}{place}"
    return RewardError("reward_raised", detail, (name, type(error).__name__, place))


def call_arguments(reward: NamedReward, group: RolloutGroup) -> dict[str, Any]:
    """Return keyword arguments as TRL passes them: lists with an item per completion.

    Completions of chat prompts are lists of messages. The run's own arguments replace `kwargs` of the same name, and
    `kwargs` replace columns of the data.
    """
    as_chat, size = not isinstance(group.prompt, str), group.num_completions
    arguments: dict[str, Any] = {name: [value] * size for name, value in group.columns.items()} | reward.kwargs
    arguments["prompts"] = [group.prompt] * size
    arguments["completions"] = [
        [{"role": "assistant", "content": text}] if as_chat else text for text in group.completions
    ]
    if reward.takes_token_ids:  # else not built: lists of ints are large
        parts = np.split(group.token_ids, group.completion_offsets[1:-1])
        arguments["completion_ids"] = [part.tolist() for part in parts]
    return arguments


def check_values(name: str, values: Any, size: int) -> list[float]:
    """Return the values of a reward function as floats, None as NaN.

    Raises:
        RewardError: the number of values is wrong, or a value is neither None nor a finite number.
    """
    items = _one_each(name, values, size)
    return [_number(name, i, item) for i, item in enumerate(items)]


def check_steps(name: str, values: Any, lengths: Sequence[int]) -> list[Steps]:
    """Return the steps from a function of `reward.steps`: (end, reward) pairs per completion; no pairs for None.

    Args:
        name: name of the function, for errors.
        values: values as returned.
        lengths: tokens of each completion; `end` is a number of tokens up to this.

    Raises:
        RewardError: the number of values is wrong, or a pair has an end outside of the completion or no finite reward.
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
    # texts, maps and sets are iterable too, but are never a value per completion
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
        number = None if isinstance(item, str | bytes) else float(item)  # float() would accept the text "1"
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise RewardError(
            "reward_invalid", f"{name} returned {item!r:.60} for completion {i}, expected a number or None"
        )
    if not np.isfinite(number):
        raise RewardError(
            "reward_invalid", f"{name} returned {number} for completion {i}; use None for 'not applicable'"
        )
    return number
