"""Requests on their way to a server of others: futures for any thread, answered on an event loop in one of its own.

An engine gives it one coroutine, which answers a request. A future that is cancelled cancels its coroutine; when the
server is gone (`fail`) or the engine is closed, all that is under way fails, requests and calls alike, and nothing is
taken any more: a server whose core is dead may keep its open connections, so they are not waited for.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

from actors.engines.protocol import Completion, EngineStoppedError, SampleRequest

JOIN_SECONDS = 2.0
SLACK_SECONDS = 60.0
"""More than any call to the loop takes that has a timeout of its own inside it."""

T = TypeVar("T")


class Relay:
    """See the module.

    Args:
        name: of the thread.
        sample: answers one request.
    """

    def __init__(self, name: str, sample: Callable[[SampleRequest], Coroutine[Any, Any, list[Completion]]]) -> None:
        self._sample = sample
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure, self._closed = "", False
        self.num_running, self.generated_tokens = 0, 0
        self._busy_seconds, self._busy_since = 0.0, 0.0
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Have a request answered; its pieces are whole completions, told when all of them are there."""
        self.ensure_alive()
        future: Future[list[Completion]] = Future()
        self._loop.call_soon_threadsafe(self._begin, request, future)
        return future

    def ensure_alive(self) -> None:
        """Raise an EngineStoppedError with the reason where there is no server any more."""
        if self._failure or self._closed:
            raise EngineStoppedError(self._reason)

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Have the loop do it, and wait; its own timeouts end it before ours does.

        Raises:
            EngineStoppedError: meanwhile the server is gone, or the engine has been closed.
        """
        try:
            return self._run(self._kept(work), timeout)
        except CancelledError:
            raise EngineStoppedError(self._reason) from None

    def fail(self, reason: str) -> None:
        """There is no server any more."""
        self._failure = reason
        self._loop.call_soon_threadsafe(self._cancel_all)

    @property
    def failure(self) -> str:
        """Why nothing is taken any more; empty while the server is there."""
        return self._failure

    @property
    def busy_seconds(self) -> float:
        """In which requests were under way."""
        return self._busy_seconds + (time.monotonic() - self._busy_since if self.num_running else 0.0)

    def close(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """End all requests, do a last thing on the loop, and end the thread. May be called again."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            self._run(self._leave(farewell), JOIN_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_SECONDS)

    @property
    def _reason(self) -> str:
        return self._failure or "the engine has been closed"

    def _run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout + SLACK_SECONDS)

    # --- the loop's thread ---------------------------------------------------------------------------------------

    def keep(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Do it beside everything else, until it is done or the relay is closed."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.keep(work)

    def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _leave(self, farewell: Callable[[], Awaitable[None]]) -> None:
        self._cancel_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:  # what the cancelled ones have left to be done
            await asyncio.wait(self._tasks, timeout=JOIN_SECONDS)
        await farewell()

    def _begin(self, asked: SampleRequest, future: "Future[list[Completion]]") -> None:
        task = self.keep(self._sample(asked))
        task.add_done_callback(partial(self._finish, asked, future))
        future.add_done_callback(partial(self._drop_cancelled, task))
        if not self.num_running:
            self._busy_since = time.monotonic()
        self.num_running += asked.num_completions

    def _drop_cancelled(self, task: "asyncio.Task[Any]", future: "Future[list[Completion]]") -> None:
        """From any thread."""
        if future.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(task.cancel)

    def _finish(
        self, asked: SampleRequest, future: "Future[list[Completion]]", task: "asyncio.Task[list[Completion]]"
    ) -> None:
        self.num_running -= asked.num_completions
        if not self.num_running:
            self._busy_seconds += time.monotonic() - self._busy_since
        with contextlib.suppress(InvalidStateError):  # cancelled by whoever asked
            if task.cancelled():
                future.set_exception(EngineStoppedError(self._reason))
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                completions = task.result()
                self.generated_tokens += sum(len(completion.token_ids) for completion in completions)
                for number, completion in enumerate(completions):
                    if asked.on_piece is not None:
                        asked.on_piece(number, completion)
                future.set_result(completions)
