"""Ports for tests: no two processes are given the same."""

import socket

from tests.ports import MOST_IN_A_ROW, claim, free_port, free_ports


def test_a_block_of_ports_has_one_owner() -> None:
    """Until its holder is closed, or its process has ended, the next one gets another block."""
    first, ports = claim()
    second, others = claim()
    with first, second:
        assert not set(ports) & set(others)
        assert free_port() not in {*ports, *others}


def test_ports_in_a_row_are_free_and_given_once() -> None:
    """One that is bound is in no row."""
    with socket.create_server(("127.0.0.1", free_port())) as server:
        bound = server.getsockname()[1]
        rows = [range(first, first + MOST_IN_A_ROW) for first in (free_ports(MOST_IN_A_ROW) for _ in range(20))]
        assert not any(bound in row for row in rows)
    assert not set(rows[0]) & set(rows[1])
