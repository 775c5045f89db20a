"""Calls of a server of others, when it is gone or nobody wants it any more; requests are tested with the engines."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from actors.engines.protocol import Completion, EngineStoppedError, SampleRequest
from actors.engines.relay import Relay
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
