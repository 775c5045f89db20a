"""Who may come in over tcp: CURVE on every socket that binds or connects there, and a list of the keys that may.

A socket that binds is a CURVE server, one that connects a client; `ipc` and `inproc` have the rights of files. One
thread per process, the doorman, answers libzmq's question whether a key may come in (ZAP) and hears from each socket
who was refused. It waits on nothing but them. Without it libzmq lets nobody in; if it ends, so does the process.

libzmq never comes back by itself after a refusal, so a refused peer is no load. Whoever connects hears of it here
(`Link.refused`) and tries again, with the keys that the files hold then, at most once a second. Connections that stand
stay as they are when keys are rotated; nothing is made anew before it breaks.
"""

import itertools
import os
import queue
import socket as sockets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import zmq

from bus.counts import REFUSALS, EdgeCounts
from bus.keys import KeyRing, public_of, ring_of
from bus.sockets import waiting
from schemas.config.services import BusConfig, is_loopback
from schemas.errors import ConfigError

log = structlog.get_logger("bus")

RETRY_SECONDS = 1.0
"""Between two attempts of one that was refused."""
REFUSAL_LOG_SECONDS = 5.0
LOOK_MILLISECONDS = 200
"""How late the doorman sees a socket that is new; what happens there meanwhile waits for him, keys never do."""
WAITING_EVENTS = 20_000
"""Of refused peers, per socket, until the network's thread waits for the doorman: a bound of memory under a flood."""
AT_ONCE = 1000

_ZAP = "inproc://zeromq.zap.01"
_MECHANISM, _CRYPTOGRAPHIC = 0x11000002, 0x11000001
"""Protocol errors of libzmq: another mechanism than CURVE, a box that our key does not open."""
_FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
}
_NUMBERS = itertools.count()


# --- addresses -------------------------------------------------------------------------------------------------------


def keys_for(address: str, bus: BusConfig) -> KeyRing | None:
    """The keys that an address asks for; None where it is reached without.

    Raises:
        ConfigError: it is beyond loopback, and there are no keys; or the keys can't be used.
    """
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        return None
    if bus.keys:
        return ring_of(bus.keys)
    host = rest.partition("#")[0].rpartition(":")[0]
    if not (bus.allow_plaintext or is_loopback(host)):
        raise ConfigError(
            f"bus.keys: {rest} is reachable from other machines and there are no keys; make some with `actors keys "
            "new DIR`, or set bus.allow_plaintext: true on a network that only you can reach"
        )
    return None


def with_key(address: str, public: bytes) -> str:
    """An address that names the key of the socket behind it; `address` itself where there is none."""
    return f"{address}#{public.hex()}" if public else address


def split_key(address: str, ring: KeyRing | None) -> tuple[str, tuple[bytes, ...]]:
    """What to connect to, and the key that is expected there; peers learn such addresses from State.

    Raises:
        ConfigError: one of both sides has keys, the other has none.
    """
    endpoint, _, text = address.partition("#")
    if bool(text) != (ring is not None):
        known = "speaks plaintext, and bus.keys is set here" if ring else "is encrypted, and bus.keys is empty here"
        raise ConfigError(f"bus.keys: {endpoint} {known}; it is the same for all actors of a run")
    return endpoint, (bytes.fromhex(text),) if text else ()


# --- sockets ---------------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """What the doorman has heard of a connection. `refused` is in words, and empty until it happens."""

    on_refused: Callable[[], None] = lambda: None
    refused: str = ""
    attempt: int = 0
    retry_at: float = 0.0

    def wants_another_try(self) -> bool:
        """Whether it was refused, and waited; counts the attempts."""
        if not self.refused or time.monotonic() < self.retry_at:
            return False
        self.refused, self.attempt, self.retry_at = "", self.attempt + 1, time.monotonic() + RETRY_SECONDS
        return True


