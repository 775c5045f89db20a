"""The topology: every edge of the ring with its binder and its repair of losses; addresses; options of all sockets.

Only the packer's control address is configured (P0: discovery). Any other address is made by the binding process
and travels in its heartbeats, so peers join, leave and move while the run goes on.
"""

import contextlib
import errno
import hashlib
import math
import os
import random
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq

from bus.hosts import choose_family
from schemas import limits
from schemas.config import RunConfig
from schemas.config.services import BusConfig, bracketed
from schemas.errors import ConfigError

MAX_IPC_PATH = 100
"""Most bytes of the path of a Unix socket: Linux allows 107; the rest is a margin."""


@dataclass(frozen=True)
class Edge:
    """An arrow of the topology, from the sender of messages to their receiver."""

    name: str
    message: str
    """Type of the messages; `⇄`: in both directions."""
    pattern: str
    """ZeroMQ socket types, sender first; or another transport."""
    binder: str
    """Actor that binds the address; the connector connects to it."""
    connector: str
    made_good_by: str
    """Reason why a lost message does no harm."""


EDGES = (
    Edge(
        "groups",
        "RolloutGroup",
        "PUSH→PULL",
        "reward",
        "rollout",
        "rollout keeps it until the directive releases it (P13)",
    ),
    Edge(
        "scored",
        "ScoredGroup",
        "PUSH→PULL",
        "packer",
        "reward",
        "reward keeps it until the directive releases it (P13)",
    ),
    Edge("steps", "StepBatch", "PUSH→PULL", "trainer", "packer", "the step is durable before a byte leaves (P18)"),
    Edge(
        "control", "Heartbeat ⇄ Directive", "DEALER⇄ROUTER", "packer", "every actor", "absolute values, said again (P6)"
    ),
    Edge("completions", "OpenAI HTTP", "HTTP", "inference", "rollout", "the request is repeated in place (P11)"),
    Edge("weights", "versions", "files", "trainer", "inference", "any later version (P22)"),
)


