"""The packer's end of the control plane.

Consumes heartbeats and published directives. Emits the newest directive of a peer as the answer to each heartbeat, and
a changed directive at most every 20 ms per peer. The thread waits until a directive is due; a heartbeat or `publish`
ends the wait. The thread does nothing slow (P7: the control socket has a thread of its own); while the thread is held
up, the clock of leases stands still. No send waits: a directive without room is dropped, and the next directive repeats
the values.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog
import zmq
from numpy.typing import NDArray

from bus import codec, threads
from bus.connection import LOOK_MILLISECONDS
from bus.control.repeats import Repeated, Repeats
from bus.control.waker import Waker
from bus.counts import EdgeCounts
from bus.encryption import keys_for, secure_server
from bus.gate import Gate
from bus.hosts import choose_family, to_bind
from bus.keys import public_of
from bus.listening import ListeningClock
from bus.sockets import MAX_IN_A_ROW, drop, peer_of, send_frames, waiting
from bus.topology import CLOSE_LINGER_MILLISECONDS, CONTROL_HWM, PLAIN, milliseconds, prepare
from bus.unfinished import guard, port_of
from schemas import limits
from schemas.arrays import SMALL_BYTES, wire_bytes
from schemas.config.services import BusConfig
from schemas.errors import ConfigError, DecodeError, MessageTooLargeError
from schemas.messages import Directive, Heartbeat, Neighbours

log = structlog.get_logger("bus")

PUSH_INTERVAL_SECONDS = 0.02
"""Seconds between two directives pushed to the same peer."""
GATHER_SECONDS_PER_PEER, GATHER_SECONDS = 1e-4, 0.1
"""Seconds that the server waits for further heartbeats, per peer and at most: a turn of the loop costs as much as
several heartbeats."""
SLICE_SECONDS = 0.02
"""Seconds of encoding published directives before the server reads heartbeats again."""
TURNS_PER_LEASE = 6
"""The clock of leases stops `bus.lease` / TURNS_PER_LEASE seconds after the server has last read all heartbeats."""
KEYS_INTERVAL_SECONDS = 1.0
"""Seconds between two checks of the server whether its own key has been retired."""
TOO_LARGE_LOG_SECONDS = 10.0
"""Seconds between two log lines about directives that are too large."""
ENCODED_KEPT = 4
"""Encoded directives kept, to be sent to further peers."""
BIND_SECONDS = 1.0
"""Seconds for which `bind` is retried while the address is still in use by a closed socket."""


@dataclass
class Table:
    """An encoded `Neighbours`, shared by the directives that name it (`Message.apart`)."""

    name: str = ""
    frames: list[bytes] = field(default_factory=list)
    loads: bytes = b""
    """Newest bytes of the array `Message.loads`, which the directives that name the table end with."""
    loads_bytes: int = 0
    """Bytes of that array, without those that fill it up."""
    place: int = 0
    """Frame of these directives that ends with the loads: the header, or the last one if the loads are large."""


class Told(NamedTuple):
    """An encoded directive, and the table that it names, if any: then without the loads."""

    frames: list[bytes]
    table: Table | None

    def says(self, other: "Told | None") -> bool:
        """Return whether another directive says the same, but for loads."""
        return other is not None and self.table is other.table and self.frames == other.frames

    def newest(self) -> list[bytes]:
        """Return the frames, with the newest loads."""
        if self.table is None:
            return self.frames
        frames = self.frames.copy()
        frames[self.table.place] += self.table.loads
        return frames


class ControlServer:
    """The packer's end of the control plane: receives heartbeats, sends directives.

    Args:
        address: address to bind; a tcp address may have the port `*`. A name stands for each of its addresses that this
            machine has.
        on_heartbeat: called with the identity of the peer and each heartbeat, in the server's thread; must return
            quickly.
        bus: keys and limits of the run's bus. Where its `host` is a wildcard, all addresses of this machine are bound.
        on_lost: called with the identity of a probed peer without a connection; must return quickly.
        on_repeated: called with the heartbeats at rest that have come again in a turn, instead of `on_heartbeat`; must
            return quickly.
        stale_after: seconds since the end of a round after which heartbeats get no answer. A packer that hangs in a
            commit is then as silent as a stopped packer, and no peer acts on an old directive.

    Raises:
        ConfigError: the address can't be bound, or the keys can't be used.
    """

    def __init__(
        self,
        address: str,
        on_heartbeat: Callable[[bytes, Heartbeat], None],
        bus: BusConfig = PLAIN,
        on_lost: Callable[[bytes], None] = lambda identity: None,
        stale_after: float = float("inf"),
        on_repeated: Callable[[list[Repeated]], None] | None = None,
    ) -> None:
        self.counts = EdgeCounts("control")
        self._on_heartbeat, self._on_lost, self._on_repeated = on_heartbeat, on_lost, on_repeated
        self._address, self._ring, self._secret = address, keys_for(address, bus), b""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        prepare(self._socket, CONTROL_HWM, None, limits.CONTROL_FRAME_BYTES)
        # a peer that connects again takes its identity over: otherwise its heartbeats would be ignored until libzmq
        # notices that the old connection is dead
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # sending to a peer that is not connected raises EHOSTUNREACH instead of dropping silently
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._next_look = time.monotonic() + KEYS_INTERVAL_SECONDS
        self._gate = Gate(self.counts, limits.CONTROL_UNFINISHED_BYTES, limits.CONTROL_UNFINISHED_TOTAL_BYTES)
        self._to_bind = to_bind(address, bus.host)
        self._endpoints: list[str] = []
        """Bound addresses."""
        try:
            # keys and watch before bind: a connection could be accepted without them
            self._use_newest_key()
            guard(self._socket, self._gate, address, keys=bool(self._ring))
            self._bind()
        except zmq.ZMQError as error:
            self._socket.close(0)
            numbers = "" if self._to_bind == [address] else f" as {', '.join(self._to_bind)}"
            advice = "; start the packer on the machine with this address, or set bus.host: 0.0.0.0 (behind NAT)"
            raise ConfigError(
                f"bus.control: {address} can't be bound{numbers}: {error.strerror}"
                f"{advice if error.errno == zmq.EADDRNOTAVAIL else ''}"
            ) from error
        self._gate.port = port_of(self.endpoint)
        self._waker = Waker()
        self._newest: dict[bytes, Directive] = {}
        """Directives published last, by identity."""
        self._published: dict[bytes, Directive | None] = {}
        """Published directives, not encoded yet, by identity. None: forget the peer."""
        self._loads: NDArray[Any] | None = None
        """Newest loads, not encoded yet."""
        self._encoded: deque[tuple[Directive, Told]] = deque(maxlen=ENCODED_KEPT)
        """Directives encoded last: many peers may have the same one."""
        self._stale_after, self._round_ended_at = stale_after, time.monotonic()
        self._told_at: dict[bytes, float] = {}
        """Times of directives published in the middle of a round, by identity."""
        self._lock = threading.Lock()
        self._clock = ListeningClock(bus.lease / TURNS_PER_LEASE)
        # two turns in each allowed span: otherwise the clock of leases would stand still in an idle server. And one in
        # each span of the gate, which shuts no connection before the socket has been read
        self._longest_poll = min(LOOK_MILLISECONDS / 1000, bus.lease / TURNS_PER_LEASE / 2)
        self._next_too_large_log = 0.0
        self._unread = 0
        """Messages read since the socket was last known to be read to the end."""
        self._probes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._repeats = Repeats()
        self._latest: dict[bytes, Told] = {}
        """Newest directive, by identity."""
        self._table = Table()
        """Newest table of neighbours, encoded once."""
        self._table_of: dict[bytes, str] = {}
        """Name of the table that each peer has, by its newest heartbeat, or was sent since; by identity."""
        self._last_push: dict[bytes, float] = {}
        self._to_push: set[bytes] = set()
        """Identities with a changed directive, not sent yet."""
        self._stopping = False
        self._thread = threads.make("control-server", self._loop)

    def start(self) -> None:
        """Start the thread that reads heartbeats."""
        self._round_ended_at = time.monotonic()
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """First bound address, with the port that was found."""
        return self._endpoints[0]

    @property
    def public_key(self) -> bytes:
        """Public key of the socket; empty without keys."""
        return public_of(self._secret) if self._secret else b""

    @property
    def num_unencoded(self) -> int:
        """Number of published directives that are not encoded yet."""
        return len(self._published)

    @property
    def num_unsent(self) -> int:
        """Number of peers whose newest directive is on its way: not encoded, or not sent."""
        return len(self._published) + len(self._to_push)

    @property
    def listened(self) -> float:
        """Seconds on the clock of leases: every heartbeat that has come by this time has been handed to `on_heartbeat`.

        The clock stands still while no heartbeats are read (P8: leases run on the packer's clock, from the reading of a
        heartbeat), so no lease ends because the packer was held up.
        """
        return self._clock.now

    def publish(
        self,
        directives: dict[bytes, Directive | None],
        round_ended: bool = True,
        loads: NDArray[Any] | None = None,
    ) -> None:
        """Set the newest directives of peers. Changed directives are pushed. For one thread, the packer's.

        Args:
            directives: new directives by identity; None: forget the peer.
            loads: newest values of `Message.loads`, for the answers to all peers.
            round_ended: True if the directives of all other peers still hold. If False, the directives of other peers
                go stale `stale_after` seconds after the round before.
        """
        now = time.monotonic()
        # the answers repeat what has been published already
        changed = {i: directive for i, directive in directives.items() if self._newest.get(i) is not directive}
        for identity, directive in changed.items():
            if directive is None:
                del self._newest[identity]
            else:
                self._newest[identity] = directive
        with self._lock:
            self._published.update(changed)
            self._loads = self._loads if loads is None else loads
            if round_ended:
                self._round_ended_at, self._told_at = now, {}
            else:
                self._told_at |= dict.fromkeys(directives, now)
        if changed:
            self._waker.wake()

    def probe(self, identity: bytes) -> None:
        """Send a peer its newest directive again, and call `on_lost` if the connection is gone. Thread-safe."""
        self._probes.put(identity)
        self._waker.wake()

    def close(self) -> None:
        """Send the directives that are due and stop the thread; waits 2 s at most. May be called again."""
        self._stopping = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join(2.0)
        elif not self._thread.ident:
            # never started; a thread that has run closes its sockets itself, since sockets belong to one thread
            self._close_sockets()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.receiver, zmq.POLLIN)
        while not self._stopping:
            threads.mark("control.server")
            ready = dict(poller.poll(milliseconds(self._seconds_to_next_push())))
            gather = min(GATHER_SECONDS, len(self._latest) * GATHER_SECONDS_PER_PEER, self._seconds_to_next_push())
            # published directives and due pushes wait for nothing: the round has gathered already
            if self._waker.receiver in ready or self._waker.receiver.poll(int(1000 * gather)):
                self._waker.clear()
            while not self._probes.empty():
                identity = self._probes.get_nowait()
                if not self._send(identity):
                    self._on_lost(identity)
            self._read_heartbeats()
            self._take_published(SLICE_SECONDS)
            now = time.monotonic()
            for identity in [i for i in self._to_push if now - self._last_push.get(i, 0.0) >= PUSH_INTERVAL_SECONDS]:
                self._send(identity)
                self._last_push[identity] = now
            if self._ring and time.monotonic() >= self._next_look:
                self._follow_keys()
        # a directive published right before `close` must still leave
        self._take_published(float("inf"))
        for identity in list(self._to_push):
            self._send(identity)
        self._close_sockets()

    def _close_sockets(self) -> None:
        # LINGER is 0 otherwise, and the last directives would be dropped
        self._socket.close(linger=CLOSE_LINGER_MILLISECONDS)
        self._waker.close()

    def _use_newest_key(self) -> None:
        if not self._ring:
            return
        secrets = self._ring.current().server_secrets
        if not secrets:
            self._socket.close(0)
            raise ConfigError(
                f"bus.keys: {self._ring.folder} has no server.secret, which the packer needs; copy the file there, or "
                "set GRPO_BUS_SERVER_SECRET_KEY"
            )
        self._secret = secrets[0]  # the newest
        secure_server(self._socket, self._ring, self._secret, self.counts, self._gate)

    def _follow_keys(self) -> None:
        """Bind again with the newest key once the server's own key has been retired.

        Unbinding closes all connections, so peers with retired keys are gone. The other peers connect again within
        tenths of a second and repeat everything. While a rotation lasts (both keys are in the file) nothing happens.
        """
        self._next_look = time.monotonic() + KEYS_INTERVAL_SECONDS
        assert self._ring
        secrets = self._ring.current().server_secrets
        if self._secret in secrets or not secrets:  # no secrets: the file is gone; the key stays
            return
        for endpoint in self._endpoints:
            with contextlib.suppress(zmq.ZMQError):  # unbound already, if the bind below has failed before
                self._socket.unbind(endpoint)
        self._use_newest_key()
        try:
            self._bind()
        except zmq.ZMQError as error:
            self._secret = b""  # matches no key, so that the next look tries again
            log.warning(
                "control socket not rebound after key rotation; trying again",
                address=self._address,
                detail=error.strerror,
            )
        else:
            log.info("control socket rebound after key rotation", address=self._address)

    def _bind(self) -> None:
        """Bind the socket to each address that this machine has.

        Raises:
            zmq.ZMQError: this machine has none of the addresses, or one of them can't be bound.
        """
        bound: list[str] = []
        for number, address in enumerate(self._to_bind, start=1):
            choose_family(self._socket, address)
            try:
                self._bind_when_free(address)
            except zmq.ZMQError as error:
                # another machine has it: a name may stand for several
                if error.errno == zmq.EADDRNOTAVAIL and (bound or number < len(self._to_bind)):
                    continue
                raise
            bound.append(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        self._endpoints = bound

    def _bind_when_free(self, address: str) -> None:
        """Bind the socket to an address; retry for BIND_SECONDS while the address is in use.

        libzmq closes sockets in the background, so an address is free only a moment after the socket was closed.
        """
        deadline = time.monotonic() + BIND_SECONDS
        while True:
            try:
                self._socket.bind(address)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)

    def _seconds_to_next_push(self) -> float:
        if self._published:
            return 0.0
        if not self._to_push:
            return self._longest_poll
        now = time.monotonic()
        return max(0.0, min(self._last_push.get(i, 0.0) + PUSH_INTERVAL_SECONDS - now for i in self._to_push))

    def _take_published(self, seconds: float) -> None:
        """Encode published directives for at most `seconds`. The others wait for the next turn of the loop."""
        until = time.monotonic() + seconds
        while self._published and time.monotonic() < until:
            # for one directive at a time: `publish` must not wait for the encoding of all
            with self._lock:
                identity = next(iter(self._published))
                directive = self._published.pop(identity)
            if directive is None:
                # a peer that is gone for good would otherwise stay in these tables for the rest of the run
                self._latest.pop(identity, None)
                self._table_of.pop(identity, None)
                self._repeats.forget(identity)
                self._last_push.pop(identity, None)
                self._to_push.discard(identity)
                continue
            try:
                told = self._told(directive)
            except MessageTooLargeError as error:  # the peer keeps its older directive; other peers are not affected
                if time.monotonic() >= self._next_too_large_log:
                    self._next_too_large_log = time.monotonic() + TOO_LARGE_LOG_SECONDS
                    peer = identity.decode("utf-8", "replace")
                    log.error("a directive is too large to be sent", peer=peer, detail=str(error))
                continue
            # a directive that says nothing new is not pushed; the answers to heartbeats repeat it anyway
            if not told.says(self._latest.get(identity)):
                self._to_push.add(identity)
            self._latest[identity] = told
        # after the directives: with them a table may come that the loads belong to
        if self._loads is not None and not self._published:
            self._take_loads()

    def _told(self, directive: Directive) -> Told:
        """Encode a directive, and its table of neighbours if that is new: the table is the same object for all peers.

        Raises:
            MessageTooLargeError: the directive or the table is beyond a bound of the receivers.
        """
        known = next((told for one, told in self._encoded if one is directive), None)
        if known is not None:
            return known
        neighbours: Neighbours | None = getattr(directive, directive.apart) if directive.apart else None
        if neighbours is not None and neighbours.table != self._table.name:
            self._table = Table(neighbours.table, _copied(codec.encode(neighbours)))
        frames = _copied(codec.encode(directive))
        if neighbours is not None:
            # the same length, and so the same place, in all directives with this table
            loads = getattr(directive, directive.loads)
            table, place = self._table, 0 if loads.nbytes <= SMALL_BYTES else -1
            table.loads, table.loads_bytes, table.place = wire_bytes(loads), loads.nbytes, place
            assert frames[place].endswith(table.loads), f"a {directive.kind} does not end with its loads"
            frames[place] = frames[place].removesuffix(table.loads)
        told = Told(frames, None if neighbours is None else self._table)
        self._encoded.append((directive, told))
        return told

    def _take_loads(self) -> None:
        """Encode the newest loads, for all further answers."""
        with self._lock:
            loads, self._loads = self._loads, None
        # of another length if a directive with another table is still to be encoded
        if loads is not None and loads.nbytes == self._table.loads_bytes:
            self._table.loads = wire_bytes(loads)

    def _read_heartbeats(self) -> None:
        count, sweep = 0, self._gate.sweep
        repeated: list[Repeated] = []
        for frames in waiting(self._socket, MAX_IN_A_ROW):
            count += 1
            self._gate.took(frames[-1])
            identity = frames[0].bytes
            try:
                message = self._repeats.decode(identity, frames[1:])
            except DecodeError as error:
                drop(self.counts, error, peer_of(frames[0]))
                continue
            self.counts.add(codec.num_bytes(frames))
            if isinstance(message, Repeated):
                self._table_of[identity] = message.heartbeat.neighbours
                repeated.append(message)
            elif isinstance(message, Heartbeat):
                self._table_of[identity] = message.neighbours
                self._on_heartbeat(identity, message)
            else:
                continue
            self._send(identity)
        if repeated:
            self._hand_on(repeated)
        if count < MAX_IN_A_ROW:
            # bytes that had come by that sweep belong to messages that are not whole
            self._gate.empty(sweep)
        self._unread += count
        # all that had come is read: either the socket was empty, or more messages were read than its queues can hold
        # (HWM per peer; the socket takes from its peers in turn)
        if count < MAX_IN_A_ROW or self._unread > CONTROL_HWM * (1 + len(self._latest)):
            self._unread = 0
            self._clock.listened()

    def _hand_on(self, repeated: list[Repeated]) -> None:
        if self._on_repeated is not None:
            self._on_repeated(repeated)
            return
        for one in repeated:
            self._on_heartbeat(one.peer.encode(), one.message)

    def _send(self, identity: bytes) -> bool:
        """Send a peer its newest directive. Return False if no connection of this peer is left."""
        latest = self._latest.get(identity)
        self._to_push.discard(identity)  # an answer to a heartbeat makes the push superfluous
        if latest is None:
            return True
        if time.monotonic() - self._told_at.get(identity, self._round_ended_at) > self._stale_after:
            return True  # stale: the peer hears nothing until the round ends
        try:
            if latest.table is not None and self._table_of.get(identity) != latest.table.name:
                send_frames(self._socket, [identity, *latest.table.frames])
                self._table_of[identity] = latest.table.name
            send_frames(self._socket, [identity, *latest.newest()])
        except zmq.ZMQError as error:
            # EHOSTUNREACH: no connection is left, the sign that the process of a probed peer is dead (decision 0022).
            # Any other error is a full queue, and the next directive repeats the values
            return error.errno != zmq.EHOSTUNREACH
        return True


def _copied(frames: Iterable[bytes | memoryview]) -> list[bytes]:
    # encoded frames may share memory with the message, and these are sent many times
    return [bytes(frame) for frame in frames]
