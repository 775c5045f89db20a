"""What the tests of reward functions share."""

import asyncio
import threading
import time
from collections.abc import Collection, Iterator
from concurrent import futures
from typing import Any

import pytest

from actors.reward import runner as runner_module
from actors.reward.runner import FunctionRunner

WAIT = 60.0


class Hanging:
    """Calls of user functions that hang until the end of the test. In its time limits no other call is late.

    A thread may be held up for seconds before it calls a function at all. So a limit of tenths of a second begins once
    all calls but those that hang have returned.
    """

    def __init__(self) -> None:
        self._release = threading.Event()
        self._lock = threading.Lock()
        self._num = 0
        """Calls that hang now."""
        self._running = threading.local()
        """`runner`: the runner whose calls the thread waits for."""
        self.num_behind = 0
        """Waits for calls that another group's call holds up."""

    def hang(self, *_: Any, **__: Any) -> None:
        """Hang, for a function in a thread, or one that blocks an event loop."""
        self._count(1)
        try:
            self._release.wait(2 * WAIT)
        finally:
            self._count(-1)

    async def sleep(self) -> None:
        """Hang, for an async function."""
        self._count(1)
        try:
            await asyncio.sleep(2 * WAIT)
        finally:
            self._count(-1)

    def release(self) -> None:
        """Let all go on."""
        self._release.set()

    def wait(self, calls: Collection["futures.Future[Any]"], timeout: float) -> Any:
        """Stand in for `concurrent.futures.wait` in the runner."""
        self.num_behind += timeout == runner_module.TICK_SECONDS
        deadline = time.monotonic() + WAIT
        # those that were given up before hang besides
        while len(late := futures.wait(calls, 0.0).not_done) > self._num - len(self._running.runner.stuck):
            assert time.monotonic() < deadline
            futures.wait(late, 0.005, futures.FIRST_COMPLETED)
        return futures.wait(calls, timeout)

    def replace_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let all runners wait through `wait` until the test ends."""
        run = FunctionRunner.run

        def noted(runner: FunctionRunner, *arguments: Any) -> Any:
            self._running.runner = runner
            return run(runner, *arguments)

        monkeypatch.setattr(FunctionRunner, "run", noted)
        monkeypatch.setattr(runner_module, "wait", self.wait)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num += change


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """Calls that hang, and limits that no other call reaches."""
    made = Hanging()
    made.replace_waiting(monkeypatch)
    yield made
    made.release()


@pytest.fixture
def loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop that is held up with the machine is not taken for one that a function blocks."""
    monkeypatch.setattr(FunctionRunner, "_loop_stalls", False)
