"""The control plane: a DEALER in each actor, connected to the packer's ROUTER. Each side has one thread.

`ControlClient` sends a Beat every `bus.beat_interval`, and at once after an urgent report (10 per second sustained).
Until the next beat is due, the client waits for States and reports.
`ControlServer` answers each Beat with the newest State published for the peer, and pushes a changed State at most every
20 ms per peer (P6: both carry absolute values, so a single Beat or State may be lost, doubled or late). Its thread does
nothing slow (P7: the control socket has its own thread); if it is held up anyway, the clock of leases stands still.
Sockets are small (8 messages per peer) and never block: a message without room is dropped.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
import zmq

from bus import codec, threads
from bus.counts import EdgeCounts
from bus.curve import Link, keys_for, lock, unlock, watch_link
from bus.fence import Fence
from bus.gate import Gate
from bus.hosts import Route, choose_family, to_bind
from bus.keys import public_of
from bus.listening import ListeningClock
from bus.sockets import drop, drop_fenced, peer_of, send_frames, waiting
from bus.topology import CONTROL_HWM, milliseconds, prepare
from bus.unfinished import guard, port_of
from schemas import limits
from schemas.config.services import BusConfig
from schemas.errors import ConfigError, DecodeError, MessageTooLargeError
from schemas.messages import Beat, State, fingerprint
from schemas.messages.base import check_name

log = structlog.get_logger("bus")

BEATS_PER_SECOND = 10.0
"""Beats per second that a client sends at most, sustained."""
BEAT_BURST = 10.0
"""Beats that a client may send at once after a pause."""
PUSH_INTERVAL_SECONDS = 0.02
"""Seconds between two States pushed to the same peer."""
LAST_WORDS_MILLISECONDS = 200
"""Milliseconds for which a closed socket still tries to deliver the last beat or State."""
SLICE_SECONDS = 0.02
"""Seconds of encoding published States before the server reads beats again."""
TURNS_PER_LEASE = 6
"""The clock of leases stops `bus.lease` / TURNS_PER_LEASE seconds after the server has last read all beats."""
KEYS_INTERVAL_SECONDS = 1.0
"""Seconds between two checks of the server whether its own key has been retired."""
TOO_LARGE_LOG_SECONDS = 10.0
"""Seconds between two log lines about States that are too large."""
BIND_SECONDS = 1.0
"""Seconds for which `bind` is retried while the address is still in use by a closed socket."""
PLAIN = BusConfig()
AT_ONCE = 1000
"""Messages read in a row before the thread does anything else."""


_BELL_NUMBERS = itertools.count()


class _Bell:
    """Wakes a thread that polls sockets: an inproc PAIR. `ring` is thread-safe; `answer` is for the polling thread."""

    def __init__(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.receiver: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._sender: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        address = f"inproc://bell-{next(_BELL_NUMBERS)}"
        self.receiver.bind(address)
        self._sender.connect(address)
        self._lock = threading.Lock()
        self._rung = False

    def ring(self) -> None:
        with self._lock:  # sockets are not thread-safe
            # at most one message is under way, so that `send` never blocks at the high-water mark
            if not self._rung and not self._sender.closed:
                self._rung = True
                self._sender.send(b"")

    def answer(self) -> None:
        with self._lock:
            while self.receiver.poll(0):
                self.receiver.recv()
            self._rung = False

    def close(self) -> None:
        with self._lock:  # another thread may be ringing
            self._sender.close(0)
            self.receiver.close(0)


class ControlClient:
    """The actor's end of the control plane: sends Beats, receives States.

    Args:
        address: address of the packer's control socket.
        beat_type: message type of this actor's beats.
        name: name of the actor.
        boot_id: id of this process, new at each start (P3: a peer is its name and boot id).
        on_state: called with each admitted State, in the client's thread; must return quickly.
        interval: seconds between two beats.
        bus: keys and limits of the run's bus.

    Raises:
        ConfigError: the name or the keys can't be used.
    """

    def __init__(
        self,
        address: str,
        beat_type: type[Beat],
        name: str,
        boot_id: str,
        on_state: Callable[[State], None],
        interval: float = 1.0,
        bus: BusConfig = PLAIN,
    ) -> None:
        self.counts = EdgeCounts("control")
        self._ring = keys_for(address, bus)
        self._beat_type, self._name, self._boot_id = beat_type, name, boot_id
        self._on_state, self._interval = on_state, interval
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        prepare(self._socket, CONTROL_HWM, None, limits.CONTROL_FRAME_BYTES)
        # before connecting: the ROUTER addresses States by it
        self._socket.setsockopt(zmq.IDENTITY, identity_of(name, boot_id))
        self._bell = _Bell()
        self._link = Link(self._bell.ring)
        if self._ring:  # before connecting: libzmq reports no refusal that happened before the monitor
            watch_link(self._socket, self._link, address, until_heard=True)
        self._route, self._endpoint = Route(address, self._bell.ring), ""
        self._connect()
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {}
        self._urgent = self._stopping = False
        self._fence, self._sequence = Fence(), 0
        self.other_run = ""
        """Id of another run whose packer has answered since this run's packer was last heard; empty: none.

        P1: a process belongs to the run of its first State."""
        self._tokens, self._last_beat = BEAT_BURST, time.monotonic()
        self._last_heard = time.monotonic()
        self._thread = threads.make(f"control-{name}", self._loop)

    @property
    def num_refused(self) -> int:
        """Attempts to connect that were made after a refusal."""
        return self._link.attempt

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last admitted State; before the first State, since the client was made."""
        return time.monotonic() - self._last_heard

    @property
    def reported(self) -> Mapping[str, Any]:
        """Newest fields of the beat, as reported so far."""
        with self._lock:
            return dict(self._fields)

    def start(self) -> None:
        """Start the thread that sends beats. Every field of the beat must have been reported before."""
        self._thread.start()

    def report(self, *, urgent: bool = True, **fields: Any) -> None:
        """Set fields of the next beats. Thread-safe.

        Args:
            urgent: send a beat as soon as the rate allows, if any field has changed. False: wait for the next beat.
            fields: fields of the beat; all other fields keep their values.
        """
        with self._lock:
            # by identity: values may be arrays, and an equal copy costs no more than one more beat
            changed = any(self._fields.get(key) is not value for key, value in fields.items())
            self._fields.update(fields)
            if not (urgent and changed):
                return
            self._urgent = True
        self._bell.ring()

    def close(self) -> None:
        """Send a last beat and stop the thread; waits 2 s at most. May be called again."""
        self._stopping = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join(2.0)
        elif not self._thread.ident:  # never started; a thread that has run closes its sockets itself
            self._close_sockets()

    def _connect(self) -> None:
        if self._ring:  # libzmq reads the keys when it connects
            unlock(self._socket, self._ring, self._ring.current().server_publics, self._link.attempt)
        self._endpoint, self._connected_at = self._route.endpoint, time.monotonic()
        if self._endpoint:  # empty until the packer's name is resolved
            choose_family(self._socket, self._endpoint)
            self._socket.connect(self._endpoint)

    def _connect_again(self) -> None:
        """Connect again after a refusal, with the newest keys: the packer's or this actor's may have been rotated."""
        if self._endpoint:
            with contextlib.suppress(zmq.ZMQError):  # libzmq may have given the connection up already
                self._socket.disconnect(self._endpoint)
        self._connect()

    def _follow_name(self) -> None:
        """Resolve the packer's name again while no State comes, and connect to the new address (P0: discovery)."""
        # each beat is answered; two intervals leave room for a lost State, and for a connection to be made
        if time.monotonic() - max(self._last_heard, self._connected_at) > 2 * self._interval:
            self._route.look()
        if self._route.endpoint != self._endpoint:
            self._connect_again()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.receiver, zmq.POLLIN)
        while not self._stopping:
            threads.pass_by("control.client")
            if self._link.wants_another_try():
                self._connect_again()
            self._follow_name()
            self._beat_when_due()
            ready = dict(poller.poll(milliseconds(self._seconds_to_next_beat())))
            if self._bell.receiver in ready:
                self._bell.answer()
            if self._socket in ready:
                self._read_states()
        self._beat()  # the last one: it carries the actor's final phase
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._route.close()
        self._socket.close(linger=LAST_WORDS_MILLISECONDS)  # LINGER is 0 otherwise, and the last beat would be dropped
        self._bell.close()

    def _seconds_to_next_beat(self) -> float:
        due = self._last_beat + self._interval - time.monotonic()
        if self._urgent:  # a token bucket: wait until one whole token is there
            due = min(due, (1.0 - self._refilled()) / BEATS_PER_SECOND)
        return max(0.0, due)

    def _refilled(self) -> float:
        return min(BEAT_BURST, self._tokens + (time.monotonic() - self._last_beat) * BEATS_PER_SECOND)

    def _beat_when_due(self) -> None:
        if self._seconds_to_next_beat() <= 0.0:
            self._beat()

    def _beat(self) -> None:
        with self._lock:  # in one step: a report that comes after the copy makes the next beat urgent
            fields, self._urgent = dict(self._fields), False
        # regular beats take tokens too, but never wait for one
        self._tokens, self._last_beat = max(0.0, self._refilled() - 1.0), time.monotonic()
        self._sequence += 1
        beat = self._beat_type(
            run=self._fence.run,
            term=self._fence.term,
            name=self._name,
            boot_id=self._boot_id,
            sequence=self._sequence,
            fingerprint=None if self._fence.run else fingerprint(),  # the packer checks it at the first contact
            **fields,
        )
        try:
            send_frames(self._socket, codec.encode(beat))
        except zmq.Again:
            return  # the packer is away and the queue is full: the next beat carries the same values

    def _read_states(self) -> None:
        newest: State | None = None
        for frames in waiting(self._socket, AT_ONCE):
            try:
                message = codec.decode(frames, limits.CONTROL_HEADER_BYTES)
            except DecodeError as error:
                drop(self.counts, error, "packer")
                continue
            self.counts.add(codec.num_bytes(frames))
            if isinstance(message, State) and self._admits(message):
                newest = message  # States are absolute: older ones that wait before it are of no use
        if newest is not None:
            self._last_heard, self.other_run = time.monotonic(), ""
            self._link.refused = ""  # a refusal of an earlier attempt, told late
            self._on_state(newest)

    def _admits(self, state: State) -> bool:
        """Return whether a State comes from this run's packer in its newest term (P1: run, P2: term).

        The first State decides the run.
        """
        reason = self._fence.refuses(state.run, state.term)
        if reason:
            drop_fenced(self.counts, reason, state, "packer")
            self.other_run = state.run if reason == "foreign_run" else self.other_run
            return False
        if not self._fence.run:
            self._urgent = True  # a process that waits for its name gets it with its next beat (P3: holder of a name)
        self._fence.follow(state.run, state.term)
        return True


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


