"""Calls of a server of others, when it is gone or nobody wants it any more; requests are tested with the engines."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from actors.engines.external import relay
from actors.engines.external.relay import Relay
from actors.engines.protocol import Completion, EngineStoppedError, SampleRequest
from tests.actors.engines.engines import WAIT, ask


class Scene:
    """A relay whose requests take for ever, and a call that does as well."""

    def __init__(self) -> None:
        self.relay = Relay("test", self._sample)
        self.called, self.said_farewell = threading.Event(), False
        self.outcome: Future[None] = Future()
        threading.Thread(target=self._call, daemon=True).start()
        assert self.called.wait(WAIT)

    async def farewell(self) -> None:
        """The last thing."""
        self.said_farewell = True

    async def _sample(self, _: SampleRequest) -> list[Completion]:
        await asyncio.sleep(600)
        return []

    def _call(self) -> None:
        async def work() -> None:
            self.called.set()
            await asyncio.sleep(600)

        try:
            self.outcome.set_result(self.relay.call(work(), 600))
        except Exception as error:
            self.outcome.set_exception(error)


def test_a_server_that_is_gone_ends_requests_and_calls_with_the_reason() -> None:
    """Told from any thread: a dead server may keep its connections."""
    scene = Scene()
    future = scene.relay.submit(ask([1], n=3))
    scene.relay.fail("no core")
    for waiting in (scene.outcome, future):
        with pytest.raises(EngineStoppedError, match=r"^no core$"):
            waiting.result(WAIT)
    with pytest.raises(EngineStoppedError, match=r"^no core$"):
        scene.relay.submit(ask([1]))
    assert (scene.relay.failure, scene.relay.num_running) == ("no core", 0)
    scene.relay.close(scene.farewell)


def test_closing_ends_requests_and_calls_and_then_says_farewell() -> None:
    """May be done twice."""
    scene = Scene()
    future = scene.relay.submit(ask([1]))
    scene.relay.close(scene.farewell)
    scene.relay.close(scene.farewell)
    assert scene.said_farewell
    for waiting in (scene.outcome, future):
        with pytest.raises(EngineStoppedError, match="has been closed"):
            waiting.result(WAIT)


def test_a_call_that_is_given_up_goes_on_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coroutine has ended when the caller hears of it: nothing is still reading what the caller then removes."""
    monkeypatch.setattr(relay, "SLACK_SECONDS", 0.1)
    made, begun, ended = Relay("test", _nothing), threading.Event(), threading.Event()
    run = asyncio.run_coroutine_threadsafe

    def run_until_begun(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> "Future[Any]":
        future = run(work, loop)
        assert begun.wait(WAIT)  # what is given up before it has begun would have no end
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", run_until_begun)

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match=r"^given up after 0.1 s$"):
        made.call(work(), 0.0)
    assert ended.is_set()
    made.close(_farewell)


def test_work_beside_the_requests_that_raises_ends_the_engine_in_words() -> None:
    """As the watch of the server would; without it a server that is gone would be waited for."""
    made = Relay("test", _nothing)

    async def watch() -> None:
        raise KeyError("status")

    made.call(_done(lambda: made.start_background(watch())), 1.0)
    _until(lambda: bool(made.failure))
    assert made.failure == "KeyError: 'status'"
    made.close(_farewell)


def test_a_listener_that_raises_fails_its_own_request() -> None:
    """Whoever waits for the completions hears of it, and the relay serves on."""
    made = Relay("test", _one)

    def listener(number: int, piece: Completion) -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        made.submit(ask([1], on_piece=listener)).result(WAIT)
    assert len(made.submit(ask([1])).result(WAIT)) == 1
    made.close(_farewell)


async def _nothing(_: SampleRequest) -> list[Completion]:
    return []


async def _one(_: SampleRequest) -> list[Completion]:
    return [Completion([1], [0.0])]


async def _done(call: Callable[[], object]) -> None:
    call()


async def _farewell() -> None:
    pass


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
