"""TCP ports for tests: each process claims a block, below what the system hands out by itself, so nobody is raced.

Workers of one pytest, and other ones on the same machine, look for their blocks in the same order. The first port of a
block is bound by its owner for as long as the process lives, and so says to all others that the block is taken.
"""

import functools
import itertools
import socket
from collections.abc import Iterator

FIRST, END, BLOCK = 20_000, 32_600, 200
MOST_IN_A_ROW = 16


def claim() -> tuple[socket.socket, range]:
    """Return the socket that holds a block that nobody had, and the block's other ports."""
    for first in range(FIRST, END, BLOCK):
        # without SO_REUSEADDR: only one process can bind it, though nobody listens
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
            continue
        return holder, range(first + 1, first + BLOCK)
    raise AssertionError("every block of ports is taken")


@functools.cache
def _own() -> tuple[socket.socket, Iterator[int]]:
    """Return this process's claim; it is kept to the end of the process."""
    holder, ports = claim()
    return holder, itertools.cycle(ports[:-MOST_IN_A_ROW])  # so that a row that starts at the last one is ours too


def free_port() -> int:
    """A loopback port that nothing listens on."""
    return free_ports(1)


def free_ports(number: int) -> int:
    """The first of so many loopback ports in a row that nothing listens on."""
    assert number <= MOST_IN_A_ROW
    _, numbers = _own()
    for first in numbers:
        if all(map(is_free, range(first, first + number))):
            for _ in range(number - 1):
                next(numbers)
            return first
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
