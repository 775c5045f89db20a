"""A long run in short: what the packer keeps in memory and on disk is that of a few steps, however many there were."""

from collections import deque
from typing import Any

import pytest

from benchmarks.peers import LonePacker, lone_packer
from benchmarks.soak import config

MAY_GROW = {"_refusals", "evals", "done"}
"""One entry per process that was replaced (at most 10 000), one per evaluation."""
OTHERS = ("schemas.", "structlog", "threading", "zmq", "prometheus_client", "queue", "sqlite3", "bus.")


def lengths(value: Any, name: str, seen: set[int], found: dict[str, int]) -> dict[str, int]:
    """Lengths of all containers below the attributes of an object, summed by the attribute's name."""
    kind = type(value)
    if id(value) in seen or kind.__module__.startswith(OTHERS) or name in MAY_GROW:
        return found
    seen.add(id(value))
    if isinstance(value, dict | list | set | frozenset | deque):
        bounded = isinstance(value, deque) and value.maxlen is not None
        found[name] = found.get(name, 0) + (0 if bounded else len(value))
        for key, item in value.items() if isinstance(value, dict) else ():
            lengths(item, key if isinstance(key, str) and key.isidentifier() else name, seen, found)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for attribute, item in vars(value).items():
            lengths(item, attribute, seen, found)
    return found


def most(ring: LonePacker, until: int) -> dict[str, int]:
    """Turn until so many groups are trained; returns the greatest length of each container since 3/4 of them."""
    greatest: dict[str, int] = {}
    ask = ring.packer.store.database.execute
    while ring.num_trained < until:
        ring.turn()
        if ring.num_trained < 0.75 * until:
            continue
        found = lengths(ring.packer, "", set(), {})
        (found["stored groups"],) = ask("SELECT COUNT(*) FROM groups").fetchone()
        (found["stored payloads"],) = ask("SELECT COUNT(*) FROM payloads").fetchone()
        (found["pages"],) = ask("PRAGMA page_count").fetchone()
        greatest = {key: max(length, greatest.get(key, 0)) for key, length in found.items()}
    return greatest


@pytest.mark.long
def test_nothing_grows_between_ten_and_twenty_thousand_groups(tmp_path):
    """With failures, copies, poison, evaluations and rollouts that die."""
    sections = {
        "packer": {"groups_per_step": 32},
        "rollout": {"max_tokens": 16},
        "trainer": {"checkpoint": {"interval": 10}},
    }
    with lone_packer(config(tmp_path, 20_000 // 32, **sections)) as ring:
        at_10_000 = most(ring, 10_000)
        at_20_000 = most(ring, 19_968)
        assert {
            "_by_ordinal",
            "_sent",
            "_reports",
            "digests",
            "rows",
            "composed",
            "chains",
            "_named",
        } <= at_10_000.keys()
        grown = {key: (at_10_000.get(key, 0), n) for key, n in at_20_000.items() if n > 1.1 * at_10_000.get(key, 0) + 4}
        assert grown == {}
        while not ring.over:
            ring.turn()
        ledger = ring.packer.record.summary()["ledger"]
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert ledger["trained"] == 20_000 // 32 * 32
    assert ledger["trained_twice"] == ledger["in_flight"] == 0
    assert ledger["copies_dropped"] > 10
    assert ledger["reissued"] > 10
