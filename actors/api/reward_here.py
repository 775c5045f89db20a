"""Reward actor in a thread of the user's process, so that functions run where they were made.

The thread is the actor's main thread: it makes the actor again after each end that a supervisor would answer with a
restart. Nothing is pickled. An error that no restart mends is kept for the trainer, which stops the run.
"""

import contextlib
import threading
import time
from collections.abc import Callable

import structlog

from actors.assembly import make_reward
from actors.process.membership import PackerSilentError, StartOverError
from actors.telemetry.http import serve_as_configured
from actors.telemetry.metrics import Metrics
from schemas.config import RunConfig

log = structlog.get_logger("reward")

NAME = "reward-0"
"""Name in the run. `actors up` starts no reward actor where `up.reward` is 0, so the name is free."""
PAUSE_SECONDS = 0.5
"""Pause before the actor is made again."""
END_SECONDS = 30.0
"""Longest wait for the end of the thread; functions of the user may never return."""


class RewardHere:
    """Reward actor of a run, in a thread.

    Args:
        config: the run's configuration; all functions must be loadable in this process.
        on_failure: called with an error that no restart mends, in the actor's thread.
    """

    def __init__(self, config: RunConfig, on_failure: Callable[[BaseException], None]) -> None:
        self._config, self._on_failure = config, on_failure
        self._stopping = threading.Event()
        self._drain: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the actor, after the groups that it holds; wait for at most END_SECONDS."""
        self._stopping.set()
        self._drain()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._live()
                return
            except (StartOverError, PackerSilentError) as error:
                log.warning("starting over", reason=str(error))
                time.sleep(PAUSE_SECONDS)
            except BaseException as error:
                log.exception("reward actor failed")
                self._on_failure(error)
                return

    def _live(self) -> None:
        """Run one actor until the end of the run, or until it starts over."""
        metrics = Metrics("reward")
        actor = make_reward(self._config, NAME, metrics)
        self._drain = actor.drain
        metrics.watch_bus(lambda: actor.edges, lambda: actor.membership.silent_seconds)
        server, url = serve_as_configured(self._config, metrics.registry, actor.liveness.wrap)
        try:
            if self._stopping.is_set():
                actor.drain()
            actor.run(url)
        finally:
            with contextlib.suppress(OSError):
                server.shutdown()
