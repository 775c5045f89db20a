"""The runner of user functions when it is closed, and when its event loop stands still."""

import asyncio
import gc
import threading
import time
import warnings
from concurrent.futures import CancelledError
from typing import Any

import pytest

from actors.reward.functions import NamedReward
from actors.reward.runner import FunctionRunner
from tests.actors.reward.test_loop import group
from tests.ring.harness import wait_until

GROUP = group().model_copy(update={"columns": {}})


def _reward(function: Any, name: str = "mine") -> NamedReward:
    return NamedReward(name, 1.0, {}, function)


def test_calls_that_come_while_the_loop_ends_are_ended_and_those_after_it_refused() -> None:
    """One that comes while the loop already stops is cancelled; a later one raises, and no coroutine is left."""

    async def slow(prompts: Any, completions: list[str]) -> list[float]:
        await asyncio.sleep(60.0)
        return [0.0] * len(completions)

    runner, stopping, handed_over = FunctionRunner(60.0, 2), threading.Event(), threading.Event()

    def stop() -> None:
        runner._loop.stop()
        stopping.set()
        handed_over.wait(10.0)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runner._loop.call_soon_threadsafe(stop)
        assert stopping.wait(10.0)
        call = runner.submit(_reward(slow), GROUP)
        handed_over.set()
        with pytest.raises(CancelledError):
            call.result(10.0)
        wait_until(runner._loop.is_closed, "the loop is closed")
        with pytest.raises(RuntimeError, match="loop is closed"):
            runner.submit(_reward(slow), GROUP)
        gc.collect()
    assert [str(each.message) for each in warned if "never awaited" in str(each.message)] == []


@pytest.mark.parametrize("blocks", [True, False])
def test_loop_that_stands_still_with_the_machine_does_not_wear_the_process_out(blocks: bool) -> None:
    """No tick for 5 s with a timeout of 1 s: a function that blocks is named; where none runs, nobody is."""
    release, entered = threading.Event(), threading.Event()

    async def blocking(prompts: Any, completions: list[str]) -> list[float]:
        entered.set()
        release.wait(10.0)
        return [0.0] * len(completions)

    runner = FunctionRunner(1.0, 2)
    if blocks:
        runner.submit(_reward(blocking, "blocking"), GROUP)
        assert entered.wait(10.0)
    runner._tick = lambda: None  # type: ignore[method-assign]
    wait_until(lambda: runner._ticked < time.monotonic() - 0.2, "no tick")
    runner._ticked = time.monotonic() - 5.0
    words = runner.worn_out
    release.set()
    runner.close()
    assert words == (
        "blocking blocks the event loop of all async reward functions; make it a plain def" if blocks else ""
    )
