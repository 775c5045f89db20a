"""Names of hosts: what can't be resolved is an OSError, which callers deal with."""

import pytest
import zmq

from bus.hosts import choose_family, endpoints_of, own_address, to_bind


@pytest.mark.parametrize("name", ["a..b", "a" * 64 + ".b"])
def test_a_name_that_is_no_host_name_is_one_that_is_not_resolved(name: str) -> None:
    """An empty label, or one of 64 characters: the thread that resolves names goes on, and binding tells."""
    with pytest.raises(OSError, match="is no name of a host"):
        endpoints_of(name, "5555")
    assert to_bind(f"tcp://{name}:5555") == [f"tcp://{name}:5555"]


@pytest.mark.parametrize(
    ("address", "host", "bound"),
    [
        ("tcp://10.0.0.5:5555", "10.0.0.5", ["tcp://10.0.0.5:5555"]),
        ("tcp://[fd00::5]:5555", "::1", ["tcp://[fd00::5]:5555"]),
        ("tcp://10.0.0.5:5555", "0.0.0.0", ["tcp://0.0.0.0:5555"]),
        ("tcp://a-name-of-nobody.invalid:5555", "::", ["tcp://[::]:5555"]),
        ("ipc:///tmp/control", "0.0.0.0", ["ipc:///tmp/control"]),
    ],
)
def test_the_packer_listens_on_its_address_or_on_all(address: str, host: str, bound: list[str]) -> None:
    """Behind NAT no machine has the address of `bus.control`, so a wildcard in `bus.host` counts for the packer too."""
    assert to_bind(address, host) == bound


@pytest.mark.parametrize(
    ("address", "own", "is_ipv6"),
    [
        ("tcp://10.0.0.5:1", "::", 0),
        ("tcp://[fd00::5]:1", "0.0.0.0", 1),
        ("tcp://[::]:*", "", 1),
        ("tcp://*:1", "::", 0),
        ("tcp://reward-host:1", "::", 1),
        ("tcp://reward-host:1", "10.0.0.5", 0),
        ("ipc:///tmp/a:b", "", 0),
    ],
)
def test_a_name_has_the_family_of_the_own_address_and_a_number_its_own(address: str, own: str, is_ipv6: int) -> None:
    """A host without IPv4 resolves names to IPv6."""
    with zmq.Context.instance().socket(zmq.PUSH) as socket:
        choose_family(socket, address, own)
        assert socket.getsockopt(zmq.IPV6) == is_ipv6


@pytest.mark.parametrize(
    ("endpoint", "own"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1"),
        ("tcp://127.0.0.2:5555", "127.0.0.1"),
        ("tcp://packer-host:5555", ""),
        ("ipc:///tmp/control", ""),
        ("", ""),
    ],
)
def test_the_own_address_on_the_way_to_a_peer_is_told_by_the_kernel(endpoint: str, own: str) -> None:
    """Names are not resolved for it, since a name server may hang."""
    assert own_address(endpoint) == own
