"""Encryption and access over tcp: CURVE on every socket, and a list of the public keys allowed to connect.

Bound sockets are CURVE servers, connecting sockets CURVE clients; file rights protect `ipc` and `inproc`. One thread
per process, the authenticator, answers libzmq's question whether a key may connect (ZAP), and reads from each socket's
monitor which connections were refused. Without the authenticator libzmq refuses all; the process stops if the
authenticator dies.
libzmq never retries after a refusal: the owner of the socket sees `Link.refused` and connects again at most once a
second, with the keys then in the files. A rotation of keys leaves established connections alone.
"""

import itertools
import os
import queue
import re
import socket as sockets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import zmq

from bus import threads
from bus.counts import REFUSALS, EdgeCounts
from bus.gate import EVENTS, Gate
from bus.keys import KeyRing, public_of, ring_of
from bus.sockets import MAX_IN_A_ROW, waiting
from schemas.config.services import BusConfig, is_loopback
from schemas.errors import ConfigError

log = structlog.get_logger("bus")

RETRY_SECONDS = 1.0
"""Seconds between two attempts to connect after a refusal."""
REFUSAL_LOG_SECONDS = 5.0
"""Seconds between two log lines about refusals, per edge."""
LOOK_MILLISECONDS = 200
"""Milliseconds until the authenticator reads the monitor of a new socket. Events wait until then; checks of keys never
do."""
WAITING_EVENTS = 20_000
"""Events held by a monitor before libzmq's network thread waits for the authenticator: bounds memory under a flood."""
KEY_BYTES = 32
"""Bytes of a CURVE key."""

_ZAP = "inproc://zeromq.zap.01"
"""Address of the ZAP handler: fixed by RFC 27, one per ZeroMQ context."""
_MECHANISM, _CRYPTOGRAPHIC = 0x11000002, 0x11000001
"""Protocol errors of libzmq: the peer uses another mechanism than CURVE; the peer's box does not open with our key."""
_FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
}
_NUMBERS = itertools.count()


# --- addresses -------------------------------------------------------------------------------------------------------


def keys_for(address: str, bus: BusConfig) -> KeyRing | None:
    """Return the keys for an address; None if none are needed: not tcp, or no `bus.keys` and plaintext is allowed.

    Raises:
        ConfigError: the address is beyond loopback and there are no keys, or the keys can't be used.
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
    """Return an address with the socket's public key, `tcp://HOST:PORT#HEX`; the bare address for an empty key."""
    return f"{address}#{public.hex()}" if public else address


