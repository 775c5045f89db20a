"""TCP ports for tests: a block of each pytest worker, below what the system hands out by itself, so nobody is raced."""

import itertools
import os
import socket

FIRST, BLOCK = 20_000, 1_000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = itertools.cycle(range(FIRST + _worker * BLOCK, FIRST + (_worker + 1) * BLOCK))


def free_port() -> int:
    """A loopback port that nothing listens on."""
    for port in _numbers:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("a cycle never ends")


def is_free(port: int) -> bool:
    """Whether a port of this host can be bound: ZeroMQ closes a socket some time after it was told to."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True