def lock(socket: "zmq.Socket[bytes]", ring: KeyRing, secret: bytes, counts: EdgeCounts) -> bytes:
    """Have a socket that is about to bind let in only keys of the ring; returns its public key.

    May be called again for another secret, which holds from the next `bind` on.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    if not socket.getsockopt_string(zmq.ZAP_DOMAIN).rstrip("\0"):
        domain = f"{counts.edge}-{next(_NUMBERS)}".encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, domain)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        _doorman().watch(socket, _Door(domain, ring, counts))
    return public_of(secret)


def unlock(socket: "zmq.Socket[bytes]", ring: KeyRing, servers: Sequence[bytes], attempt: int) -> None:
    """Give a socket that is about to connect its key and the one expected there.

    They are the newest; after `attempt` refusals the ones after those, in turn.
    """
    pairs = list(itertools.product(servers, ring.current().client_secrets))
    server, secret = pairs[attempt % len(pairs)]
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_of(secret))


def watch_link(socket: "zmq.Socket[bytes]", link: Link, address: str, *, until_heard: bool) -> None:
    """Tell a link when its connection is refused.

    Args:
        until_heard: take a peer that hangs up in the handshake for a refusal, as one with another server key does. Not
            for data, where libzmq keeps what is queued and connects again.
    """
    failures = _FAILED if until_heard else _FAILED - {int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)}
    _doorman().watch(socket, _Approach(link, address, failures))


# --- the doorman -----------------------------------------------------------------------------------------------------


@dataclass
class _Door:
    """A socket that binds: who may come in, and who could not.

    A failure names no peer; the disconnection right after it has a descriptor, whose address was asked for when it was
    accepted. Who had left by then is `unknown`, as one on this machine may have.
    """

    domain: bytes
    ring: KeyRing
    counts: EdgeCounts
    peers: dict[int, str] = field(default_factory=dict)
    reason: str = ""

    events = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED) | sum(_FAILED) - int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)

    def lets_in(self, key: bytes, peer: str) -> bool:
        """Whether a key may come in; counts where it may not."""
        if key in self.ring.current().client_publics:
            return True
        self._count("unlisted_key")
        self._say("unlisted_key", peer)
        return False

    def hear(self, event: int, value: int) -> None:
        """An event of the socket."""
        if event == zmq.EVENT_ACCEPTED:
            self.peers[value] = _peer_at(value)
        elif event in _FAILED:
            self.reason = _reason(event, value)
            self._count(self.reason)
        elif event == zmq.EVENT_DISCONNECTED:
            peer = self.peers.pop(value, "unknown")
            if self.reason:
                self._say(self.reason, peer)
            self.reason = ""

    def _count(self, reason: str) -> None:
        self.counts.refused[reason] += 1

    def _say(self, reason: str, peer: str) -> None:
        counts = self.counts
        if time.monotonic() >= counts.next_refusal_log:
            counts.next_refusal_log = time.monotonic() + REFUSAL_LOG_SECONDS
            log.warning(
                "peer refused",
                edge=counts.edge,
                peer=peer,
                reason=reason,
                detail=REFUSALS[reason],
                refused=counts.refused.total(),
            )


@dataclass
class _Approach:
    """Events of a socket that connects."""

    link: Link
    address: str
    failures: set[int]
    next_log: float = 0.0

    @property
    def events(self) -> int:
        """Those it hears."""
        return sum(self.failures)

    def hear(self, event: int, value: int) -> None:
        """An event of the socket."""
        words = {
            "plaintext": "it speaks plaintext: bus.keys is not set there",
            "unlisted_key": "it does not know the key of this actor: is it in client.public of bus.keys there?",
            "incomplete": "it hung up: its key may not be in server.public of bus.keys here, or it has ended",
        }
        self.link.refused = words.get(_reason(event, value), "its answer is no handshake of ours")
        self.link.on_refused()
        if time.monotonic() >= self.next_log:
            self.next_log = time.monotonic() + REFUSAL_LOG_SECONDS
            log.warning("not let in", address=self.address, detail=self.link.refused)


def _reason(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "unlisted_key"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "incomplete"
    return {_MECHANISM: "plaintext", _CRYPTOGRAPHIC: "wrong_server_key"}.get(value, "malformed")


def _peer_at(descriptor: int) -> str:
    """Address of a connection of libzmq, as long as it is there."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            host, port, *_ = connection.getpeername()
    except (OSError, ValueError, TypeError):
        return "unknown"
    return f"{host}:{port}"


class _Doorman:
    """One per process and ZeroMQ context, since there is one ZAP address. Sockets are handed to its thread."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._zap: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._zap.bind(_ZAP)
        self._poller = zmq.Poller()
        self._poller.register(self._zap, zmq.POLLIN)
        self._doors: dict[bytes, _Door] = {}
        self._watched: dict[zmq.Socket[bytes], _Door | _Approach] = {}
        self._new: queue.SimpleQueue[tuple[zmq.Socket[bytes], _Door | _Approach]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="control-doorman", daemon=True).start()

    def watch(self, socket: "zmq.Socket[bytes]", watched: _Door | _Approach) -> None:
        """From any thread, before the socket binds or connects. Ends with the socket."""
        if isinstance(watched, _Door):
            self._doors[watched.domain] = watched
        receiver: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        receiver.setsockopt(zmq.RCVHWM, WAITING_EVENTS)
        address = f"inproc://events-{next(_NUMBERS)}"
        socket.monitor(address, watched.events | int(zmq.EVENT_MONITOR_STOPPED))
        receiver.connect(address)
        self._new.put((receiver, watched))

    def _loop(self) -> None:
        while True:
            while not self._new.empty():
                receiver, watched = self._new.get()
                self._watched[receiver] = watched
                self._poller.register(receiver, zmq.POLLIN)
            for ready, _ in self._poller.poll(LOOK_MILLISECONDS):
                if ready is self._zap:
                    self._answer()
                else:
                    self._hear(ready)

    def _answer(self) -> None:
        """Whether keys may come in (RFC 27)."""
        for frames in waiting(self._zap, AT_ONCE):
            sender, empty, version, request, domain, peer, _, _, key = (frame.bytes for frame in frames[:9])
            door = self._doors.get(domain)
            known = door is not None and door.lets_in(key, peer.decode())
            status = (b"200", b"OK") if known else (b"400", b"unlisted key")
            self._zap.send_multipart([sender, empty, version, request, *status, b"", b""])

    def _hear(self, receiver: "zmq.Socket[bytes]") -> None:
        watched = self._watched[receiver]
        for frames in waiting(receiver, AT_ONCE):
            event, value = struct.unpack("=HI", frames[0].bytes)
            if event == zmq.EVENT_MONITOR_STOPPED:
                self._forget(receiver, watched)
                return
            watched.hear(event, value)

    def _forget(self, receiver: "zmq.Socket[bytes]", watched: _Door | _Approach) -> None:
        self._poller.unregister(receiver)
        receiver.close(0)
        del self._watched[receiver]
        if isinstance(watched, _Door):
            del self._doors[watched.domain]


_the_doorman: list[_Doorman] = []
_hiring = threading.Lock()


def _doorman() -> _Doorman:
    with _hiring:
        if not _the_doorman:
            _the_doorman.append(_Doorman())
        return _the_doorman[0]
