"""Weight broadcasts of the rendezvous channel, in the background of training.

Consumes updates named by the directive (`follow`, called by the control thread); a newer update ends an older. Waits in
a separate thread for members and for the wire, both under `weights.timeout`. Emits failures through the heartbeat; the
packer then names another update (P24: members enter only updates named by the packer).
"""

import threading
import time
from collections.abc import Callable

import structlog

from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import span
from bus import threads
from bus.weights import BroadcastPublisher, UpdateAbandonedError
from schemas.messages import UpdateFailure, WeightUpdate

log = structlog.get_logger("trainer")

MAX_FAULTS = 5
"""Unexpected errors in a row after which the process ends: the next process starts with new sockets."""
LOOK_SECONDS = 1.0
"""Longest wait for news; `close` is noticed at once, since it counts as news."""
PAUSE_SECONDS = 1.0
"""Pause after an unexpected error, since the packer names the next update at once."""


class WeightBroadcaster:
    """Thread that broadcasts the updates named by the directive.

    Args:
        publisher: publisher with the versions to send.
        metrics: destination of the broadcast metrics.
        tell: puts a failure into the heartbeat.
    """

    def __init__(self, publisher: BroadcastPublisher, metrics: Metrics, tell: Callable[[UpdateFailure], None]) -> None:
        self._publisher, self._metrics, self._tell = publisher, metrics, tell
        self._named: WeightUpdate | None = None
        self._news = threading.Event()
        self._closing = False
        self._faults = 0
        self._thread = threads.start("weights", self._run)

    def follow(self, update: WeightUpdate | None) -> None:
        """Send this update next, unless it is the update named before. Ends any other broadcast. Thread-safe."""
        if update is not None and (self._named is None or update.update != self._named.update):
            # in this order: the thread looks at the name after the event
            self._named = update
            self._news.set()

    def close(self) -> None:
        """Stop the thread; a broadcast under way is given up. Waits 2 s at most."""
        self._closing = True
        self._news.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        done: WeightUpdate | None = None
        while not self._closing:
            self._news.wait(LOOK_SECONDS)
            # cleared before the look at `_named`: an update that comes in between sets it again
            self._news.clear()
            threads.mark("trainer.weights")
            update = self._named
            if update is not None and update is not done and not self._closing:
                self._send(update)  # once: after a failure the packer names another update
                done = update

    def _send(self, update: WeightUpdate) -> None:
        def check() -> None:
            if self._closing or self._named is not update:
                raise UpdateAbandonedError("another update is named")

        started = time.monotonic()
        try:
            with span("broadcast weights", version=update.policy.version):
                self._publisher.send(update, check)
        except UpdateAbandonedError as error:
            self._metrics.count("grpo_trainer_weight_broadcasts_total", outcome="abandoned")
            # else a newer update is named, or this actor leaves: no failure to report
            if self._named is update and not self._closing:
                log.warning("weights not sent", policy=str(update.policy), missed=error.missed, detail=str(error))
                self._tell(UpdateFailure(update=update.update, missed=error.missed, detail=str(error)))
            return
        except Exception as error:
            # an error of torch's store, the name service, memory. The sockets may be the cause, so MAX_FAULTS in a row
            # end the process
            self._faults += 1
            log.error("weights not sent", policy=str(update.policy), faults_in_a_row=self._faults, exc_info=error)
            self._metrics.count("grpo_trainer_weight_broadcasts_total", outcome="abandoned")
            if self._faults >= MAX_FAULTS:
                raise
            time.sleep(PAUSE_SECONDS)
            if self._named is update and not self._closing:
                detail = f"{type(error).__name__}: {error}"
                self._tell(UpdateFailure(update=update.update, missed=[], detail=detail))
            return
        self._faults = 0
        self._metrics.count("grpo_trainer_weight_broadcasts_total", outcome="sent")
        self._metrics.count("grpo_trainer_weight_wire_seconds_total", time.monotonic() - started)
