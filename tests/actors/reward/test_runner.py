"""The runner of user functions when it is closed, and when its event loop stands still."""

import asyncio
import gc
import threading
import time
import warnings
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from actors.reward import runner as runner_module
from actors.reward.functions import NamedReward
from actors.reward.runner import FunctionRunner
from tests.actors.reward.test_loop import group

GROUP = group().model_copy(update={"columns": {}})


def _reward(function: Any, name: str = "mine") -> NamedReward:
    return NamedReward(name, 1.0, {}, function)


def test_calls_that_come_while_the_loop_ends_are_ended_and_those_after_it_refused() -> None:
    """One that comes while the loop already stops is cancelled; a later one raises, and no coroutine is left."""
    handed_over, entered = threading.Event(), threading.Event()

    async def slow(prompts: Any, completions: list[str]) -> list[float]:
        await asyncio.sleep(300.0)
        return [0.0] * len(completions)

    async def blocking(prompts: Any, completions: list[str]) -> list[float]:
        entered.set()
        handed_over.wait(60.0)
        return [0.0] * len(completions)

    others = set(threading.enumerate())
    runner = FunctionRunner(60.0, 2)
    [loop] = [each for each in threading.enumerate() if each not in others and each.name == "reward-async"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = runner.submit(_reward(blocking), GROUP)
        assert entered.wait(60.0)
        runner.close()
        call = runner.submit(_reward(slow), GROUP)
        handed_over.set()
        assert list(before.result(60.0)) == [0.0, 0.0]
        with pytest.raises(CancelledError):
            call.result(60.0)
        loop.join(60.0)
        with pytest.raises(RuntimeError, match="loop is closed"):
            runner.submit(_reward(slow), GROUP)
        gc.collect()
    assert [str(each.message) for each in warned if "never awaited" in str(each.message)] == []


@pytest.mark.parametrize("blocks", [True, False])
def test_loop_that_stands_still_with_the_machine_does_not_wear_the_process_out(
    blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tick for 75 s with a timeout of 60 s: a function that blocks is named; where none runs, nobody is."""
    release, entered, passed = threading.Event(), threading.Event(), [0.0]

    def stand_still() -> None:
        entered.set()
        release.wait(60.0)

    async def blocking(prompts: Any, completions: list[str]) -> list[float]:
        if blocks:
            stand_still()
        else:  # behind the end of the call: no function runs, and still the loop does not go on
            asyncio.get_running_loop().call_later(0.0, stand_still)
        return [0.0] * len(completions)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(runner_module, "time", clock)
    runner = FunctionRunner(60.0, 2)
    call = runner.submit(_reward(blocking, "blocking"), GROUP)
    assert entered.wait(60.0)
    assert runner.worn_out == ""
    passed[0] = 75.0
    words = runner.worn_out
    release.set()
    call.result(60.0)
    runner.close()
    assert words == (
        "blocking blocks the event loop of all async reward functions; make it a plain def" if blocks else ""
    )
