"""The control plane: each actor's DEALER to the packer's ROUTER.

A `ControlClient` owns one thread. It consumes reports of its actor and States of the packer; it emits a Beat every
`bus.beat_interval` and on urgent change, at most ten a second sustained; it waits on its socket and a wake-up, both
under the next beat's deadline.

A `ControlServer` owns one thread (P7). It consumes Beats and published States; it answers each Beat at once with the
newest published State of that peer, and sends a changed State unasked, at most every 20 ms a peer (P6).

Any single Beat or State may be lost, doubled or late on either side: both are absolute, and the next one says it all
again. Sockets are small (HWM 8) and never block: what does not fit is dropped for the same reason.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
import zmq

from bus import codec
from bus.counts import EdgeCounts
from bus.curve import Link, keys_for, lock, unlock, watch_link
from bus.sockets import drop, peer_of, send_frames, waiting
from bus.topology import CONTROL_HWM, milliseconds, prepare
from schemas.config.services import BusConfig
from schemas.errors import ConfigError, DecodeError
from schemas.messages import Beat, State, fingerprint

log = structlog.get_logger("bus")

MAX_CONTROL_BYTES = 16 << 20
BEATS_PER_SECOND = 10.0
BEAT_BURST = 10.0
PUSH_INTERVAL_SECONDS = 0.02
LAST_WORDS_MILLISECONDS = 200
"""How long a closed socket tries to deliver the last beat or State."""
KEYS_INTERVAL_SECONDS = 1.0
"""Between two looks of the server whether its own key has been retired."""
BIND_SECONDS = 1.0
"""For an address to be free again."""
PLAIN = BusConfig()
AT_ONCE = 1000
"""Messages read before anything else gets its turn, however many come."""

Lossy = Callable[[str], bool]
"""For tests: given the kind of a message about to be sent, whether to lose it."""


def _never(kind: str) -> bool:
    return False


_BELL_NUMBERS = itertools.count()


class _Bell:
    """Wakes a thread that polls sockets: an inproc pair whose sending end may be rung by any thread."""

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
        with self._lock:
            if not self._rung and not self._sender.closed:
                self._rung = True
                self._sender.send(b"")

    def answer(self) -> None:
        with self._lock:
            while self.receiver.poll(0):
                self.receiver.recv()
            self._rung = False

    def close(self) -> None:
        with self._lock:
            self._sender.close(0)
            self.receiver.close(0)


class ControlClient:
    """One actor's side. `on_state` runs in the client's thread and must return quickly."""

    def __init__(
        self,
        address: str,
        beat_type: type[Beat],
        name: str,
        boot_id: str,
        on_state: Callable[[State], None],
        interval: float = 1.0,
        lose: Lossy = _never,
        bus: BusConfig = PLAIN,
    ) -> None:
        self.counts = EdgeCounts("control")
        self._ring = keys_for(address, bus)
        self._beat_type, self._name, self._boot_id = beat_type, name, boot_id
        self._on_state, self._interval, self._lose = on_state, interval, lose
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        prepare(self._socket, CONTROL_HWM, None, MAX_CONTROL_BYTES)
        self._socket.setsockopt(zmq.IDENTITY, identity_of(name, boot_id))
        self._bell = _Bell()
        self._address, self._link = address, Link(self._bell.ring)
        if self._ring:
            watch_link(self._socket, self._link, address, until_heard=True)
        self._connect()
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {}
        self._urgent = self._stopping = False
        self._run, self._term, self._sequence = "", 0, 0
        self._tokens, self._last_beat = BEAT_BURST, time.monotonic()
        self._last_heard = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name=f"control-{name}", daemon=True)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the packer was last heard (P8)."""
        return time.monotonic() - self._last_heard

    def start(self) -> None:
        """Begin to beat; every field of the beat must have been reported by now."""
        self._thread.start()

    def report(self, *, urgent: bool = True, **fields: Any) -> None:
        """Set fields of the next beats; an urgent report is sent as soon as the rate allows."""
        with self._lock:
            changed = any(self._fields.get(key) is not value for key, value in fields.items())
            self._fields.update(fields)
            if not (urgent and changed):
                return
            self._urgent = True
        self._bell.ring()

    def close(self) -> None:
        """Send a last beat and end the thread. May be called again."""
        self._stopping = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join(2.0)
        elif not self._thread.ident:
            self._close_sockets()  # it has never begun

    def _connect(self) -> None:
        if self._ring:
            unlock(self._socket, self._ring, self._ring.current().server_publics, self._link.attempt)
        self._socket.connect(self._address)

    def _connect_again(self) -> None:
        """After a refusal, with the keys of now: those of the packer or of this actor may have been rotated."""
        with contextlib.suppress(zmq.ZMQError):  # libzmq may have given the connection up already
            self._socket.disconnect(self._address)
        self._connect()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.receiver, zmq.POLLIN)
        while not self._stopping:
            if self._link.wants_another_try():
                self._connect_again()
            self._beat_when_due()
            ready = dict(poller.poll(milliseconds(self._seconds_to_next_beat())))
            if self._bell.receiver in ready:
                self._bell.answer()
            if self._socket in ready:
                self._read_states()
        self._beat()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.close(linger=LAST_WORDS_MILLISECONDS)
        self._bell.close()

    def _seconds_to_next_beat(self) -> float:
        due = self._last_beat + self._interval - time.monotonic()
        if self._urgent:
            due = min(due, (1.0 - self._refilled()) / BEATS_PER_SECOND)
        return max(0.0, due)

    def _refilled(self) -> float:
        return min(BEAT_BURST, self._tokens + (time.monotonic() - self._last_beat) * BEATS_PER_SECOND)

    def _beat_when_due(self) -> None:
        if self._seconds_to_next_beat() <= 0.0:
            self._beat()

    def _beat(self) -> None:
        with self._lock:
            fields, self._urgent = dict(self._fields), False
        self._tokens, self._last_beat = max(0.0, self._refilled() - 1.0), time.monotonic()
        self._sequence += 1
        beat = self._beat_type(
            run=self._run,
            term=self._term,
            name=self._name,
            boot_id=self._boot_id,
            sequence=self._sequence,
            fingerprint=None if self._run else fingerprint(),
            **fields,
        )
        if self._lose(beat.kind):
            return
        try:
            send_frames(self._socket, codec.encode(beat))
        except zmq.Again:
            return  # the packer is away and the queue is full: the next beat says the same

    def _read_states(self) -> None:
        newest: State | None = None
        for frames in waiting(self._socket, AT_ONCE):
            try:
                message = codec.decode(frames)
            except DecodeError as error:
                drop(self.counts, error, "packer")
                continue
            self.counts.add(codec.num_bytes(frames))
            if isinstance(message, State):
                newest = message
        if newest is not None:
            if not self._run:
                self._urgent = True  # it takes the place of a living process when its beat names the term (P3)
            self._last_heard, self._run, self._term = time.monotonic(), newest.run, newest.term
            self._link.refused = ""  # of an attempt before
            self._on_state(newest)