class ControlServer:
    """The packer's end of the control plane: receives Beats, sends States.

    Args:
        address: address to bind; a tcp address may have the port `*`.
        on_beat: called with the identity of the peer and each Beat, in the server's thread; must return quickly.
        bus: keys and limits of the run's bus.
        on_lost: called with the identity of a probed peer without a connection; must return quickly.
        stale_after: seconds since the end of a round after which beats get no answer. A packer that hangs in a commit
            is then as silent as a stopped packer, and no peer acts on an old State.

    Raises:
        ConfigError: the address can't be bound, or the keys can't be used.
    """

    def __init__(
        self,
        address: str,
        on_beat: Callable[[bytes, Beat], None],
        bus: BusConfig = PLAIN,
        on_lost: Callable[[bytes], None] = lambda identity: None,
        stale_after: float = float("inf"),
    ) -> None:
        self.counts = EdgeCounts("control")
        self._on_beat, self._on_lost = on_beat, on_lost
        self._address, self._ring, self._secret = address, keys_for(address, bus), b""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        prepare(self._socket, CONTROL_HWM, None, limits.CONTROL_FRAME_BYTES)
        # a peer that connects again takes its identity over: otherwise its beats would be ignored until libzmq notices
        # that the old connection is dead
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # sending to a peer that is not connected raises EHOSTUNREACH instead of dropping silently
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._next_look = time.monotonic() + KEYS_INTERVAL_SECONDS
        self._gate = Gate(self.counts, limits.CONTROL_UNFINISHED_BYTES, limits.CONTROL_UNFINISHED_TOTAL_BYTES)
        self._to_bind = to_bind(address)
        choose_family(self._socket, self._to_bind)
        try:
            # keys and watch before bind: a connection could be accepted without them
            self._use_newest_key()
            guard(self._socket, self._gate, address, keys=bool(self._ring))
            self._bind()
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise ConfigError(f"bus.control: {address} can't be bound: {error.strerror}") from error
        self._endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._gate.port = port_of(self._endpoint)
        self._bell = _Bell()
        self._published: dict[bytes, State | None] = {}
        """Published States, not encoded yet, by identity. None: forget the peer."""
        self._stale_after, self._round_ended_at = stale_after, time.monotonic()
        self._told_at: dict[bytes, float] = {}
        """Times of States published in the middle of a round, by identity."""
        self._lock = threading.Lock()
        self._clock = ListeningClock(bus.lease / TURNS_PER_LEASE)
        # two turns in each allowed span: otherwise the clock of leases would stand still in an idle server
        self._longest_poll = min(1.0, bus.lease / TURNS_PER_LEASE / 2)
        self._next_too_large_log = 0.0
        self._unread = 0
        """Messages read since the socket was last known to be read to the end."""
        self._probes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._latest: dict[bytes, list[bytes]] = {}
        """Frames of the newest State, by identity."""
        self._last_push: dict[bytes, float] = {}
        self._to_push: set[bytes] = set()
        """Identities with a changed State, not sent yet."""
        self._stopping = False
        self._thread = threads.make("control-server", self._loop)

    def start(self) -> None:
        """Start the thread that reads beats."""
        self._round_ended_at = time.monotonic()
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Bound address, with the port that was found."""
        return self._endpoint

    @property
    def public_key(self) -> bytes:
        """Public key of the socket; empty without keys."""
        return public_of(self._secret) if self._secret else b""

    @property
    def num_unencoded(self) -> int:
        """Number of published States that are not encoded yet."""
        return len(self._published)

    @property
    def listened(self) -> float:
        """Seconds on the clock of leases: every beat that has come by this time has been handed to `on_beat`.

        The clock stands still while no beats are read (P8: leases run on the packer's clock, from the reading of a
        beat), so no lease ends because the packer was held up.
        """
        return self._clock.now

    def publish(self, states: dict[bytes, State | None], round_ended: bool = True) -> None:
        """Set the newest States of peers. Changed States are pushed. Thread-safe.

        Args:
            states: new States by identity; None: forget the peer.
            round_ended: True if the States of all other peers still hold. If False, the States of other peers go stale
                `stale_after` seconds after the round before.
        """
        now = time.monotonic()
        with self._lock:
            self._published.update(states)
            if round_ended:
                self._round_ended_at, self._told_at = now, {}
            else:
                self._told_at |= dict.fromkeys(states, now)
        if states:
            self._bell.ring()

    def probe(self, identity: bytes) -> None:
        """Send a peer its newest State again, and call `on_lost` if the connection is gone. Thread-safe."""
        self._probes.put(identity)
        self._bell.ring()

    def close(self) -> None:
        """Send the States that are due and stop the thread; waits 2 s at most. May be called again."""
        self._stopping = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join(2.0)
        elif not self._thread.ident:  # never started; a thread that has run closes its sockets itself
            self._close_sockets()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.receiver, zmq.POLLIN)
        while not self._stopping:
            threads.pass_by("control.server")
            # idle: each peer with a whole message has been served by now, since the turn before has emptied the socket,
            # or taken AT_ONCE messages from its peers in turn
            with self._gate.idle():
                ready = dict(poller.poll(milliseconds(self._seconds_to_next_push())))
            if self._bell.receiver in ready:
                self._bell.answer()
            self._answer_probes()
            self._read_beats()
            self._take_published(SLICE_SECONDS)
            self._push_due()
            if self._ring and time.monotonic() >= self._next_look:
                self._follow_keys()
        # a State published right before `close` must still leave
        self._take_published(float("inf"))
        for identity in list(self._to_push):
            self._send(identity)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.close(linger=LAST_WORDS_MILLISECONDS)
        self._bell.close()

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
        lock(self._socket, self._ring, self._secret, self.counts, self._gate)

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
        with contextlib.suppress(zmq.ZMQError):  # unbound already, if the bind below has failed before
            self._socket.unbind(self._endpoint)
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
        """Bind the socket; retry for BIND_SECONDS while the address is in use.

        libzmq closes sockets in the background, so an address is free only a moment after the socket was closed.
        """
        deadline = time.monotonic() + BIND_SECONDS
        while True:
            try:
                self._socket.bind(self._to_bind)
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
        """Encode published States for at most `seconds`. The others wait for the next turn of the loop."""
        until = time.monotonic() + seconds
        while self._published and time.monotonic() < until:
            with self._lock:  # for one State at a time: `publish` must not wait for the encoding of all
                identity = next(iter(self._published))
                state = self._published.pop(identity)
            if state is None:
                self._latest.pop(identity, None)
                self._last_push.pop(identity, None)
                self._to_push.discard(identity)
                continue
            try:
                # copies: encoded frames may share memory with the State, and these are sent many times
                frames = [bytes(frame) for frame in codec.encode(state)]
            except MessageTooLargeError as error:
                self._say_too_large(identity, error)
                continue
            if self._latest.get(identity) != frames:  # an equal State is not pushed; beats get it anyway
                self._latest[identity] = frames
                self._to_push.add(identity)

    def _say_too_large(self, identity: bytes, error: MessageTooLargeError) -> None:
        """Log that a peer keeps its older State, at most every TOO_LARGE_LOG_SECONDS. Other peers are not affected."""
        if time.monotonic() >= self._next_too_large_log:
            self._next_too_large_log = time.monotonic() + TOO_LARGE_LOG_SECONDS
            log.error("a State is too large to be sent", peer=identity.decode("utf-8", "replace"), detail=str(error))

    def _answer_probes(self) -> None:
        while not self._probes.empty():
            identity = self._probes.get_nowait()
            if not self._send(identity):
                self._on_lost(identity)

    def _read_beats(self) -> None:
        count = 0
        for frames in waiting(self._socket, AT_ONCE):
            count += 1
            self._gate.took(frames[-1])
            try:
                message = codec.decode(frames[1:], limits.CONTROL_HEADER_BYTES)
            except DecodeError as error:
                drop(self.counts, error, peer_of(frames[0]))
                continue
            self.counts.add(codec.num_bytes(frames))
            if isinstance(message, Beat):
                identity = frames[0].bytes
                self._on_beat(identity, message)
                self._send(identity)
        self._unread += count
        # all that had come is read: either the socket was empty, or more messages were read than its queues can hold
        # (HWM per peer; the socket takes from its peers in turn)
        if count < AT_ONCE or self._unread > CONTROL_HWM * (1 + len(self._latest)):
            self._unread = 0
            self._clock.listened()

    def _push_due(self) -> None:
        now = time.monotonic()
        for identity in [i for i in self._to_push if now - self._last_push.get(i, 0.0) >= PUSH_INTERVAL_SECONDS]:
            self._send(identity)
            self._last_push[identity] = now

    def _send(self, identity: bytes) -> bool:
        """Send a peer its newest State. Return False if no connection of this peer is left."""
        latest = self._latest.get(identity)
        self._to_push.discard(identity)  # an answer to a beat makes the push superfluous
        if latest is None:
            return True
        if time.monotonic() - self._told_at.get(identity, self._round_ended_at) > self._stale_after:
            return True  # stale: the peer hears nothing until the round ends
        try:
            send_frames(self._socket, [identity, *latest])
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH  # any other error: the queue is full, the next State repeats it
        return True
