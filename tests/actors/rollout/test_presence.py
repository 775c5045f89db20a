"""Who is still there, by the packer's directives: absence is counted between directives of one term."""

from types import SimpleNamespace
from typing import Any

from actors.rollout.presence import MAX_REMEMBERED, Presence


def peer(name: str, boot_id: str) -> Any:
    """A process as the directive names it."""
    return SimpleNamespace(name=name, boot_id=boot_id)


def test_a_process_is_gone_after_a_lease_of_states_that_do_not_list_it() -> None:
    """Missing from 10.0 s on: still there at 13.0 s, gone at 13.1 s, and back as soon as it is listed."""
    there = Presence(3.0)
    there.note(9.0, 1, ["b"], [])
    for now in (10.0, 11.0, 13.0):
        there.note(now, 1, [], [])
        assert not there.is_gone("r", "b")
    there.note(13.1, 1, [], [])
    assert there.is_gone("r", "b")
    there.note(14.0, 1, ["b"], [])
    assert not there.is_gone("r", "b")


def test_absence_starts_anew_with_each_term_and_not_with_the_packers_silence() -> None:
    """Ten seconds without any directive, then the directives of a packer that has heard nobody yet."""
    there = Presence(3.0)
    there.note(10.0, 1, ["b"], [])
    there.note(20.0, 2, [], [])
    there.note(22.9, 2, [], [])
    there.note(23.5, 3, [], [])
    there.note(25.0, 3, [], [])
    assert not there.is_gone("r", "b")
    there.note(26.6, 3, [], [])
    assert there.is_gone("r", "b")


def test_absence_starts_anew_when_no_state_has_come_for_a_lease() -> None:
    """A packer that was stopped for 50 s says again what it knew before; it has had no time to hear anybody since."""
    there = Presence(3.0)
    there.note(9.0, 1, ["b"], [])
    there.note(10.0, 1, [], [])
    for now in (60.0, 61.5, 63.0):
        there.note(now, 1, [], [])
        assert not there.is_gone("r", "b")
    there.note(63.1, 1, [], [])
    assert there.is_gone("r", "b")


def test_the_time_through_which_states_come_stands_still_while_none_comes() -> None:
    """It starts again with a new term and after a lease without a directive, and never before the question."""
    there = Presence(3.0)
    for now in (10.0, 12.0, 15.0):
        there.note(now, 1, [], [])
    assert there.told_for(11.0) == 4.0
    assert there.told_for(2.0) == 5.0
    assert there.told_for(20.0) <= 0.0
    there.note(40.0, 1, [], [])
    assert there.told_for(11.0) == 0.0
    there.note(42.0, 1, [], [])
    there.note(43.0, 2, [], [])
    assert there.told_for(11.0) == 0.0
    there.note(44.0, 2, [], [])
    assert there.told_for(11.0) == 1.0


def test_a_process_is_gone_at_once_when_another_one_is_named_by_its_name() -> None:
    """Its successor; one that nobody has ever listed is not known to be gone."""
    there = Presence(3.0)
    there.note(10.0, 1, ["b1", "b2"], [peer("r", "b1")])
    assert not there.is_gone("r", "b1")
    assert not there.is_gone("s", "never listed")
    there.note(10.1, 1, ["b1", "b2"], [peer("r", "b2")])
    assert there.is_gone("r", "b1")
    assert not there.is_gone("r", "b2")


def test_absent_processes_that_are_remembered_are_bounded() -> None:
    """The oldest are forgotten."""
    there = Presence(3.0)
    for number in range(MAX_REMEMBERED + 5):
        there.note(float(number), 1, [str(number)], [])
    assert there.num_absent == MAX_REMEMBERED
