"""Names of hosts: what can't be resolved is an OSError, which callers deal with."""

import pytest

from bus.hosts import endpoints_of, to_bind


@pytest.mark.parametrize("name", ["a..b", "a" * 64 + ".b"])
def test_a_name_that_is_no_host_name_is_one_that_is_not_resolved(name: str) -> None:
    """An empty label, or one of 64 characters: the thread that resolves names goes on, and binding tells."""
    with pytest.raises(OSError, match="is no name of a host"):
        endpoints_of(name, "5555")
    assert to_bind(f"tcp://{name}:5555") == f"tcp://{name}:5555"
