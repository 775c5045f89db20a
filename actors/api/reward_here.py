"""Reward actor in a thread of the user's process, so that functions run where they were made.

The thread is the actor's main thread: it makes the actor again after each end that a supervisor would answer with a
restart. Nothing is pickled. An error that no restart mends is kept, and the trainer stops the run.
"""

import contextlib
import threading
from collections.abc import Iterator

import structlog

from actors.process.membership import PackerSilentError, StartOverError
from actors.reward.loop import RewardActor
from actors.reward.making import make_reward_actor
from actors.telemetry.http import serve_as_configured
from actors.telemetry.logs import bind_everywhere, configure_logs
from actors.telemetry.metrics import Metrics
from bus import threads
from schemas.config import RunConfig

log = structlog.get_logger("reward")

NAME = "reward-here"
"""Name in the run. It ends in no digit, so it is none of the names of further reward actors."""
PAUSE_SECONDS = 0.5
"""Pause before the actor is made again."""
END_SECONDS = 10.0
"""Longest wait for the end of the thread; functions of the user may never return."""


class RewardHere:
    """Reward actor of a run, in a thread.

    Args:
        config: the run's configuration; all functions must be loadable in this process.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.error: BaseException | None = None
        """Error that ends the run: of the actor itself, or of one of its threads."""
        self.raised: BaseException | None = None
        """Newest exception of a reward function."""
        self._stopping = threading.Event()
        self._actor: RewardActor | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "RewardHere":
        """Start the thread."""
        self._thread = threads.start_helper("reward-here", self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """End the actor: the other processes of the run have gone."""
        self._stopping.set()
        if self._actor is not None:
            self._actor.leave()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            with self._own_logs(), self._watched_threads():
                while not self._stopping.is_set():
                    try:
                        self._live()
                        return
                    except (StartOverError, PackerSilentError) as error:
                        log.warning("starting over", reason=str(error))
                        self._stopping.wait(PAUSE_SECONDS)
        except BaseException as error:  # noqa: BLE001 - handed over to the program's thread
            self.error = error

    def _live(self) -> None:
        """Run one actor until the end of the run, or until it starts over."""
        metrics = Metrics("reward")
        self._actor = actor = make_reward_actor(self._config, NAME, metrics)
        actor.on_raised = self._keep
        metrics.watch_bus(lambda: actor.edges, lambda: actor.membership.silent_seconds)
        server, url = serve_as_configured(self._config, metrics.registry, actor.liveness.wrap)
        try:
            if self._stopping.is_set():
                actor.leave()
            actor.run(url)
        finally:
            with contextlib.suppress(OSError):
                server.shutdown()

    def _keep(self, error: BaseException) -> None:
        self.raised = error

    @contextlib.contextmanager
    def _own_logs(self) -> Iterator[None]:
        """Log to a file of the run, unless the program has configured structlog itself."""
        if structlog.is_configured():
            yield
            return
        folder = self._config.output / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{NAME}.log").open("a", encoding="utf-8") as file:
            configure_logs(self._config.telemetry, file)
            bind_everywhere(actor="reward", name=NAME)
            try:
                yield
            finally:
                structlog.reset_defaults()

    @contextlib.contextmanager
    def _watched_threads(self) -> Iterator[None]:
        """Keep the failure of a thread of the actor, which would leave the run waiting; others go to Python's hook."""
        before = threading.excepthook

        def on_failure(failure: threading.ExceptHookArgs) -> None:
            if threads.is_ours(failure.thread):
                self.error = failure.exc_value or failure.exc_type()
            else:
                before(failure)

        threading.excepthook = on_failure
        try:
            yield
        finally:
            threading.excepthook = before
