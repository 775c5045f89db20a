"""The actor's end of the control plane.

Consumes reports of its actor, and directives. Emits a heartbeat every `bus.beat_interval`, and at once after an urgent
report (10 per second sustained). The thread waits until the next heartbeat is due; a directive or an urgent report ends
the wait. No send waits: a heartbeat without room is dropped, and the next heartbeat carries the same values.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from bus import codec, threads
from bus.control.connection import PackerConnection
from bus.fence import Fence
from bus.sockets import drop, drop_fenced
from bus.topology import PLAIN
from schemas import limits
from schemas.config.services import BusConfig
from schemas.errors import ConfigError, DecodeError
from schemas.messages import Directive, Heartbeat, Neighbours, check_name, fingerprint

log = structlog.get_logger("bus")

HEARTBEATS_PER_SECOND = 10.0
"""Heartbeats per second that a client sends at most, sustained."""
HEARTBEAT_BURST = 10.0
"""Heartbeats that a client may send at once after a pause."""


class ControlClient:
    """The actor's end of the control plane: sends heartbeats, receives directives.

    Args:
        address: address of the packer's control socket.
        heartbeat_type: message type of this actor's heartbeats.
        name: name of the actor.
        boot_id: id of this process, new at each start (P3: a peer is its name and boot id).
        on_directive: called with each admitted directive, in the client's thread; must return quickly.
        interval: seconds between two heartbeats.
        look: returns fields as they are at the moment of a heartbeat; called in the client's thread.
        bus: keys and limits of the run's bus.

    Raises:
        ConfigError: the name or the keys can't be used.
    """

    def __init__(
        self,
        address: str,
        heartbeat_type: type[Heartbeat],
        name: str,
        boot_id: str,
        on_directive: Callable[[Directive], None],
        interval: float = 1.0,
        look: Callable[[], Mapping[str, Any]] = dict,
        bus: BusConfig = PLAIN,
    ) -> None:
        self._connection = PackerConnection(address, identity_of(name, boot_id), bus)
        self.counts = self._connection.counts
        self._heartbeat_type, self._name, self._boot_id = heartbeat_type, name, boot_id
        self._on_directive, self._interval, self._look = on_directive, interval, look
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {}
        self._urgent = self._stopping = False
        self._fence, self._sequence = Fence(), 0
        self._tables: dict[str, Neighbours] = {}
        """The two newest tables of neighbours, by name: a directive under way may name the older one."""
        self.other_run = ""
        """Id of another run whose packer has answered since this run's packer was last heard; empty: none.

        P1: a process belongs to the run of its first directive."""
        self._tokens, self._last_heartbeat = HEARTBEAT_BURST, time.monotonic()
        self._last_heard = time.monotonic()
        self._way: tuple[str, str] | None = None
        self.num_moves = 0
        """Times that the packer was heard over another way: the packer, or this machine, has another address.

        Connections from before the move are dead, and TCP would find out a minute later."""
        self._thread = threads.make(f"control-{name}", self._loop)

    @property
    def num_refused(self) -> int:
        """Attempts to connect that were made after a refusal."""
        return self._connection.num_refused

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last admitted directive; before the first directive, since the client was made."""
        return time.monotonic() - self._last_heard

    @property
    def reported(self) -> Mapping[str, Any]:
        """Newest fields of the heartbeat, as reported so far."""
        with self._lock:
            return dict(self._fields)

    def start(self) -> None:
        """Start the thread that sends heartbeats. Every field of the heartbeat must have been reported before."""
        self._thread.start()

    def report(self, *, urgent: bool = True, **fields: Any) -> None:
        """Set fields of the next heartbeats. Thread-safe.

        Args:
            urgent: send a heartbeat as soon as the rate allows, if any field has changed. False: wait for the next
                heartbeat.
            fields: fields of the heartbeat; all other fields keep their values.
        """
        with self._lock:
            # by identity: values may be arrays, and an equal copy costs no more than one more heartbeat
            changed = any(self._fields.get(key) is not value for key, value in fields.items())
            self._fields.update(fields)
            if not (urgent and changed):
                return
            self._urgent = True
        self._connection.wake()

    def close(self) -> None:
        """Send a last heartbeat and stop the thread; waits 2 s at most. May be called again."""
        self._stopping = True
        self._connection.wake()
        if self._thread.is_alive():
            self._thread.join(2.0)
        elif not self._thread.ident:
            # never started; a thread that has run closes its sockets itself, since sockets belong to one thread
            self._connection.close()

    def _loop(self) -> None:
        while not self._stopping:
            threads.mark("control.client")
            # each heartbeat is answered; two intervals leave room for a lost directive, and for a connection to be made
            self._connection.renew(self._last_heard, 2 * self._interval)
            if self._seconds_to_next_heartbeat() <= 0.0:
                self._send_heartbeat()
            if self._connection.wait(self._seconds_to_next_heartbeat()):
                self._read_directives()
        self._send_heartbeat()  # the last one: it carries the actor's final phase
        self._connection.close()

    def _seconds_to_next_heartbeat(self) -> float:
        due = self._last_heartbeat + self._interval - time.monotonic()
        if self._urgent:  # a token bucket: wait until one whole token is there
            due = min(due, (1.0 - self._refilled()) / HEARTBEATS_PER_SECOND)
        return max(0.0, due)

    def _refilled(self) -> float:
        return min(HEARTBEAT_BURST, self._tokens + (time.monotonic() - self._last_heartbeat) * HEARTBEATS_PER_SECOND)

    def _send_heartbeat(self) -> None:
        # in one step: a report that comes after the copy makes the next heartbeat urgent
        with self._lock:
            fields, self._urgent = dict(self._fields), False
        # regular heartbeats take tokens too, but never wait for one
        self._tokens, self._last_heartbeat = max(0.0, self._refilled() - 1.0), time.monotonic()
        self._sequence += 1
        heartbeat = self._heartbeat_type(
            run=self._fence.run,
            term=self._fence.term,
            neighbours=next(reversed(self._tables), ""),
            name=self._name,
            boot_id=self._boot_id,
            sequence=self._sequence,
            fingerprint=None if self._fence.run else fingerprint(),  # the packer checks it at the first contact
            **self._look(),
            **fields,
        )
        self._connection.send(codec.encode(heartbeat))

    def _read_directives(self) -> None:
        newest: Directive | None = None
        for frames in self._connection.received():
            try:
                message = codec.decode(frames, limits.CONTROL_HEADER_BYTES, tables=self._tables)
            except DecodeError as error:
                # the table has been dropped on its way: the next heartbeat tells the packer which one is here
                self._urgent = self._urgent or error.reason == codec.UNKNOWN_TABLE
                drop(self.counts, error, "packer")
                continue
            self.counts.add(codec.num_bytes(frames))
            if isinstance(message, Neighbours):
                self._keep(message)
            if not isinstance(message, Directive):
                continue
            # P1 (a directive of another run) and P2 (of an older term): the first directive decides the run
            if reason := self._fence.refuses(message.run, message.term):
                drop_fenced(self.counts, reason, message, "packer")
                self.other_run = message.run if reason == "foreign_run" else self.other_run
                continue
            if not self._fence.run:
                # a process that waits for its name gets it with its next heartbeat (P3: holder of a name)
                self._urgent = True
            self._fence.follow(message.run, message.term)
            # directives are absolute, so older ones in the queue say nothing that the newest does not say
            newest = message
        if newest is not None:
            if self._way is None or self.silent_seconds > 2 * self._interval:
                self._note_way()
            self._last_heard, self.other_run = time.monotonic(), ""
            self._connection.accepted()
            self._on_directive(newest)

    def _note_way(self) -> None:
        before, self._way = self._way, self._connection.way
        if before is not None and before != self._way:
            self.num_moves += 1
            log.info("network changed", packer=self._way[0], address=self._way[1], before=" ".join(before))

    def _keep(self, table: Neighbours) -> None:
        if reason := self._fence.refuses(table.run):
            drop_fenced(self.counts, reason, table, "packer")
            return
        # popped first, so that the newest is the last
        self._tables.pop(table.table, None)
        self._tables[table.table] = table
        while len(self._tables) > 2:
            del self._tables[next(iter(self._tables))]


def identity_of(name: str, boot_id: str) -> bytes:
    """Return the ZeroMQ identity of a peer, `NAME/BOOT_ID` (P3: a peer is its name and boot id).

    Raises:
        ConfigError: the name is too long for an identity, or has forbidden characters.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(f"--name: {error}; use a shorter one: {name[:40]!a}") from error
    return f"{name}/{boot_id}".encode()
