"""Calling reward functions on one group and checking what they return.

A group is scored whole or not at all: scoring the survivors of a failure would bias the advantages (P11). Every failure
has a countable reason and names the function.
"""

import asyncio
import inspect
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.rewards.load import RewardFunction, load_function
from schemas.config.data import RewardFunctionConfig
from schemas.messages import Prompt


class RewardError(Exception):
    """A group could not be scored. `reason` is one of `reward_raised`, `reward_timeout`, `reward_invalid`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class NamedReward:
    """A loaded reward function."""

    name: str
    weight: float
    kwargs: dict[str, Any]
    function: RewardFunction


def load_rewards(configs: Sequence[RewardFunctionConfig]) -> list[NamedReward]:
    """The configured functions, loaded; names are the last part of their paths, numbered where they repeat."""
    names = [config.path.rpartition(":")[2] for config in configs]
    unique = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
    return [
        NamedReward(name, config.weight, config.kwargs, load_function(config.path, f"reward.functions.{i}.path"))
        for i, (name, config) in enumerate(zip(unique, configs, strict=True))
    ]


class Scorer:
    """Runs functions, sync ones in threads and async ones on one event loop, each group under one timeout.

    A thread can't be killed: a sync function that ignores its timeout keeps its thread; `num_stuck` counts those.
    """

    def __init__(self, rewards: Sequence[NamedReward], timeout: float, num_threads: int) -> None:
        self._rewards, self._timeout = rewards, timeout
        self._pool = ThreadPoolExecutor(num_threads * max(1, len(rewards)), thread_name_prefix="reward")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-async", daemon=True)
        self._thread.start()
        self._threads_late: set[Future[Any]] = set()

    @property
    def num_stuck(self) -> int:
        """Calls that were given up and still keep a thread."""
        self._threads_late = {call for call in self._threads_late if not call.done()}
        return len(self._threads_late)

    def score(self, prompt: Prompt, completions: Sequence[str], columns: dict[str, Any]) -> NDArray[np.float64]:
        """Rewards of one group, (F, G); NaN where a function returned None.

        Raises:
            RewardError: a function raised, took too long, or returned something else than one finite number or None
            each.
        """
        values = asyncio.run_coroutine_threadsafe(self._score(prompt, completions, columns), self._loop)
        try:
            return values.result(self._timeout + 5.0)
        except FutureTimeoutError:
            raise RewardError(
                "reward_timeout",
                f"an async reward function blocks its event loop for more than "
                f"{self._timeout:g} s (reward.timeout); make it a plain def",
            ) from None

    def close(self) -> None:
        """Stop taking work; a stuck thread is left behind."""
        self._loop.call_soon_threadsafe(self._end_loop)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end_loop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)  # behind the cancelled tasks, so that they end first

    async def _score(self, prompt: Prompt, completions: Sequence[str], columns: dict[str, Any]) -> NDArray[np.float64]:
        calls = [asyncio.ensure_future(self._call(reward, prompt, completions, columns)) for reward in self._rewards]
        _, late = await asyncio.wait(calls, timeout=self._timeout)
        for call in late:
            call.cancel()
        if late:
            names = ", ".join(reward.name for reward, call in zip(self._rewards, calls, strict=True) if call in late)
            raise RewardError("reward_timeout", f"{names} took more than {self._timeout:g} s (reward.timeout)")
        return np.array([call.result() for call in calls], np.float64)

    async def _call(
        self, reward: NamedReward, prompt: Prompt, completions: Sequence[str], columns: dict[str, Any]
    ) -> list[float]:
        arguments = call_arguments(prompt, completions, columns) | reward.kwargs
        try:
            if inspect.iscoroutinefunction(reward.function):
                values = await reward.function(**arguments)
            else:
                values = await self._in_thread(reward, arguments)
        except Exception as error:
            raise RewardError("reward_raised", f"{reward.name} raised {type(error).__name__}: {error}") from error
        return check_values(reward.name, values, len(completions))

    async def _in_thread(self, reward: NamedReward, arguments: dict[str, Any]) -> Any:
        call = self._pool.submit(reward.function, **arguments)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if not call.cancel():
                self._threads_late.add(call)
            raise


def call_arguments(prompt: Prompt, completions: Sequence[str], columns: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in TRL's convention: lists with one item per completion; chat prompts get chat completions."""
    size = len(completions)
    as_chat = not isinstance(prompt, str)
    replies = [[{"role": "assistant", "content": text}] if as_chat else text for text in completions]
    return {"prompts": [prompt] * size, "completions": replies} | {
        name: [value] * size for name, value in columns.items()
    }


def check_values(name: str, values: Any, size: int) -> list[float]:
    """What a function returned, None as NaN.

    Raises:
        RewardError: wrong length, or something that is neither None nor a finite number.
    """
    try:
        items = list(values)
    except TypeError:
        raise RewardError(
            "reward_invalid", f"{name} returned {type(values).__name__}, expected a list of {size}"
        ) from None
    if len(items) != size:
        raise RewardError("reward_invalid", f"{name} returned {len(items)} values for {size} completions")
    numbers = []
    for i, item in enumerate(items):
        try:
            number = float("nan") if item is None else float(item)
        except (TypeError, ValueError):
            raise RewardError("reward_invalid", f"{name} returned {item!r:.60} for completion {i}") from None
        if item is not None and not np.isfinite(number):
            raise RewardError(
                "reward_invalid", f"{name} returned {number} for completion {i}; use None for 'not applicable'"
            )
        numbers.append(number)
    return numbers
