"""Limits of environments, overtaken groups, and the steps that wait for a group."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.algorithms.fair_shares import (
    allowance_of,
    drawable,
    last_step_of,
    limits_of,
    must_wait,
    overtaken_of,
)
from actors.algorithms.lag import is_stale

HALVES = {"slow": 0.5, "fast": 0.5}


def test_the_worked_example_of_the_module() -> None:
    """Window 16, allowance 56; of 16 slots each environment has eight."""
    assert allowance_of(8, 1, 8, 0) == 56
    assert limits_of(HALVES, 16, 56, 16) == {"slow": 8, "fast": 8}
    assert limits_of(HALVES, 16, 56, 1000) == {"slow": 36, "fast": 36}


def test_no_environment_takes_more_than_the_allowance() -> None:
    """So that the others always have the whole window."""
    assert limits_of({"slow": 0.99, "fast": 0.01}, 16, 56, 10_000) == {"slow": 56, "fast": 1}


@given(
    st.lists(st.floats(0.01, 10.0), min_size=2, max_size=6), st.integers(1, 50), st.integers(1, 50), st.integers(0, 99)
)
def test_every_environment_has_a_place_and_the_limits_fit(
    weights: list[float], window: int, allowance: int, slots: int
) -> None:
    """At least 1 each; beyond that together no more than slots, and none above the allowance."""
    shares = {str(number): weight / sum(weights) for number, weight in enumerate(weights)}
    limits = limits_of(shares, window, allowance, slots)
    assert limits.keys() == shares.keys()
    assert min(limits.values()) >= 1
    assert max(limits.values()) <= allowance
    assert sum(limit for limit in limits.values() if limit > 1) <= slots


def test_a_group_is_overtaken_by_later_groups_of_others_alone() -> None:
    """2 and 4 are older than 5 of the other environment; 7 is not; a group of its own environment overtakes none."""
    under_way = {"slow": [2, 4, 7], "fast": [9], "alone": []}
    assert overtaken_of(under_way, {"fast": 5, "slow": 8}) == {"slow": 2, "fast": 0, "alone": 0}
    assert overtaken_of({"slow": [2, 4, 7]}, {"slow": 8}) == {"slow": 0}
    assert overtaken_of({"slow": [0]}, {}) == {"slow": 0}


def test_an_environment_with_its_share_under_way_is_not_drawn() -> None:
    """The other one is."""
    assert drawable({"slow": 8, "fast": 8}, {"slow": 8, "fast": 3}, {"slow": 8, "fast": 0}) == ["fast"]


def test_a_fast_environment_takes_what_the_window_has_left() -> None:
    """Both have their share, and only the slow one was overtaken; with all shares overtaken nothing is drawn."""
    limits = {"slow": 8, "fast": 8}
    assert drawable(limits, {"slow": 8, "fast": 8}, {"slow": 8, "fast": 0}) == ["fast"]
    assert drawable(limits, {"slow": 8, "fast": 8}, {"slow": 8, "fast": 8}) == []
    assert drawable(limits, {}, {}) == ["slow", "fast"]


@given(st.integers(0, 100), st.integers(0, 50))
def test_the_last_step_is_the_last_one_before_a_group_is_stale(version: int, limit: int) -> None:
    """P17."""
    last = last_step_of(version, limit)
    assert not is_stale(last, version, limit)
    assert is_stale(last + 1, version, limit)


@pytest.mark.parametrize(
    ("chosen", "settled", "under_way", "waits"),
    [
        ([9, 9], [], [], False),  # nothing is under way
        ([9, 9], [], [6], False),  # the next step is early enough
        ([9, 9], [], [5], True),  # this step is its last
        ([5, 5], [], [5], False),  # waiting would save one and lose another
        ([9, 9], [], [4], False),  # too late in any case
        ([9, 9], [], [6, 6], False),  # step 6 takes both
        ([9, 9], [], [6, 6, 6], True),  # step 6 takes two of them
        ([7, 9], [6, 6], [6], True),  # step 6 is full of settled groups
    ],
)
def test_step_5_waits_for_groups_that_no_later_step_could_train(
    chosen: list[int], settled: list[int], under_way: list[int], waits: bool
) -> None:
    """Steps of two groups."""
    assert must_wait(5, 2, chosen, settled, under_way) is waits


def all_fit(step: int, size: int, groups: list[int]) -> bool:
    """Whether an order of the groups exists in which none is stale: step, step + 1, … take `size` each."""
    return any(
        all(step + place // size <= last for place, last in enumerate(order)) for order in set(permutations(groups))
    )


@given(st.integers(1, 2), st.lists(st.integers(5, 9), max_size=5), st.data())
def test_a_step_waits_if_no_order_of_the_rest_saves_all(size: int, rest: list[int], data: st.DataObject) -> None:
    """Against a search over all orders of what is left after the step."""
    chosen = data.draw(st.lists(st.integers(10, 12), min_size=size, max_size=size))
    num_settled = data.draw(st.integers(0, max(0, len(rest) - 1)))
    settled, under_way = rest[:num_settled], rest[num_settled:]
    expected = bool(under_way) and not all_fit(6, size, rest)
    assert must_wait(5, size, chosen, settled, under_way) is expected
