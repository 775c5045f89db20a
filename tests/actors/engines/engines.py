"""Engines for tests, requests to them, and a gate that holds the embedded one at a chosen token."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from actors.datasets.prepared import digest_of
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import Completion, Engine, EngineStoppedError, PromptImage, SampleRequest
from bus.weights import Weights
from schemas.config.sampling import SamplingParams
from schemas.messages import PolicyVersion
from tests import models
from tests.actors.datasets.pictures import picture

WAIT = 120.0
"""Seconds after which a wait in a test has failed."""

MakeEngine = Callable[..., EmbeddedEngine]


def ask(prompt: list[int], n: int = 1, max_tokens: int | None = 8, seed: int = 0, **settings: Any) -> SampleRequest:
    """A request at temperature 1; `settings` are sampling parameters and other fields."""
    params = {name: settings.pop(name) for name in SamplingParams.model_fields if name in settings}
    return SampleRequest(prompt, n, max_tokens, seed, SamplingParams(**params), **settings)


SEEN = [1, models.VISION_START, *[models.IMAGE] * 4, models.VISION_END, 5, *[models.IMAGE] * 4, 6]
"""A prompt with two images of four tokens."""


def seeing(n: int = 1, max_tokens: int = 3) -> SampleRequest:
    """A request with two images."""
    files = zip((2, 8), (picture(8, 9), picture(20, 30, "JPEG")), strict=True)
    return replace(
        ask(SEEN, n=n, max_tokens=max_tokens), images=tuple(PromptImage(i, digest_of(d), d) for i, d in files)
    )


def sample(engine: Engine, *requests: SampleRequest) -> list[list[Completion]]:
    """Submit all at once, wait for all."""
    return [future.result(WAIT) for future in [engine.submit(request) for request in requests]]


def policy(version: int) -> PolicyVersion:
    """Lineage 1."""
    return PolicyVersion(lineage=1, version=version)


class Gate:
    """Holds the engine's thread at some tokens of the next request, counted from 1, in the request's callback.

    Whatever the engine is asked meanwhile comes before the next token; during the first one, before the third, since
    the engine decodes once more between a prefill and its next look.
    """

    def __init__(self, engine: Engine, *stops: int) -> None:
        self._engine, self._stops = engine, stops
        self._reached, self._opened = threading.Semaphore(0), threading.Semaphore(0)
        self._tokens: Counter[int] = Counter()
        """By completion."""
        self._submit = engine.submit
        engine.submit = self._submitted  # type: ignore[method-assign]
        self.future: Future[list[Completion]] = Future()
        """The request's, once it has been submitted."""

    def _submitted(self, request: SampleRequest) -> "Future[list[Completion]]":
        self._engine.submit = self._submit  # type: ignore[method-assign]
        self.future = self._submit(replace(request, on_piece=partial(self._told, request.on_piece)))
        return self.future

    def _told(self, listener: Callable[[int, Completion], None] | None, number: int, piece: Completion) -> None:
        if listener is not None:
            listener(number, piece)
        before = max(self._tokens.values(), default=0)
        self._tokens[number] += len(piece.token_ids)
        if before < self._tokens[number] in self._stops:
            self._reached.release()
            assert self._opened.acquire(timeout=WAIT)

    def wait(self) -> None:
        """Until the engine stands at the next stop."""
        assert self._reached.acquire(timeout=WAIT)

    def open(self) -> None:
        """Let it go on."""
        self._opened.release()


def give_up_at(server: CompletionServer, engine: Engine, stop: int, seconds: float) -> Gate:
    """Have the next request time out while the engine stands at its token number `stop`, and not before it is there.

    Until then the server has the timeout that it was made with. Its loop is held up meanwhile, so that the wait for the
    answer begins with the short one.
    """
    gate, internals = Gate(engine, stop), cast(Any, server)
    submit = engine.submit

    def submitted(request: SampleRequest) -> "Future[list[Completion]]":
        future = submit(request)
        gate.wait()
        internals._request_timeout = seconds
        return future

    engine.submit = submitted  # type: ignore[method-assign]
    return gate


@contextmanager
def held(engine: EmbeddedEngine, stop: int, *requests: SampleRequest) -> Iterator[list["Future[list[Completion]]"]]:
    """Submit requests; the body runs while the engine stands at token number `stop` of the first of them."""
    gate = Gate(engine, stop)
    futures = [engine.submit(request) for request in requests]
    gate.wait()
    try:
        yield futures
    finally:
        gate.open()


def until_stopped(engine: Engine) -> str:
    """Wait until the engine says that it has stopped; its words."""
    pause = threading.Event()
    for _ in range(int(WAIT / 0.01)):
        try:
            engine.status()
        except EngineStoppedError as error:
            return str(error)
        pause.wait(0.01)
    raise AssertionError("the engine goes on")


def load_in_thread(engine: Engine, version: int, weights: Weights) -> "Future[float]":
    """Start an update; returns once the engine has it."""
    done: Future[float] = Future()

    def load() -> None:
        try:
            done.set_result(engine.load(policy(version), weights, WAIT))
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=load, daemon=True).start()
    internals: Any = engine
    while internals._update is None and not done.done():
        threading.Event().wait(0.001)
    return done
