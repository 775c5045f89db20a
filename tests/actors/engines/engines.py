"""Engines for tests, requests to them, and a gate that holds the embedded one at a chosen token."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import Completion, Engine, SampleRequest
from bus.weights import Weights
from schemas.config.sampling import SamplingParams
from schemas.messages import PolicyVersion

WAIT = 30.0
"""Seconds after which a wait in a test has failed."""

MakeEngine = Callable[..., EmbeddedEngine]


def ask(prompt: list[int], n: int = 1, max_tokens: int | None = 8, seed: int = 0, **settings: Any) -> SampleRequest:
    """A request at temperature 1; `settings` are sampling parameters and other fields."""
    params = {name: settings.pop(name) for name in SamplingParams.model_fields if name in settings}
    return SampleRequest(prompt, n, max_tokens, seed, SamplingParams(**params), **settings)


def sample(engine: Engine, *requests: SampleRequest) -> list[list[Completion]]:
    """Submit all at once, wait for all."""
    return [future.result(WAIT) for future in [engine.submit(request) for request in requests]]


def policy(version: int) -> PolicyVersion:
    """Lineage 1."""
    return PolicyVersion(lineage=1, version=version)


class Gate:
    """Holds the engine's thread before some of its decodes, counted from 1 with the gate's making."""

    def __init__(self, engine: EmbeddedEngine, *stops: int) -> None:
        self._stops, self._count = stops, 0
        self._reached, self._opened = threading.Semaphore(0), threading.Semaphore(0)
        self._decoder: Any = engine._decoder
        self._decode = self._decoder.decode
        self._decoder.decode = self._held

    def _held(self, *arguments: Any) -> Any:
        self._count += 1
        if self._count in self._stops:
            self._reached.release()
            assert self._opened.acquire(timeout=WAIT)
        return self._decode(*arguments)

    def wait(self) -> None:
        """Until the engine stands at the next stop."""
        assert self._reached.acquire(timeout=WAIT)

    def open(self) -> None:
        """Let it go on."""
        self._opened.release()


@contextmanager
def held(engine: EmbeddedEngine, stop: int, *requests: SampleRequest) -> Iterator[list["Future[list[Completion]]"]]:
    """Submit requests; the body runs while the engine stands before decode number `stop`."""
    gate = Gate(engine, stop)
    futures = [engine.submit(request) for request in requests]
    gate.wait()
    try:
        yield futures
    finally:
        gate.open()


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