def split_key(address: str, ring: KeyRing | None) -> tuple[str, tuple[bytes, ...]]:
    """Return the endpoint to connect to and the public key expected there, from an address in a directive.

    Returns:
        Endpoint, and a tuple with a key of 32 bytes; an empty tuple without keys.

    Raises:
        ConfigError: only one of both sides has keys, or the key in the address is malformed.
    """
    endpoint, _, text = address.partition("#")
    if bool(text) != (ring is not None):
        known = "speaks plaintext, and bus.keys is set here" if ring else "is encrypted, and bus.keys is empty here"
        raise ConfigError(f"bus.keys: {endpoint} {known}; it is the same for all actors of a run")
    if text and not re.fullmatch(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", text):
        raise ConfigError(f"bus.keys: the address of {endpoint} names no key of {2 * KEY_BYTES} hexadecimal digits")
    return endpoint, (bytes.fromhex(text),) if text else ()


# --- sockets ---------------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """State of a connection to a server. The authenticator writes `refused`, the owner of the socket reads it."""

    on_refused: Callable[[], None] = lambda: None
    """Called in the authenticator's thread after each refusal."""
    refused: str = ""
    """Reason of the newest refusal as a text; empty: not refused."""
    attempt: int = 0
    """Attempts to connect after refusals."""
    retry_at: float = 0.0
    """Earliest time (`time.monotonic`) of the next attempt."""

    def wants_another_try(self) -> bool:
        """Return whether the connection was refused and may be tried again now. True counts as a new attempt."""
        if not self.refused or time.monotonic() < self.retry_at:
            return False
        self.refused, self.attempt, self.retry_at = "", self.attempt + 1, time.monotonic() + RETRY_SECONDS
        return True


def secure_server(
    socket: "zmq.Socket[bytes]", ring: KeyRing, secret: bytes, counts: EdgeCounts, gate: Gate | None = None
) -> bytes:
    """Make a socket a CURVE server for the keys of a ring, and return the public key of the socket.

    Can be called again with another secret, for the next `bind`.

    Args:
        socket: the socket, not bound yet.
        ring: keys; the authenticator lets in `client_publics`, as the files hold them at the time of each connection.
        secret: secret key of the socket, 32 bytes.
        counts: counters of refusals.
        gate: told about accepted and closed connections, if given.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    # a domain of its own tells the authenticator which socket asks; set already if this is a call for another secret
    if not socket.getsockopt_string(zmq.ZAP_DOMAIN).rstrip("\0"):
        domain = f"{counts.edge}-{next(_NUMBERS)}".encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, domain)
        # otherwise libzmq would let every key in while no ZAP handler is there
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        _zap_authenticator().watch(socket, _ServerMonitor(domain, ring, counts, gate))
    return public_of(secret)


def secure_client(socket: "zmq.Socket[bytes]", ring: KeyRing, servers: Sequence[bytes], attempt: int) -> None:
    """Make a socket a CURVE client: set its own keys and the server's public key.

    Args:
        socket: the socket, not connected yet.
        ring: keys of this actor; `client_secrets`, the newest first.
        servers: possible public keys of the server, the newest first.
        attempt: number of refusals so far. Attempt 0 uses the newest keys; each further attempt uses the next pair, so
            that a peer in the middle of a rotation is reached with the older keys.
    """
    # two servers' keys and two own keys in a rotation: four pairs, the newest of both first
    pairs = list(itertools.product(servers, ring.current().client_secrets))
    server, secret = pairs[attempt % len(pairs)]
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_of(secret))


def watch_link(socket: "zmq.Socket[bytes]", link: Link, address: str, *, until_heard: bool) -> None:
    """Report refusals of a connecting socket to its link.

    Args:
        socket: the socket, not connected yet.
        link: receives the refusals.
        address: address of the server, for the log.
        until_heard: True: a server that hangs up during the handshake counts as a refusal, since a server with another
            key does so. False for data sockets: there libzmq keeps the queue and connects again.
    """
    failures = _FAILED if until_heard else _FAILED - {int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)}
    _zap_authenticator().watch(socket, _ClientMonitor(link, address, failures))


# --- the authenticator -----------------------------------------------------------------------------------------------


@dataclass
class _ServerMonitor:
    """A bound socket: allows or refuses keys, and counts and logs refusals.

    libzmq's event of a failed handshake names no peer. The disconnection right after has a descriptor; its address
    was read when the connection was accepted. A peer on this machine may have left by then; it is `unknown`.
    """

    domain: bytes
    """ZAP domain of the socket."""
    ring: KeyRing
    counts: EdgeCounts
    gate: Gate | None = None
    peers: dict[int, str] = field(default_factory=dict)
    """Addresses of connected peers by descriptor."""
    reason: str = ""
    """Reason of a failed handshake until its disconnection is heard; empty: none."""

    # without AUTH: `lets_in` has counted the key already
    events = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED) | sum(_FAILED) - int(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )

    def lets_in(self, key: bytes, peer: str) -> bool:
        """Return whether a key may connect; count and log a refusal.

        Args:
            key: public key of the client, 32 bytes.
            peer: address of the client.
        """
        if key in self.ring.current().client_publics:
            return True
        self._count("unlisted_key")
        self._say("unlisted_key", peer)
        return False

    def hear(self, event: int, value: int) -> None:
        """Handle an event of the socket's monitor. `value` is a descriptor, or the code of a failed handshake."""
        if self.gate is not None and event & EVENTS:
            self.gate.hear(event, value)
        if event == zmq.EVENT_ACCEPTED:
            try:
                # a copy of the descriptor: closing a socket object on libzmq's own would close the connection
                with sockets.socket(fileno=os.dup(value)) as connection:
                    host, port, *_ = connection.getpeername()
                    self.peers[value] = f"{host}:{port}"
            except (OSError, ValueError, TypeError):
                # closed already
                self.peers[value] = "unknown"
        elif event in _FAILED:
            self.reason = _reason(event, value)
            self._count(self.reason)
        elif event == zmq.EVENT_DISCONNECTED:
            # the descriptor may be another connection's from now on
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
class _ClientMonitor:
    """A connecting socket: tells its link about refusals, with a log line."""

    link: Link
    address: str
    """Address of the server, for the log."""
    failures: set[int]
    """Events of the monitor that count as refusals."""
    next_log: float = 0.0

    @property
    def events(self) -> int:
        """Bit mask of the events to hear."""
        return sum(self.failures)

    def hear(self, event: int, value: int) -> None:
        """Handle an event of the socket's monitor. Only refusals are heard."""
        words = {
            "plaintext": "the peer speaks plaintext: bus.keys is not set there",
            "unlisted_key": "the peer does not know this actor's key: is it in client.public of bus.keys there?",
            "incomplete": "the peer hung up: its key may not be in server.public of bus.keys here, or it has stopped",
        }
        detail = words.get(_reason(event, value), "the peer's answer is no CURVE handshake")
        # the owner clears `refused` as soon as it is told
        self.link.refused = detail
        self.link.on_refused()
        if time.monotonic() >= self.next_log:
            self.next_log = time.monotonic() + REFUSAL_LOG_SECONDS
            log.warning("connection refused by peer", address=self.address, detail=detail)


def _reason(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "unlisted_key"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "incomplete"
    # codes of protocol errors in libzmq's header zmq.h; all others are bytes that are no ZMTP
    return {_MECHANISM: "plaintext", _CRYPTOGRAPHIC: "wrong_server_key"}.get(value, "malformed")


class _ZapAuthenticator:
    """The thread that answers ZAP requests and reads monitors. One per process: a context has a single ZAP address."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._zap: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._zap.bind(_ZAP)
        self._poller = zmq.Poller()
        self._poller.register(self._zap, zmq.POLLIN)
        self._server_monitors: dict[bytes, _ServerMonitor] = {}
        self._watched: dict[zmq.Socket[bytes], _ServerMonitor | _ClientMonitor] = {}
        self._new: queue.SimpleQueue[tuple[zmq.Socket[bytes], _ServerMonitor | _ClientMonitor]] = queue.SimpleQueue()
        threads.start("authenticator", self._loop)

    @property
    def num_watched(self) -> tuple[int, int]:
        """Numbers of watched sockets, and of bound ones among them."""
        return len(self._watched), len(self._server_monitors)

    def watch(self, socket: "zmq.Socket[bytes]", watched: _ServerMonitor | _ClientMonitor) -> None:
        """Watch a socket until it is closed. Thread-safe. Call it before the socket binds or connects."""
        if isinstance(watched, _ServerMonitor):
            # at once, not in the thread: a key may be checked right after `bind`
            self._server_monitors[watched.domain] = watched
        receiver: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        receiver.setsockopt(zmq.RCVHWM, WAITING_EVENTS)
        address = f"inproc://events-{next(_NUMBERS)}"
        socket.monitor(address, watched.events | int(zmq.EVENT_MONITOR_STOPPED))
        receiver.connect(address)
        # sockets are not thread-safe: from here on the receiver belongs to the authenticator's thread
        self._new.put((receiver, watched))

    def _loop(self) -> None:
        while True:
            threads.mark("authenticator")
            while not self._new.empty():
                receiver, watched = self._new.get()
                self._watched[receiver] = watched
                self._poller.register(receiver, zmq.POLLIN)
            for ready, _ in self._poller.poll(LOOK_MILLISECONDS):
                if ready is not self._zap:
                    self._hear(ready)
                    continue
                # requests of ZAP (RFC 27): 200 allows a key, 400 refuses
                for frames in waiting(self._zap, MAX_IN_A_ROW):
                    # identity and mechanism are not needed: the mechanism is CURVE, and the key is all that counts
                    sender, empty, version, request, domain, peer, _, _, key = (frame.bytes for frame in frames[:9])
                    server = self._server_monitors.get(domain)
                    known = server is not None and server.lets_in(key, peer.decode())
                    status = (b"200", b"OK") if known else (b"400", b"unlisted key")
                    self._zap.send_multipart([sender, empty, version, request, *status, b"", b""])

    def _hear(self, receiver: "zmq.Socket[bytes]") -> None:
        watched = self._watched[receiver]
        for frames in waiting(receiver, MAX_IN_A_ROW):
            event, value = struct.unpack("=HI", frames[0].bytes)  # frame 1 is the endpoint
            if event != zmq.EVENT_MONITOR_STOPPED:
                watched.hear(event, value)
                continue
            # the watched socket was closed, so that nothing more can come
            self._poller.unregister(receiver)
            receiver.close(0)
            del self._watched[receiver]
            if isinstance(watched, _ServerMonitor):
                del self._server_monitors[watched.domain]
                if watched.gate is not None:
                    watched.gate.closed = True
            return


def num_watched() -> tuple[int, int]:
    """Return the numbers of this process's sockets with keys, and of bound ones among them."""
    return _zap_authenticator().num_watched


_the_authenticator: list[_ZapAuthenticator] = []
_recruiting = threading.Lock()


def _zap_authenticator() -> _ZapAuthenticator:
    with _recruiting:
        if not _the_authenticator:
            _the_authenticator.append(_ZapAuthenticator())
        return _the_authenticator[0]
