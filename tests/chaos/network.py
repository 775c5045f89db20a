"""A network namespace for each actor of a run, joined by a bridge, so that any one of them can be cut off.

`actors up` and the driver stay where they are, at the bridge. A launcher that stands in for the interpreter with which
`actors up` starts its children enters the actor's namespace and adds the addresses of it; all else is the real command.
"""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PORT = 5555
"""Of the packer's control socket: its namespace has nobody else."""


@dataclass(frozen=True)
class Network:
    """Addresses and devices of the actors, by name. Names of devices have at most 15 characters."""

    tag: int
    names: Sequence[str]

    @property
    def bridge(self) -> str:
        """The device at which all meet."""
        return f"chaos{self.tag}"

    def host(self, name: str) -> str:
        """An actor's address."""
        return f"10.213.{self.tag}.{10 + self.names.index(name)}"

    def namespace(self, name: str) -> str:
        """An actor's namespace."""
        return f"chaos{self.tag}-{name}"

    def device(self, name: str) -> str:
        """The bridge's end of an actor's cable."""
        return f"chaos{self.tag}v{self.names.index(name)}"

    def launcher(self, folder: Path) -> Path:
        """Write the program that stands in for the interpreter."""
        cases = [
            f'{name}) exec ip netns exec {self.namespace(name)} {shlex.quote(sys.executable)} "$@" '
            f"bus.host={self.host(name)} inference.host={self.host(name)} telemetry.metrics_host={self.host(name)} ;;"
            for name in self.names
        ]
        find = 'for word in "$@"; do [ "$last" = --name ] && name=$word; last=$word; done'
        path = folder / "python"
        path.write_text("\n".join(["#!/bin/sh", find, 'case "$name" in', *cases, "esac", "exit 9", ""]))
        path.chmod(0o755)
        return path

    @contextlib.contextmanager
    def cut_off(self, name: str) -> Iterator[None]:
        """Nothing reaches this actor and nothing leaves it for the length of a block."""
        _ip("link", "set", self.device(name), "down")
        try:
            yield
        finally:
            _ip("link", "set", self.device(name), "up")


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[Network | str]:
    """Make one for a block; yields why there is none, in words, where this machine does not allow it."""
    try:
        made = _claim(names)
    except (OSError, subprocess.CalledProcessError) as error:
        yield f"no network namespaces: {_words(error)}"
        return
    try:
        try:
            _build(made)
        except subprocess.CalledProcessError as error:
            yield f"no network namespaces: {_words(error)}"
        else:
            yield made
    finally:
        _remove(made)


def _claim(names: Sequence[str]) -> Network:
    """Make the bridge, whose name nobody else on this machine has then."""
    for tag in range(1, 250):
        made = Network(tag, names)
        try:
            _ip("link", "add", "name", made.bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            if "exists" in error.stderr:
                continue
            raise
        return made
    raise OSError("chaos1 to chaos249 are all taken: remains of killed runs? `ip link del` removes them")


def _words(error: Exception) -> str:
    return (getattr(error, "stderr", "") or str(error)).strip()


def _build(made: Network) -> None:
    _ip("addr", "add", f"10.213.{made.tag}.1/24", "dev", made.bridge)
    _ip("link", "set", made.bridge, "up")
    for name in made.names:
        space, device, inside = made.namespace(name), made.device(name), f"{made.device(name)}i"
        _ip("netns", "add", space)
        _ip("link", "add", device, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", space)
        _ip("link", "set", device, "master", made.bridge)
        _ip("link", "set", device, "up")
        _ip("-n", space, "addr", "add", f"{made.host(name)}/24", "dev", inside)
        _ip("-n", space, "link", "set", inside, "up")
        _ip("-n", space, "link", "set", "lo", "up")


def _remove(made: Network) -> None:
    for name in made.names:
        subprocess.run(["ip", "netns", "del", made.namespace(name)], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", made.bridge], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


if __name__ == "__main__":  # LAUNCHER up run.yaml …: `actors up` whose children the launcher starts
    from actors.cli import main

    sys.executable = sys.argv[1]
    sys.argv = ["actors", *sys.argv[2:]]
    sys.exit(main())
