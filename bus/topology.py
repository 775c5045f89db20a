"""Who talks to whom: every edge of the ring, who binds it, what is lost on it, and how addresses are made.

Only the packer's control address is configured (P0). Every other address is made by the process that binds it and
travels in its beats, so peers join, leave and move while the run goes on.
"""

import contextlib
import errno
import hashlib
import math
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq

from schemas.config import RunConfig
from schemas.errors import ConfigError

MAX_IPC_PATH = 100
"""Unix socket paths end at 107 bytes on Linux; some are left for what is appended."""


@dataclass(frozen=True)
class Edge:
    """One arrow of the topology."""

    name: str
    message: str
    pattern: str
    binder: str
    connector: str
    made_good_by: str


EDGES = (
    Edge("groups", "RolloutGroup", "PUSH→PULL", "reward", "rollout", "rollout keeps it until State releases it (P13)"),
    Edge("scored", "ScoredGroup", "PUSH→PULL", "packer", "reward", "reward keeps it until State releases it (P13)"),
    Edge("steps", "StepBatch", "PUSH→PULL", "trainer", "packer", "the step is durable before a byte leaves (P18)"),
    Edge("control", "Beat ⇄ State", "DEALER⇄ROUTER", "packer", "every actor", "absolute values, said again (P6)"),
    Edge("completions", "OpenAI HTTP", "HTTP", "inference", "rollout", "the request is repeated in place (P11)"),
    Edge("weights", "versions", "files", "trainer", "inference", "any later version (P22)"),
)


class Addresses:
    """Makes the addresses of one run on this machine.

    Transport follows `bus.control`: `ipc` (default), `inproc` (threads of one process, for tests), or `tcp://host:port`.
    """

    def __init__(self, config: RunConfig) -> None:
        self._bus = config.bus
        self._tag = hashlib.sha256(str(config.output).encode()).hexdigest()[:10]
        self.transport = self._bus.control.partition(":")[0]
        self.folder = Path(tempfile.gettempdir()) / f"grpo-actors-{os.getuid()}" / self._tag
        """Of the sockets, with ipc."""

    @property
    def control(self) -> str:
        """Where actors reach the packer."""
        return self._bus.control if self.transport == "tcp" else self._local("control")

    def to_bind(self, actor: str, boot_id: str) -> str:
        """The address that an actor binds for data; with tcp any free port."""
        if self.transport == "tcp":
            return f"tcp://{self._bus.host}:*"
        return self._local(f"{actor}.{boot_id[:8]}")

    def advertised(self, bound: str) -> str:
        """What others connect to, given what `LAST_ENDPOINT` says was bound."""
        if self.transport == "tcp" and self._bus.advertise_host:
            return f"tcp://{self._bus.advertise_host}:{bound.rpartition(':')[2]}"
        return bound

    def remove(self) -> None:
        """Remove the sockets that nobody listens on any more, and their folder unless somebody is still there."""
        for path in self.folder.glob("*"):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink(missing_ok=True)
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
    """Make a folder that nobody else can enter: on one host it is the lock of the bus."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"bus.control: {folder} belongs to another user; set TMPDIR to a folder of yours")
    folder.chmod(0o700)


def describe(config: RunConfig) -> str:
    """The topology as a table for people: `actors topology run.yaml`."""
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
    return "\n".join([*lines, "", f"control address: {addresses.control} (all others are learned from State)"])


CONTROL_HWM = 8
"""Beats and States are absolute: a few queued ones are already too many."""


def milliseconds(seconds: float) -> int:
    """A poll timeout, rounded up: rounding down would spin through the last millisecond."""
    return max(0, math.ceil(seconds * 1000))


CONNECT_MILLISECONDS, HEARTBEAT_MILLISECONDS = 2000, 5000
"""After a network was cut for long TCP waits longer and longer before it tries again, up to minutes; so a connection
that is silent for three heartbeats is made anew. Not sooner: what was on its way is lost with it."""

HANDSHAKE_MILLISECONDS = 5000
"""For a peer to show who it is, from the moment that it is connected."""


def prepare(socket: "zmq.Socket[bytes]", high_water_mark: int, buffer_bytes: int | None, max_frame_bytes: int) -> None:
    """Options that every socket of the bus has.

    LINGER 0: whoever closes a socket has either had its groups released or is being killed; nothing on the wire is the
    only copy, so there is nothing to wait for.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MILLISECONDS)
    if buffer_bytes is not None:
        socket.setsockopt(zmq.SNDBUF, buffer_bytes)
        socket.setsockopt(zmq.RCVBUF, buffer_bytes)
