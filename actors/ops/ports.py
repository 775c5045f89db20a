"""Ports fixed by keys of a run: a list of these, whether each is free, and a claim for the life of `actors up`.

A port of 0, the default, is any free port and never collides. Of two runs that start at the same moment with the same
fixed ports, each would bind some, and both would fail. So `actors up` first claims all of its ports, then looks whether
these are free. A claim is a socket in Linux's abstract namespace: as ports do, it holds for all users of a network
namespace, and ends with the process.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from actors.ops.device_plan import Actor, largest_of
from schemas.config import RunConfig
from schemas.config.environments import AgentConfig
from schemas.errors import ConfigError

CLAIM = "\0grpo-actors/port/"
"""Start of the name of a claim; host and port follow. The zero byte is that of the abstract namespace."""


class Port(NamedTuple):
    """Fixed port of a process on this machine.

    Args:
        key: key that fixes the port.
        host: address that the process binds to.
        number: the port.
        first: value of the key, which is the port of the key's first process.
    """

    key: str
    host: str
    number: int
    first: int

    def problem(self, holder: str) -> str:
        """Return the error text for a port that is in use, as `path.to.key: …`. `holder`: words on its user."""
        counted = self.number != self.first
        rule = f" (`actors up` gives its actors the ports from {self.first} on)" if counted else ""
        return f"{self.key}: {self.host}:{self.number} is in use{rule}; {holder}"


def fixed_ports(config: RunConfig, actors: Sequence[Actor] | None = None) -> list[Port]:
    """Return the ports of this machine that keys of the run fix.

    Args:
        config: configuration of the run.
        actors: processes of this machine; None: all of the run.
    """
    actors = largest_of(config) if actors is None else actors
    found: list[Port] = []
    if first := config.inference.port:
        engines = [actor for actor in actors if actor.kind == "inference"]
        found += [Port("inference.port", config.inference.host, first + actor.index, first) for actor in engines]
    if first := config.telemetry.metrics_port:
        # a port for each child of `actors up`
        numbers = range(first, first + len(actors))
        found += [Port("telemetry.metrics_port", config.telemetry.metrics_host, number, first) for number in numbers]
    if config.bus.control.startswith("tcp://") and any(actor.kind == "packer" for actor in actors):
        host, _, number = config.bus.control.removeprefix("tcp://").rpartition(":")
        found.append(Port("bus.control", host, int(number), int(number)))
    sessions = config.rollout.sessions
    has_agents = any(isinstance(one, AgentConfig) for one in config.environments_by_label.values())
    if sessions.port and has_agents and any(actor.kind == "rollout" for actor in actors):
        found.append(Port("rollout.sessions.port", sessions.host, sessions.port, sessions.port))
    return found


def busy_ports(config: RunConfig, actors: Sequence[Actor] | None = None) -> list[str]:
    """Return an error text for each fixed port on this machine that is in use. Arguments: as `fixed_ports`."""
    ports = fixed_ports(config, actors)
    return [port.problem("another process has bound it") for port in ports if _is_bound(port.host, port.number)]


@contextlib.contextmanager
def claimed_ports(config: RunConfig, actors: Sequence[Actor] | None = None) -> Iterator[None]:
    """Claim all fixed ports for the duration of a block. Arguments: as `fixed_ports`.

    Raises:
        ConfigError: a port is in use, or claimed by another run that may not have bound it yet.
    """
    with contextlib.ExitStack() as claims:
        ports = fixed_ports(config, actors)
        claimed = [port for port in ports if not _claim(port, claims)]
        problems = [port.problem("another run on this machine has the same value") for port in claimed]
        if problems or (problems := busy_ports(config, actors)):
            raise ConfigError(*problems)
        yield


def _claim(port: Port, claims: contextlib.ExitStack) -> bool:
    """Claim a port until `claims` is closed; return False if another process has claimed it."""
    claim = claims.enter_context(socket.socket(socket.AF_UNIX))
    try:
        claim.bind(f"{CLAIM}{port.host}:{port.number}")
    except OSError as error:
        # any other error: a system without abstract sockets, where only the look at the ports is left
        return error.errno != errno.EADDRINUSE
    return True


def _is_bound(host: str, port: int) -> bool:
    """Return whether an address of this machine is in use; False for an address of another machine."""
    try:
        found = socket.getaddrinfo(host.strip("[]") or "0.0.0.0", port, type=socket.SOCK_STREAM)  # noqa: S104
    except (OSError, UnicodeError):  # UnicodeError: an empty label, or one of more than 63 characters
        return False
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # as the actors do: a port of connections that have just been closed counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