def identity_of(name: str, boot_id: str) -> bytes:
    """The ZeroMQ identity of a peer: its name and boot id (P3)."""
    return f"{name}/{boot_id}".encode()


class ControlServer:
    """The packer's side. `on_beat` runs in the server's thread and must return quickly."""

    def __init__(
        self, address: str, on_beat: Callable[[bytes, Beat], None], lose: Lossy = _never, bus: BusConfig = PLAIN
    ) -> None:
        self.counts = EdgeCounts("control")
        self._on_beat, self._lose = on_beat, lose
        self._address, self._ring, self._secret = address, keys_for(address, bus), b""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        prepare(self._socket, CONTROL_HWM, None, MAX_CONTROL_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._next_look = time.monotonic() + KEYS_INTERVAL_SECONDS
        try:
            self._use_newest_key()
            self._bind()
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise ConfigError(f"bus.control: {address} can't be bound: {error.strerror}") from error
        self._endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._bell = _Bell()
        self._published: queue.SimpleQueue[tuple[bytes, State | None]] = queue.SimpleQueue()
        self._latest: dict[bytes, tuple[str, list[bytes]]] = {}
        self._last_push: dict[bytes, float] = {}
        self._to_push: set[bytes] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="control-server", daemon=True)

    def start(self) -> None:
        """Begin to hear beats."""
        self._thread.start()

    def publish(self, states: dict[bytes, State | None]) -> None:
        """Set the newest State of peers (None: forget the peer). One that changed is sent without being asked for."""
        for identity, state in states.items():
            self._published.put((identity, state))
        if states:
            self._bell.ring()

    def close(self) -> None:
        """Send what is due and end the thread. May be called again."""
        self._stopping = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join(2.0)
        elif not self._thread.ident:
            self._close_sockets()  # it has never begun

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.receiver, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(milliseconds(self._seconds_to_next_push())))
            if self._bell.receiver in ready:
                self._bell.answer()
                self._take_published()
            if self._socket in ready:
                self._read_beats()
            self._push_due()
            if self._ring and time.monotonic() >= self._next_look:
                self._follow_keys()
        self._take_published()
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
            raise ConfigError(f"bus.keys: {self._ring.folder} has no server.secret, without which there is no packer")
        self._secret = secrets[0]
        lock(self._socket, self._ring, self._secret, self.counts)

    def _follow_keys(self) -> None:
        """Bind anew once our key has been retired; while a rotation lasts nothing is done.

        That ends all connections, also those of retired keys; the others come back in tenths of a second and say it all
        again.
        """
        self._next_look = time.monotonic() + KEYS_INTERVAL_SECONDS
        assert self._ring
        secrets = self._ring.current().server_secrets
        if self._secret in secrets or not secrets:
            return
        with contextlib.suppress(zmq.ZMQError):  # the second time it is unbound already
            self._socket.unbind(self._endpoint)
        self._use_newest_key()
        try:
            self._bind()
        except zmq.ZMQError as error:
            self._secret = b""  # look again
            log.warning("control not bound anew yet", address=self._address, detail=error.strerror)
        else:
            log.info("control bound anew, with the newest key", address=self._address)

    def _bind(self) -> None:
        """One that was closed before, here or in another server, gives the address free in a moment."""
        deadline = time.monotonic() + BIND_SECONDS
        while True:
            try:
                self._socket.bind(self._address)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)

    def _seconds_to_next_push(self) -> float:
        if not self._to_push:
            return 1.0
        now = time.monotonic()
        return max(0.0, min(self._last_push.get(i, 0.0) + PUSH_INTERVAL_SECONDS - now for i in self._to_push))

    def _take_published(self) -> None:
        while True:
            try:
                identity, state = self._published.get_nowait()
            except queue.Empty:
                return
            if state is None:
                self._latest.pop(identity, None)
                self._last_push.pop(identity, None)
                self._to_push.discard(identity)
                continue
            frames = [bytes(frame) for frame in codec.encode(state)]
            if self._latest.get(identity, ("", []))[1] != frames:
                self._latest[identity] = (state.kind, frames)
                self._to_push.add(identity)

    def _read_beats(self) -> None:
        for frames in waiting(self._socket, AT_ONCE):
            try:
                message = codec.decode(frames[1:])
            except DecodeError as error:
                drop(self.counts, error, peer_of(frames[0]))
                continue
            self.counts.add(codec.num_bytes(frames))
            if isinstance(message, Beat):
                identity = frames[0].bytes
                self._on_beat(identity, message)
                self._send(identity)

    def _push_due(self) -> None:
        now = time.monotonic()
        for identity in [i for i in self._to_push if now - self._last_push.get(i, 0.0) >= PUSH_INTERVAL_SECONDS]:
            self._send(identity)
            self._last_push[identity] = now

    def _send(self, identity: bytes) -> None:
        latest = self._latest.get(identity)
        self._to_push.discard(identity)
        if latest is None or self._lose(latest[0]):
            return
        try:
            send_frames(self._socket, [identity, *latest[1]])
        except zmq.ZMQError:
            return  # the peer is gone or its queue full: the next State says the same
