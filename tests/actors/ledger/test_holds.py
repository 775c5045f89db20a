"""Clocks of one length, and who names which attempts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ledger.clock import Clock
from actors.ledger.holds import Holds


def test_keys_are_late_in_the_order_of_their_starts() -> None:
    """5 s each: b at 5 + 1, a, started again at 3, at 8."""
    clock: Clock[str] = Clock(5.0)
    for key, now in (("a", 0.0), ("b", 1.0), ("c", 2.0), ("a", 3.0)):
        clock.start(key, now)
    clock.stop("c")
    clock.stop("never started")
    assert [clock.late(now) for now in (5.9, 6.0, 8.0)] == [[], ["b"], ["b", "a"]]
    assert "b" in clock
    assert "c" not in clock


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.tuples(st.integers(-2, 2), st.integers(1, 3)))), max_size=20)
)
def test_holds_are_found_by_peer_and_by_ordinal(heartbeats: list[tuple[str, set[tuple[int, int]]]]) -> None:
    """Against a plain table of newest heartbeats; an empty set stands for a peer that is gone."""
    holds, table = Holds(), dict[str, set[tuple[int, int]]]()
    for who, named in heartbeats:
        before = table.get(who, set())
        if named:
            assert holds.update(who, named) == named - before
            table[who] = named
        elif who in table:
            assert holds.forget(who) == table.pop(who)
        for ordinal in range(-2, 3):
            assert holds.naming(ordinal) == {w for w, hs in table.items() if ordinal in {o for o, _ in hs}}
            for attempt in (1, 2, 3):
                assert holds.is_named((ordinal, attempt)) == any((ordinal, attempt) in hs for hs in table.values())
        assert all(holds.of(w) == hs for w, hs in table.items())


def test_a_peer_that_never_named_anything_can_go() -> None:
    """Its lease ends like any other."""
    assert Holds().forget("a") == frozenset()
