"""Host names and addresses: IPv4 or IPv6 for a socket, and name resolution outside of libzmq.

libzmq resolves names in its only I/O thread, so a hanging name server would stop all sockets of the process. So a
`HostResolver` has a thread to resolve the packer's name, and libzmq gets numeric addresses.
"""

import re
import socket
import threading
import time
from collections.abc import Callable

import structlog
import zmq

from bus import threads
from schemas.config.services import bracketed, is_wildcard

log = structlog.get_logger("bus")

LOOK_SECONDS = 2.0
"""Seconds between two resolutions of a name while the packer is silent."""
TELL_SECONDS = 30.0
"""Seconds between two log lines about an unresolved name."""
_NUMERIC = re.compile(r"\[.*\]|[0-9.]+|\*")


def choose_family(target: "zmq.Socket[bytes]", address: str, own: str = "") -> None:
    """Set a socket to IPv6 if the address is an IPv6 number, else to IPv4.

    Args:
        target: socket that binds or connects next.
        address: the address to bind, or of the peer.
        own: `bus.host`, whose family a name is resolved to.
    """
    host = address.removeprefix("tcp://").rpartition(":")[0]
    is_name = _NUMERIC.fullmatch(host) is None
    # not IPv6 for all: such a socket shows IPv4 peers in mapped form (::ffff:10.0.0.5)
    target.setsockopt(zmq.IPV6, int(":" in own if is_name else host.startswith("[")))


class HostResolver:
    """The current numeric endpoint of an address with a host name; a thread keeps the endpoint up to date.

    `endpoint` is the address for libzmq; empty until the name is resolved. An address without a name needs no thread.

    Args:
        address: address of the packer.
        on_change: called in the thread after `endpoint` has changed.
    """

    def __init__(self, address: str, on_change: Callable[[], None]) -> None:
        scheme, _, rest = address.partition("://")
        host, _, self._port = rest.rpartition(":")
        self._host, self._on_change = host, on_change
        self.follows_a_name = scheme == "tcp" and _NUMERIC.fullmatch(host) is None
        self.endpoint = "" if self.follows_a_name else address
        self._wanted, self._stopping = threading.Event(), False
        self._looked_at, self._told_at = 0.0, -TELL_SECONDS  # so that the first failure is logged
        self._known: set[str] = set()
        """All endpoints of the name so far."""
        if self.follows_a_name:
            self._wanted.set()
            self._thread = threads.start("name", self._loop)

    def look(self) -> None:
        """Ask for another resolution, because the packer is silent. Resolutions are at least LOOK_SECONDS apart."""
        if self.follows_a_name and time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._wanted.set()

    def close(self) -> None:
        """Stop the thread, without waiting: a thread that hangs in the name server stops later."""
        self._stopping = True
        self._wanted.set()

    def _loop(self) -> None:
        while not self._stopping:
            threads.mark("name")
            if not self._wanted.wait(1.0) or self._stopping:
                continue
            self._wanted.clear()
            try:
                found = endpoints_of(self._host, self._port)
            except OSError as error:
                # no addresses: the endpoint stays, since a name server that is down says nothing about the packer
                found = []
                if time.monotonic() - self._told_at >= TELL_SECONDS:
                    self._told_at = time.monotonic()
                    log.warning("bus.control: name not resolved; trying again", name=self._host, detail=str(error))
            self._looked_at = time.monotonic()
            # of several addresses take the next one, since the current one is silent
            place = found.index(self.endpoint) + 1 if self.endpoint in found else 0
            if found and found[place % len(found)] != self.endpoint:
                self.endpoint = found[place % len(found)]
                self._on_change()  # after the assignment: the owner reads the new endpoint when it wakes
            # a change between known endpoints is no news: a name with two addresses would fill the log
            if self._known and (new := [one for one in found if one not in self._known]):
                log.info("packer's name leads elsewhere", name=self._host, endpoint=new[0])
            self._known.update(found)


def endpoints_of(host: str, port: str) -> list[str]:
    """Return the tcp endpoints of a name, IPv4 first.

    Raises:
        OSError: the name can't be resolved.
    """
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one of more than 63 characters
        raise OSError(f"{host!r} is no name of a host: {error}") from error
    hosts = sorted(dict.fromkeys(str(address[0]) for *_, address in found), key=lambda one: ":" in one)
    return [f"tcp://{bracketed(one)}:{port}" for one in hosts]


def own_address(endpoint: str) -> str:
    """Return this machine's address on the way to a numeric tcp endpoint, by the kernel's routes; empty if unknown."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not _NUMERIC.fullmatch(host):
        return ""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # chooses a route, and sends nothing
            probe.connect((host.strip("[]"), int(port)))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def to_bind(address: str, host: str = "") -> list[str]:
    """Return the addresses on which the packer listens: all those behind its name, by number.

    Actors elsewhere may resolve the name to any of them. Names may have addresses of other machines too.

    Args:
        address: `bus.control`.
        host: `bus.host`; a wildcard stands for all addresses of this machine, now and later.
    """
    scheme, _, rest = address.partition("://")
    name, _, port = rest.rpartition(":")
    if scheme != "tcp":
        return [address]
    if host and is_wildcard(host):
        return [f"tcp://{bracketed(host)}:{port}"]
    if _NUMERIC.fullmatch(name):
        return [address]
    try:
        return endpoints_of(name, port)
    except OSError:
        # the name of a network interface, or a wrong name: `bind` then fails and says so
        return [address]
