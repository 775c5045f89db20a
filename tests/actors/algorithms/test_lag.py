"""Lag, the step of a position, and how much may be issued (P4, P10, P15, P17)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.algorithms.lag import (
    is_stale,
    lag_of,
    min_version,
    newest_allowed,
    step_of,
    surplus_groups,
    tickets_allowed,
)


def test_lag_counts_versions_between_the_weights_a_step_starts_from_and_its_oldest_token() -> None:
    """Step 5 starts from version 4."""
    assert [lag_of(5, version) for version in (4, 3, 0)] == [0, 1, 4]


def test_positions_fill_steps_one_after_the_other() -> None:
    """Eight groups a step: 0 … 7 are step 1."""
    assert [step_of(position, 8) for position in (0, 7, 8, 15, 16)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(("served", "expected"), [(0, 16), (1, 24), (2, 32)])
def test_the_worked_example_of_the_module(served: int, expected: int) -> None:
    """groups_per_step 8, level 1: 16, then 24, then 32 ordinals."""
    assert tickets_allowed(0, 0, served, 8, 1, 100) == expected
    assert tickets_allowed(expected, 0, served, 8, 1, 100) == 0


def test_level_zero_allows_one_step() -> None:
    """It must still generate."""
    assert tickets_allowed(0, 0, 0, 8, 0, 100) == 8


def test_without_a_served_version_nothing_is_allowed() -> None:
    """None is not version 0."""
    assert tickets_allowed(0, 0, None, 8, 1, 100) == 0


def test_dropped_ordinals_do_not_count() -> None:
    """16 issued, 3 of them dropped: 3 more."""
    assert tickets_allowed(16, 3, 0, 8, 1, 100) == 3


def test_the_last_step_ends_it() -> None:
    """Two steps of 8, however new the engines and however high the level."""
    assert tickets_allowed(10, 0, 50, 8, 9, 2) == 6
    assert tickets_allowed(17, 1, 50, 8, 9, 2) == 0


def test_what_is_allowed_is_never_negative() -> None:
    """An engine that served version 3 is gone, version 1 is left."""
    assert tickets_allowed(40, 0, 1, 8, 1, 100) == 0


def test_the_oldest_version_allowed_rises_with_the_step() -> None:
    """Level 1, two groups a step: steps 1 and 2 take version 0, step 3 version 1, step 4 version 2."""
    assert [min_version(position, 2, 1) for position in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]


def test_a_group_is_stale_one_beyond_the_limit() -> None:
    """Limit 8: lag 8 is trained, lag 9 is not."""
    assert not is_stale(10, 1, 8)
    assert is_stale(10, 0, 8)


@given(
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(0, 25),
    st.integers(0, 30),
    st.integers(0, 300),
)
def test_every_ticket_that_is_allowed_can_be_sampled_by_what_is_served(
    groups: int, level: int, steps: int, served: int, dropped: int, issued: int
) -> None:
    """The next ordinal's oldest version is not newer than the served one: no ticket waits for weights (P10, P15)."""
    dropped = min(dropped, issued)
    if tickets_allowed(issued, dropped, served, groups, level, steps) > 0:
        assert min_version(issued - dropped, groups, level) <= served


# --- oversampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "factor", "level", "limit", "expected"),
    [
        (8, 1.0, 1, 8, 0),
        (8, 1.5, 1, 8, 4),
        (8, 1.01, 1, 8, 1),
        (10, 1.1, 1, 8, 1),
        (8, 4.0, 1, 2, 8),
        (8, 4.0, 1, 1, 0),
        (3, 2.0, 0, 8, 3),
    ],
)
def test_the_surplus_is_rounded_up_and_stays_within_the_filter(
    groups: int, factor: float, level: int, limit: int, expected: int
) -> None:
    """ceil(groups × factor) − groups, but no more than (limit − level) × groups; 10 × 1.1 asks for 11."""
    assert surplus_groups(groups, factor, level, limit) == expected


def test_the_worked_example_of_the_module_with_a_surplus() -> None:
    """8 groups, level 1, surplus 4: 20, then 28; from ordinal 20 on tickets need version 1."""
    assert [tickets_allowed(0, 0, served, 8, 1, 100, 4) for served in (0, 1)] == [20, 28]
    assert [min_version(position, 8, 1, 4) for position in (0, 19, 20, 27, 28)] == [0, 0, 1, 1, 2]


def test_no_surplus_is_issued_beyond_the_last_step() -> None:
    """It could not be trained any more, and every ordinal is trained or dropped by a step (P20)."""
    assert tickets_allowed(0, 0, 0, 8, 1, 2, 4) == 16


@given(
    st.integers(1, 9),
    st.floats(1.0, 5.0),
    st.integers(0, 4),
    st.integers(0, 8),
    st.integers(0, 25),
    st.integers(0, 99),
)
def test_a_group_that_comes_at_its_turn_is_never_stale(
    groups: int, factor: float, level: int, more: int, served: int, back: int
) -> None:
    """Whatever the factor: sampled by the version served at its issue, or a newer one, it may train (P17)."""
    surplus = surplus_groups(groups, factor, level, level + more)
    issued = tickets_allowed(0, 0, served, groups, level, 10_000, surplus)
    for position in (issued - 1, max(0, issued - 1 - back)):
        oldest = min_version(position, groups, level, surplus)
        assert oldest <= served
        assert not is_stale(step_of(position, groups), oldest, level + more)


# --- AReaL's words ---------------------------------------------------------------------------------------------------


def areal_capacity(eta: int, version: int, batch: int, accepted: int, running: int) -> int:
    """Its staleness manager, the bound on concurrency aside (ours is `rollout.max_concurrent_groups`)."""
    return max(0, (eta + version + 1) * batch - (accepted + running))


@pytest.mark.parametrize(
    ("eta", "version", "accepted", "running", "rejected", "expected"),
    [
        (0, 0, 0, 0, 0, 8),  # max_staleness 0 must generate
        (0, 0, 3, 5, 0, 0),
        (0, 1, 8, 0, 0, 8),
        (1, 0, 0, 0, 0, 16),
        (1, 0, 6, 10, 0, 0),
        (1, 0, 6, 7, 3, 3),  # what was rejected does not count
        (4, 0, 0, 0, 0, 40),
        (2, 5, 40, 0, 0, 24),  # after a resume: accepted = version × batch
        (2, 5, 40, 20, 9, 4),
        (0, 3, 40, 0, 0, 0),  # newer weights were served before
    ],
)
def test_admission_is_that_of_areal(
    eta: int, version: int, accepted: int, running: int, rejected: int, expected: int
) -> None:
    """max_head_offpolicyness η is max_async_level, a batch of 8 is groups_per_step."""
    issued = accepted + running + rejected
    assert tickets_allowed(issued, rejected, version, 8, eta, 1_000) == expected
    assert areal_capacity(eta, version, 8, accepted, running) == expected


@pytest.mark.parametrize(
    ("under_way", "next_position", "expected"),
    [
        ([], 0, 0),  # the first steps are sampled by version 0
        ([0, 0], 4, 0),
        ([], 4, 1),  # step 3 needs version 1, and nothing needs an older one
        ([1, 1], 6, 1),
        ([2, 1], 8, 1),
        ([3], 10, 3),  # nothing is left to issue
        ([], 10, None),
    ],
)
def test_a_strict_level_keeps_engines_at_the_version_that_is_needed(
    under_way: list[int], next_position: int, expected: int | None
) -> None:
    """Level 1, two groups a step, five steps."""
    assert newest_allowed(under_way, next_position, 2, 1, 5) == expected
