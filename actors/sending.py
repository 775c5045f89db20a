"""Broadcasts of the rendezvous channel, beside training: what State names is sent, a newer name ends the one before.

Consumes updates from State (the control thread calls `follow`), waits in a thread of its own for members and wire, both
under `weights.timeout`, and tells of failures through the beat.
"""

import threading
import time
from collections.abc import Callable

import structlog

from actors.telemetry.metrics import Metrics
from bus.weights import BroadcastPublisher, UpdateAbandonedError
from schemas.messages import UpdateFailure, WeightUpdate

log = structlog.get_logger("trainer")


class WeightSender:
    """The thread that sends.

    Args:
        publisher: holds the versions.
        tell: puts a failure into the beat.
    """

    def __init__(self, publisher: BroadcastPublisher, metrics: Metrics, tell: Callable[[UpdateFailure], None]) -> None:
        self._publisher, self._metrics, self._tell = publisher, metrics, tell
        self._named: WeightUpdate | None = None
        self._news = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def follow(self, update: WeightUpdate | None) -> None:
        """State names this update now."""
        if update is not None and (self._named is None or update.update != self._named.update):
            self._named = update
            self._news.set()

    def close(self) -> None:
        """End the thread; a broadcast under way is given up."""
        self._closing = True
        self._news.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._closing:
            self._news.wait()
            self._news.clear()
            update = self._named
            if update is not None and not self._closing:
                self._send(update)

    def _send(self, update: WeightUpdate) -> None:
        def check() -> None:
            if self._closing or self._named is not update:
                raise UpdateAbandonedError("another update is named")

        started = time.monotonic()
        try:
            self._publisher.send(update, check)
        except UpdateAbandonedError as error:
            self._metrics.count("grpo_trainer_weight_broadcasts_total", outcome="abandoned")
            if self._named is update and not self._closing:
                log.warning("weights not sent", policy=str(update.policy), missed=error.missed, detail=str(error))
                self._tell(UpdateFailure(update=update.update, missed=error.missed, detail=str(error)))
            return
        self._metrics.count("grpo_trainer_weight_broadcasts_total", outcome="sent")
        self._metrics.count("grpo_trainer_weight_wire_seconds_total", time.monotonic() - started)
