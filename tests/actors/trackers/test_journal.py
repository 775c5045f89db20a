"""What a tracker has been sent, across deaths of the process."""

from pathlib import Path

from actors.trackers.flat import flat
from actors.trackers.journal import Journal


def test_a_journal_is_read_again_as_it_was(tmp_path: Path) -> None:
    """Steps sent, the newest one that the tracker has, the number of its run there."""
    path = tmp_path / "trackers" / "wandb.jsonl"
    journal = Journal(path, "abc")
    for step in range(4):
        journal.note_sending(step, f"d{step}")
    journal.note_held(2)
    again = Journal(path, "abc")
    assert (again.held, again.digests, again.id) == (2, {0: "d0", 1: "d1", 2: "d2"}, "abc")
    again.start_again()
    again.note_sending(1, "e1")
    third = Journal(path, "abc")
    assert (third.held, third.digests, third.id, third.finished) == (-1, {1: "e1"}, "abc-1", False)
    third.note_finished()
    assert Journal(path, "abc").finished


def test_a_line_cut_short_by_a_full_disk_costs_only_itself(tmp_path: Path) -> None:
    """The step counts as not sent, and is asked for."""
    path = tmp_path / "a.jsonl"
    Journal(path, "abc").note_sending(1, "d1")
    path.write_bytes(path.read_bytes() + b'\n{"step": 2, "dig')
    journal = Journal(path, "abc")
    assert journal.digests == {1: "d1"}
    journal.note_sending(2, "d2")
    assert Journal(path, "abc").digests == {1: "d1", 2: "d2"}


def test_a_journal_of_another_run_counts_for_nothing(tmp_path: Path) -> None:
    """A new run in the same folder."""
    path = tmp_path / "a.jsonl"
    Journal(path, "abc").note_held(7)
    assert (Journal(path, "other").held, Journal(path, "abc").held) == (-1, -1)


def test_nested_values_become_a_flat_table() -> None:
    """Lists by their numbers; empty branches are left out."""
    assert flat({"a": [{"b": 1}, "c"], "d": {}, "e": None}) == {"a.0.b": 1, "a.1": "c", "e": None}
