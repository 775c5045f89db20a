"""Events on their way from the packer's other threads to the round, which handles them in the main thread."""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.ledger.payload_files import Place
from schemas.messages import Heartbeat, Message


@dataclass(frozen=True)
class BeatHeard:
    """A heartbeat, as read by the control server's thread."""

    identity: str
    """Sender, `NAME/BOOT_ID`."""
    heartbeat: Heartbeat
    arrived: float
    """Seconds on the clock of leases at which the heartbeat was read."""


@dataclass(frozen=True)
class PeerLost:
    """A peer without a connection, as found by a probe of the control server."""

    identity: str


@dataclass(frozen=True)
class GroupArrived:
    """A message of this run in the inbox for scored groups. Its kind is not checked yet."""

    message: Message
    frames: Sequence[bytes | memoryview]
    """Frames as received."""
    digest: str
    """Digest of the frames (`actors.ledger.digest_of`)."""
    place: Place | None = None
    """Place of the frames in a file; None: the ledger stores them itself."""


Event = BeatHeard | PeerLost | GroupArrived


class Inflow:
    """Queue of events. `put` is for any thread; `take` and `look` are for the main thread."""

    def __init__(self) -> None:
        # unbounded: heartbeats are limited by the number of peers, groups by the tickets given out
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        """Queue an event. Never blocks."""
        self._events.put(event)

    def take(self, timeout: float, gather: float = 0.0) -> list[Event]:
        """Return all events in the queue.

        Args:
            timeout: longest wait for the first event, in seconds.
            gather: seconds to wait for more events after the first.
        """
        try:
            taken = [self._events.get(timeout=timeout)]
        except queue.Empty:
            return []
        if gather > 0.0:
            time.sleep(gather)
        while True:
            try:
                taken.append(self._events.get_nowait())
            except queue.Empty:
                return taken

    def look(self) -> list[Event]:
        """Return all events in the queue without taking any."""
        events = self.take(0.0)
        # behind events that have come meanwhile: order between peers does not count, and a peer's heartbeats are
        # numbered
        for event in events:
            self._events.put(event)
        return events
