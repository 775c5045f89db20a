"""An actor's place in the run: boot id, heartbeats, the packer's newest directive, when to leave and when to give up.

Every actor but the packer owns a Membership. `latest` never blocks. `wait` returns with the next directive or after a
timeout.
"""

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from actors.process import tasks
from actors.process.liveness import Liveness
from bus.control import ControlClient
from bus.counts import EdgeCounts
from bus.topology import Addresses
from schemas.config import RunConfig
from schemas.errors import NameTakenError, PeerRefusedError
from schemas.messages import ActorPhase, Directive, Heartbeat, ObserverDirective

log = structlog.get_logger("membership")

SILENCE_WORTH_SAYING_SECONDS = 10.0
"""Seconds without a directive after which a warning is logged, and between two warnings."""
DRAIN_SECONDS = 20.0
"""Longest time to finish work after the wish to leave; below Kubernetes' 30 s between SIGTERM and SIGKILL."""
FAREWELL_SECONDS = 0.5
"""Time for the packer to hear of the drain, and for messages sent before to arrive."""


class StartOverError(Exception):
    """The process must start over without its state: the run has changed, or the trainer's gang was told to exit."""


class PackerSilentError(Exception):
    """No directive has come from the packer for `bus.peer_timeout`."""


class Drain:
    """Wish to leave: the actor finishes its work first, for at most `seconds` (infinite: no limit).

    Unfinished work is issued or sent again elsewhere, so leaving early costs time and loses nothing.
    """

    def __init__(self, seconds: float = DRAIN_SECONDS) -> None:
        self._seconds = seconds
        self._began: float | None = None

    def begin(self) -> None:
        """Start to drain. Thread-safe; also for signal handlers."""
        if self._began is None:
            self._began = time.monotonic()

    def __bool__(self) -> bool:
        return self._began is not None

    @property
    def phase(self) -> ActorPhase:
        """Phase for the heartbeat."""
        return "draining" if self else "running"

    def may_leave(self, *, holds_work: bool) -> bool:
        """Return whether the actor may exit now."""
        if self._began is None:
            return False
        waited = time.monotonic() - self._began
        # the drain's time is over; the work is issued or sent again elsewhere
        if holds_work and waited > self._seconds:
            log.warning("leaving with work unfinished; others will do it again", after_seconds=self._seconds)
            return True
        # even without work: the packer must hear of the drain, and count this peer as leaving and not as dead
        return not holds_work and waited > FAREWELL_SECONDS


def new_boot_id() -> str:
    """Return a random id for this process: 16 hex digits."""
    return uuid.uuid4().hex[:16]


class Membership:
    """Membership of an actor in the run: sends heartbeats and keeps the newest directive.

    Args:
        config: configuration of the run.
        heartbeat_type: the actor's kind of heartbeat.
        name: name in the run.
        on_directive: called with each directive, in the control thread; must return quickly.
    """

    def __init__(
        self,
        config: RunConfig,
        heartbeat_type: type[Heartbeat],
        name: str,
        on_directive: Callable[[Directive], None] = lambda directive: None,
    ) -> None:
        self.name, self.boot_id = name, new_boot_id()
        self.addresses = Addresses(config)
        self._timeout, self._lease = config.bus.peer_timeout, config.bus.lease
        self._on_directive = on_directive
        self.liveness = Liveness()
        """Liveness of the owner's main loop, which calls `latest` once per iteration."""
        self._directive: Directive | None = None
        self._news = threading.Event()
        # 0.0 on the monotonic clock is long ago: the first silence is told at once
        self._said_silent_at = 0.0
        self._client = ControlClient(
            self.addresses.control,
            heartbeat_type,
            name,
            self.boot_id,
            self._take,
            config.bus.beat_interval,
            lambda: {"task": tasks.reported()},
            bus=config.bus,
        )

    def start(self, **fields: Any) -> None:
        """Start to send heartbeats, with these fields set."""
        self._client.report(**{"phase": "starting"} | fields)
        self._client.start()

    def report(self, *, urgent: bool = True, **fields: Any) -> None:
        """Change fields of the heartbeat.

        Args:
            urgent: send a heartbeat at once, not with the next interval.
            fields: new values by name.
        """
        self._client.report(urgent=urgent, **fields)

    @property
    def reported(self) -> Mapping[str, Any]:
        """Newest fields of the heartbeat, as reported so far."""
        return self._client.reported

    def latest(self) -> Directive | None:
        """Return the newest directive; None before the first.

        Raises:
            PeerRefusedError: the packer refuses this process.
            NameTakenError: the packer refuses only the process's name.
            StartOverError: for a lease only the packer of another run has answered, in place of this process's own
                packer (P1: a process belongs to the run of the first directive taken).
            PackerSilentError: no directive for `bus.peer_timeout`.
        """
        self.liveness.turn()
        # before the directive is looked at: an old directive must not hide that its packer is gone
        self._check_silence()
        directive, other = self._directive, self._client.other_run
        # before its first directive a process belongs to no run, and may join any
        if other and self.silent_seconds > self._lease and directive is not None:
            raise StartOverError(f"the packer now serves run {other}, this process belongs to {directive.run}")
        if directive is not None and directive.refusal:
            taken = isinstance(directive, ObserverDirective) and directive.name_taken
            raise NameTakenError(directive.refusal) if taken else PeerRefusedError(directive.refusal)
        return directive

    def wait(self, timeout: float) -> Directive | None:
        """Wait up to `timeout` seconds for a new directive and return the newest. Raises as `latest` does."""
        self._news.wait(timeout)
        # cleared before the look: a directive that comes in between sets the event again
        self._news.clear()
        return self.latest()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the packer was last heard."""
        return self._client.silent_seconds

    @property
    def num_moves(self) -> int:
        """Times that the address of the packer or of this machine has changed: older connections are dead."""
        return self._client.num_moves

    @property
    def counts(self) -> EdgeCounts:
        """Counts of the control connection."""
        return self._client.counts

    def close(self, phase: str = "done") -> None:
        """Send a last heartbeat with this phase and stop sending."""
        self._client.report(phase=phase)
        self._client.close()

    def _take(self, directive: Directive) -> None:
        # in the control thread: the owner's thread sees the directive at its next look
        self._directive = directive
        self._news.set()
        self._on_directive(directive)

    def _check_silence(self) -> None:
        silent = self.silent_seconds
        if silent > self._timeout:
            raise PackerSilentError(
                f"the packer at {self.addresses.control} has been silent for {silent:.0f} s, more than "
                f"bus.peer_timeout {self._timeout:g} s; is it running, with this configuration?"
            )
        if (
            silent > SILENCE_WORTH_SAYING_SECONDS
            and time.monotonic() - self._said_silent_at > SILENCE_WORTH_SAYING_SECONDS
        ):
            self._said_silent_at = time.monotonic()
            log.warning(
                "packer silent", seconds=round(silent), address=self.addresses.control, gives_up_after=self._timeout
            )