class Addresses:
    """Makes the addresses of a run on this machine.

    The transport is taken from `bus.control`: `ipc` (default), `inproc` (threads of a single process, for tests), or
    `tcp://HOST:PORT`.

    Args:
        config: configuration of the run. The folder of ipc sockets follows from `output_dir`.
    """

    def __init__(self, config: RunConfig) -> None:
        self._bus = config.bus
        # the same for all processes of a run, and short: the path of a Unix socket has about 100 bytes
        self._tag = hashlib.sha256(str(config.output).encode()).hexdigest()[:10]
        self.transport = self._bus.control.partition(":")[0]
        self.folder = Path(tempfile.gettempdir()) / f"grpo-actors-{os.getuid()}" / self._tag
        """Folder of the Unix sockets, with ipc."""

    @property
    def control(self) -> str:
        """Address of the packer.

        Raises:
            ConfigError: with ipc, the path is too long, or its folder belongs to another user.
        """
        return self._bus.control if self.transport == "tcp" else self._local("control")

    def to_bind(self, actor: str, boot_id: str) -> str:
        """Return the address for an actor's data socket to bind; over tcp with the port `*`, for any free port.

        Raises:
            ConfigError: with ipc, the path is too long, or its folder belongs to another user.
        """
        if self.transport == "tcp":
            return f"tcp://{bracketed(self._bus.host)}:*"
        return self._local(f"{actor}.{boot_id[:8]}")

    def advertised(self, bound: str) -> str:
        """Return the address to which peers connect: `bound` (LAST_ENDPOINT), with `bus.advertise_host` if set."""
        if self.transport == "tcp" and self._bus.advertise_host:
            return f"tcp://{bracketed(self._bus.advertise_host)}:{bound.rpartition(':')[2]}"
        return bound

    def bind(self, target: "zmq.Socket[bytes]", address: str) -> str:
        """Bind a data socket and return the bound address. The port is one of `bus.data_ports`, if set.

        Raises:
            ConfigError: all ports of the range are in use, or `bus.host` is no address of this machine.
        """
        choose_family(target, address)
        first, _, last = self._bus.data_ports.partition("-")
        ports = [str(port) for port in range(int(first), int(last) + 1)] if first and address.endswith(":*") else ["*"]
        # actors that start together would otherwise all try the same ports in the same order
        random.shuffle(ports)
        for port in ports:
            try:
                target.bind(f"{address[:-1]}{port}" if address.endswith(":*") else address)
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and port != "*":
                    continue
                raise ConfigError(f"bus.host: {address} can't be bound: {error.strerror}") from error
            return str(target.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        raise ConfigError(
            f"bus.data_ports: all {len(ports)} ports of {self._bus.data_ports} are in use; widen the range"
        )

    def remove(self) -> None:
        """Remove the Unix sockets without a listener, and their folder if empty then."""
        for path in self.folder.glob("*"):
            # connecting to a plain file fails with ECONNREFUSED too
            if not path.is_socket():
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink(missing_ok=True)
        # not empty: a process still listens, or the folder was never made
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _local(self, name: str) -> str:
        if self.transport == "inproc":
            return f"inproc://{self._tag}/{name}"
        path = str(self.folder / name)
        if len(path.encode()) > MAX_IPC_PATH:
            raise ConfigError(
                f"bus.control: the socket path {path} is longer than {MAX_IPC_PATH} bytes; set TMPDIR shorter"
            )
        _make_private(self.folder.parent)
        _make_private(self.folder)
        return f"ipc://{path}"


def _make_private(folder: Path) -> None:
    """Make a folder closed to all other users: with ipc, the rights of this folder protect the bus.

    Raises:
        ConfigError: the folder belongs to another user, or is a symbolic link.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # checked after mkdir: in a shared TMPDIR another user may have made the folder, or a link, first
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"bus.control: {folder} belongs to another user; set TMPDIR to a folder of yours")
    folder.chmod(0o700)


def describe(config: RunConfig) -> str:
    """Return the topology and all limits as text tables: the output of `actors topology run.yaml`."""
    addresses = Addresses(config)
    hwm = str(config.bus.high_water_mark)
    marks = {
        "groups": hwm,
        "scored": hwm,
        "steps": hwm,
        "control": str(CONTROL_HWM),
        "completions": "-",
        "weights": "-",
    }
    rows = [("edge", "message", "pattern", "binds", "connects", "HWM", "what is lost is made good by")]
    rows += [(e.name, e.message, e.pattern, e.binder, e.connector, marks[e.name], e.made_good_by) for e in EDGES]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    address = f"control address: {addresses.control} (all others are learned from the directive)"
    return "\n".join([*lines, "", "limits, the same at sender and receiver:", limits.describe(), "", address])


CONTROL_HWM = 8
"""High-water mark of control sockets, in messages. Heartbeats and directives are absolute, so a long queue is only
stale."""
CLOSE_LINGER_MILLISECONDS = 200
"""Milliseconds for which a closed control socket still tries to deliver the last heartbeat or directive."""
PLAIN = BusConfig()
"""Configuration of a bus without keys, on this machine alone."""


def milliseconds(seconds: float) -> int:
    """Return a poll timeout in whole milliseconds, at least 0, rounded up: else a loop would spin through the last."""
    return max(0, math.ceil(seconds * 1000))


CONNECT_MILLISECONDS = 2000
"""Milliseconds until a connection attempt is given up."""
KEEPALIVE_SECONDS, KEEPALIVE_PROBES = 5, 3
"""Seconds without traffic until the kernel probes a connection, and between two probes; unanswered probes until it is
closed and made again."""
CONTROL_UNSENT_MILLISECONDS, DATA_UNSENT_MILLISECONDS = 15_000, 60_000
"""Milliseconds for which sent bytes may stay unacknowledged, or a receiver may take none, until the connection is
closed and made again.

After a long cut of the network, TCP alone would wait up to minutes before the next try. The limit is not shorter, since
messages on their way are lost with the connection; a receiver of large groups may take none for a while."""

HANDSHAKE_MILLISECONDS = 5000
"""Milliseconds for a connected peer to finish the handshake of ZMTP (with keys: of CURVE)."""


def prepare(socket: "zmq.Socket[bytes]", high_water_mark: int, buffer_bytes: int | None, max_frame_bytes: int) -> None:
    """Set the options common to all sockets of the bus.

    Args:
        socket: a new socket, not bound or connected yet.
        high_water_mark: most messages queued per peer, in each direction.
        buffer_bytes: size of the kernel's buffers in bytes; None: the kernel decides.
        max_frame_bytes: largest frame to accept; libzmq disconnects the sender of a larger frame.
    """
    # no copy on the wire is the only one: an actor that closes has had its groups released, or is being killed
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    # per frame, not per message: `bus.gate` bounds the sum of the frames of a message
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    # milliseconds, doubling from 50 to 1000: a restarted peer is found at once, a dead one costs little
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    # by the kernel, not by heartbeats of ZMTP: a receiver whose queue is full reads no heartbeat, so a good connection
    # would be closed, and libzmq 4.3 aborts the process if the sender dies meanwhile (`!_io_error`: its timer writes)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    is_data = socket.type in (zmq.PUSH, zmq.PULL)
    socket.setsockopt(zmq.TCP_MAXRT, DATA_UNSENT_MILLISECONDS if is_data else CONTROL_UNSENT_MILLISECONDS)
    if buffer_bytes is not None:
        socket.setsockopt(zmq.SNDBUF, buffer_bytes)
        socket.setsockopt(zmq.RCVBUF, buffer_bytes)
