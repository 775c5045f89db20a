"""Requests to an external server: futures for any thread, answered on an event loop in a separate thread.

An engine passes a coroutine that answers a request. Cancelling a future cancels the coroutine. When the server is gone
(`fail`) or the engine is closed, everything under way fails, requests and calls alike, and nothing more is taken. Open
connections are not waited for, since a server with a dead core may keep connections open.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

import structlog

from actors.engines.protocol import Completion, EngineStoppedError, SampleRequest
from bus import threads

log = structlog.get_logger("engine")

JOIN_SECONDS = 2.0
"""Seconds for cancelled work to stop."""
SLACK_SECONDS = 60.0
"""Seconds on top of a call's timeout. Timeouts inside the call must come first."""

T = TypeVar("T")


class Relay:
    """Runner of requests and calls to a server.

    Args:
        name: name of the thread.
        sample: coroutine that answers one request.
    """

    def __init__(self, name: str, sample: Callable[[SampleRequest], Coroutine[Any, Any, list[Completion]]]) -> None:
        self._sample = sample
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure, self._closed = "", False
        self.num_running, self.generated_tokens = 0, 0
        self._busy_seconds, self._busy_since = 0.0, 0.0
        threads.tick(self._loop, "inference.relay")
        self._thread = threads.start(name, self._loop.run_forever)

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Queue a request. Pieces are whole completions, passed on when all have arrived.

        Raises:
            EngineStoppedError: the server is gone, or the engine has been closed.
        """
        self.ensure_alive()
        future: Future[list[Completion]] = Future()
        self._loop.call_soon_threadsafe(self._begin, request, future)
        return future

    def ensure_alive(self) -> None:
        """Check if requests can be taken.

        Raises:
            EngineStoppedError: the server is gone, or the engine has been closed.
        """
        if self._failure or self._closed:
            raise EngineStoppedError(self._reason)

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine on the loop and return its result.

        Args:
            timeout: seconds of the timeouts inside the coroutine; SLACK_SECONDS are added.

        Raises:
            EngineStoppedError: the server has gone, or the engine has been closed, in the meantime.
            TimeoutError: a timeout of the coroutine, or this one. The coroutine has been cancelled, so no part of it
                continues.
        """
        over = threading.Event()

        async def kept() -> T:
            try:
                return await self.start_task(work)
            finally:
                over.set()

        try:
            return self._run(kept(), timeout)
        except CancelledError:
            raise EngineStoppedError(self._reason) from None
        except TimeoutError:
            # the cancelled coroutine must have ended: a part that ran on could overwrite weights after the report
            if not over.wait(JOIN_SECONDS):
                raise TimeoutError(f"the engine's event loop does not respond; waited for {timeout:g} s") from None
            raise

    def fail(self, reason: str) -> None:
        """Mark the server as gone, and fail all requests and calls."""
        self._failure = reason
        self._loop.call_soon_threadsafe(self._cancel_all)

    @property
    def failure(self) -> str:
        """Reason why nothing is taken any more; empty while the server is there."""
        return self._failure

    @property
    def busy_seconds(self) -> float:
        """Seconds with at least a single request under way."""
        return self._busy_seconds + (time.monotonic() - self._busy_since if self.num_running else 0.0)

    def close(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Fail all requests, await `farewell` on the loop, and stop the thread. May be called again."""
        if self._closed:
            return
        self._closed = True

        async def leave() -> None:
            self._cancel_all()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # cleanup that the cancelled tasks have started
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=JOIN_SECONDS)
            await farewell()

        with contextlib.suppress(TimeoutError):
            self._run(leave(), JOIN_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_SECONDS)

    @property
    def _reason(self) -> str:
        return self._failure or "the engine has been closed"

    def _run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(timeout + SLACK_SECONDS)
        except TimeoutError:
            # the timeout is the coroutine's own
            if running.done():
                raise
            running.cancel()
            raise TimeoutError(f"given up after {timeout + SLACK_SECONDS:g} s") from None

    # --- the loop's thread ---------------------------------------------------------------------------------------

    def start_task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a task on the loop. The task runs until done, or until the relay is closed. For the loop's thread."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def start_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task in the background. A failure of the task stops the engine, with the exception as the reason."""

        def fail_with(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("background work of the engine failed", exc_info=error)
                self.fail(f"{type(error).__name__}: {error}")

        self.start_task(work).add_done_callback(fail_with)

    def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _begin(self, asked: SampleRequest, future: "Future[list[Completion]]") -> None:
        # the task is never awaited: its callback sets the future, also when `fail` or `close` cancels it
        task = self.start_task(self._sample(asked))
        task.add_done_callback(partial(self._finish, asked, future))

        def drop_cancelled(future: "Future[list[Completion]]") -> None:
            """Cancel the task of a cancelled future. For any thread."""
            if future.cancelled():
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(drop_cancelled)
        if not self.num_running:
            self._busy_since = time.monotonic()
        self.num_running += asked.num_completions

    def _finish(
        self, asked: SampleRequest, future: "Future[list[Completion]]", task: "asyncio.Task[list[Completion]]"
    ) -> None:
        self.num_running -= asked.num_completions
        if not self.num_running:
            self._busy_seconds += time.monotonic() - self._busy_since
        with contextlib.suppress(InvalidStateError):  # cancelled by its holder
            if task.cancelled():
                future.set_exception(EngineStoppedError(self._reason))
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                try:
                    completions = task.result()
                    self.generated_tokens += sum(len(completion.token_ids) for completion in completions)
                    for number, completion in enumerate(completions):
                        if asked.on_piece is not None:
                            asked.on_piece(number, completion)
                except Exception as listener_error:  # noqa: BLE001 - told to the holder, else it waits for ever
                    future.set_exception(listener_error)
                else:
                    future.set_result(completions)
