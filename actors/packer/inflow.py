"""Events on their way from the packer's other threads to the round, which handles them in the main thread."""

import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actors.ledger.payload_files import Place
from bus.control import Repeated
from schemas.messages import Heartbeat, Message

MAX_REMEMBERED = 10_000
"""Greatest number of processes whose newest heartbeat is remembered."""


class BeatHeard(NamedTuple):
    """A heartbeat, as read by the control server's thread."""

    identity: str
    """Sender, `NAME/BOOT_ID`."""
    heartbeat: Heartbeat
    arrived: float
    """Seconds on the clock of leases at which the heartbeat was read."""


class BeatsRepeated(NamedTuple):
    """Heartbeats at rest that have come again, as read by the control server's thread in a turn."""

    repeated: Sequence[Repeated]
    arrived: float
    """Seconds on the clock of leases at which they were read."""


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


@dataclass(frozen=True)
class BatchesBuilt:
    """The batches of a large step are built: the round sends them."""


def senders(event: "Event") -> list[str]:
    """Return the identities of the peers whose heartbeats an event has."""
    if isinstance(event, BeatHeard):
        return [event.identity]
    return [one.peer for one in event.repeated] if isinstance(event, BeatsRepeated) else []


Event = BeatHeard | BeatsRepeated | PeerLost | GroupArrived | BatchesBuilt


class Inflow:
    """Queue of events.

    `put` is for any thread, `heard` and `repeated` are for one, `take` and `look` for the main thread.
    """

    def __init__(self) -> None:
        # unbounded: heartbeats are limited by the number of peers, groups by the tickets given out
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._quiet: deque[BeatHeard | BeatsRepeated] = deque()
        """Heartbeats that say nothing new. They wait for the next round, and cause none."""
        self._newest: dict[str, Heartbeat] = {}
        """Newest heartbeat of each process, by identity."""

    def put(self, event: Event) -> None:
        """Queue an event. Never blocks."""
        self._events.put(event)

    def heard(self, event: BeatHeard) -> None:
        """Queue a heartbeat; wake the main thread unless it says nothing new but counters. Never blocks."""
        heartbeat, before = event.heartbeat, self._newest.pop(event.identity, None)
        self._newest[event.identity] = heartbeat
        if len(self._newest) > MAX_REMEMBERED:
            del self._newest[next(iter(self._newest))]
        if heartbeat.quiet and heartbeat.repeats(before, heartbeat.counters):
            self._quiet.append(event)
        else:
            self._events.put(event)

    def repeated(self, event: BeatsRepeated) -> None:
        """Queue heartbeats that have come again, without waking the main thread. Never blocks."""
        self._quiet.append(event)

    def take(self, timeout: float, gather: float = 0.0) -> list[Event]:
        """Return all events in the queue, and all heartbeats that say nothing new.

        Args:
            timeout: longest wait for the first event, in seconds.
            gather: seconds to wait for more events after the first.
        """
        taken: list[Event] = []
        try:
            taken.append(self._events.get(timeout=timeout))
            if gather > 0.0:
                time.sleep(gather)
            while True:
                taken.append(self._events.get_nowait())
        except queue.Empty:
            pass
        # after those that say something new: of one process they are either older, or repeat the newest
        while self._quiet:
            taken.append(self._quiet.popleft())
        return taken

    def look(self) -> list[Event]:
        """Return all events in the queue without taking any."""
        events = self.take(0.0)
        # behind events that have come meanwhile: order between peers does not count, and a peer's heartbeats are
        # numbered
        for event in events:
            self._events.put(event)
        return events
