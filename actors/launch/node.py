"""`actors node`: the share of one machine, from run.yaml, its rank and the list of all machines."""

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from actors.launch.placement import addresses, place
from actors.ops.up.share import Share
from schemas.config import RunConfig, load_config
from schemas.config.services import is_loopback, without_brackets
from schemas.errors import ConfigError


def share_of(path: Path, overrides: Sequence[str], rank: int, hosts: Sequence[str]) -> tuple[RunConfig, Share]:
    """Return the configuration of a node, with its addresses, and its share of the run.

    Args:
        path: run.yaml.
        overrides: overrides of the configuration; they win over the addresses that follow from `hosts`.
        rank: number of this node.
        hosts: name or address of each node.

    Raises:
        ConfigError: the configuration can't be used, the nodes do not suffice, or the name of this machine leads
            nowhere.
    """
    if not 0 <= rank < len(hosts):
        raise ConfigError(f"--rank: {rank}, but --nodes names {len(hosts)} nodes, counted from 0")
    base = load_config(path, list(overrides))
    nodes = place(base, hosts)
    given = {override.partition("=")[0]: override.partition("=")[2] for override in overrides}
    own = given.get("bus.host") or own_address(hosts, rank)
    found = addresses(base, nodes, rank, own)
    config = load_config(path, [*found, *overrides])
    return config, Share(rank, len(nodes), nodes[rank].actors)


def own_address(hosts: Sequence[str], rank: int) -> str:
    """Return the numeric address of this machine.

    Raises:
        ConfigError: the name can't be resolved, or leads to loopback while other nodes are elsewhere.
    """
    host = without_brackets(hosts[rank])
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    own = resolve(host)
    # Debian's installer writes 127.0.1.1 for the host's own name into /etc/hosts
    if is_loopback(own) and not all(is_loopback(other) for other in hosts):
        raise ConfigError(
            f"--nodes: {host} is {own} on this machine, which the other nodes can't reach; name addresses, correct "
            "/etc/hosts, or set bus.host (as an override) to this machine's address"
        )
    return own


def resolve(host: str) -> str:
    """Return the address behind a name, IPv4 if there is one.

    Raises:
        ConfigError: the name is not known.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--nodes: {host}, this machine, can't be resolved: {error}; name addresses, or set bus.host (as an "
            "override) to this machine's address"
        ) from error
    return sorted((str(address[0]) for *_, address in found), key=lambda one: ":" in one)[0]


def hosts_of(text: str) -> list[str]:
    """Return the names in a list separated by commas or blanks; cloud launchers give one per line."""
    return text.replace(",", " ").split()
