"""An actor's place in the run: its boot id, its beats, the packer's newest State, when to leave and when to give up.

Every actor but the packer owns one. `latest` never blocks; `wait` returns with the next State or after its timeout.
"""

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import structlog

from bus.control import ControlClient
from bus.counts import EdgeCounts
from bus.topology import Addresses
from schemas.config import RunConfig
from schemas.errors import PeerRefusedError
from schemas.messages import ActorPhase, Beat, State

log = structlog.get_logger("membership")

SILENCE_WORTH_SAYING_SECONDS = 10.0
DRAIN_SECONDS = 20.0
"""Below the 30 s that Kubernetes leaves between SIGTERM and SIGKILL."""
FAREWELL_SECONDS = 0.5
"""For the packer to hear that a peer drains, and for what it had sent before to arrive."""


class StartOverError(Exception):
    """This process must begin again with nothing: another run, or its gang was told to exit."""


class PackerSilentError(Exception):
    """The packer has not been heard for `bus.peer_timeout`."""


class Drain:
    """The wish to leave: what is held is finished first, but not for longer than DRAIN_SECONDS.

    Whatever a peer leaves behind is issued or sent again, so leaving early costs time and loses nothing.
    """

    def __init__(self, seconds: float = DRAIN_SECONDS) -> None:
        self._seconds = seconds
        self._began: float | None = None

    def begin(self) -> None:
        """From any thread, and from a signal handler."""
        if self._began is None:
            self._began = time.monotonic()

    def __bool__(self) -> bool:
        return self._began is not None

    @property
    def phase(self) -> ActorPhase:
        """What the beat says of it."""
        return "draining" if self else "running"

    def may_leave(self, *, holds_work: bool) -> bool:
        """Whether it is time to go."""
        if self._began is None:
            return False
        waited = time.monotonic() - self._began
        if holds_work and waited > self._seconds:
            log.warning("leaving with work unfinished; others will do it again", after_seconds=self._seconds)
            return True
        return not holds_work and waited > FAREWELL_SECONDS


def new_boot_id() -> str:
    """A random id of this process."""
    return uuid.uuid4().hex[:16]


class Membership:
    """Beats of one actor and States for it."""

    def __init__(
        self,
        config: RunConfig,
        beat_type: type[Beat],
        name: str,
        on_state: Callable[[State], None] = lambda state: None,
        lose: Callable[[str], bool] | None = None,
    ) -> None:
        self.name, self.boot_id = name, new_boot_id()
        self.addresses = Addresses(config)
        self._timeout = config.bus.peer_timeout
        self._on_state = on_state
        self.on_turn: Callable[[], None] = lambda: None
        """Called whenever the owner looks at State: each time that its main loop goes round."""
        self._state: State | None = None
        self._run = ""
        self._news = threading.Event()
        self._said_silent_at = 0.0
        extra: dict[str, Any] = {"lose": lose} if lose else {}
        self._client = ControlClient(
            self.addresses.control,
            beat_type,
            name,
            self.boot_id,
            self._take,
            config.bus.beat_interval,
            bus=config.bus,
            **extra,
        )

    def start(self, **fields: Any) -> None:
        """Begin to beat with these fields."""
        self._client.report(**{"phase": "starting"} | fields)
        self._client.start()

    def report(self, *, urgent: bool = True, **fields: Any) -> None:
        """Change fields of the beat."""
        self._client.report(urgent=urgent, **fields)

    def latest(self) -> State | None:
        """The newest State.

        Raises:
            PeerRefusedError: the packer refuses this process.
            StartOverError: another run has taken the place of the one that this process belongs to.
            PackerSilentError: nothing heard for `bus.peer_timeout`.
        """
        self.on_turn()
        self._check_silence()
        state = self._state
        if state is not None:
            if state.refusal:
                raise PeerRefusedError(state.refusal)
            if self._run and state.run != self._run:
                raise StartOverError(f"the packer now serves run {state.run}, this process belongs to {self._run}")
            self._run = state.run
        return state

    def wait(self, timeout: float) -> State | None:
        """The newest State, after waiting up to `timeout` seconds for a new one."""
        self._news.wait(timeout)
        self._news.clear()
        return self.latest()

    @property
    def silent_seconds(self) -> float:
        """Since the packer was last heard."""
        return self._client.silent_seconds

    @property
    def counts(self) -> EdgeCounts:
        """Of the control edge."""
        return self._client.counts

    def close(self, phase: str = "done") -> None:
        """Say a last beat and stop."""
        self._client.report(phase=phase)
        self._client.close()

    def _take(self, state: State) -> None:
        self._state = state
        self._news.set()
        self._on_state(state)

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
