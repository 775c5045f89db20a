"""What a tracker has been sent, across deaths of the process."""

import sys
import time
from pathlib import Path

import pytest

from actors.trackers.digests import Digests
from actors.trackers.flat import flat
from actors.trackers.journal import Journal
from actors.trackers.loop import run_of


def test_a_journal_is_read_again_as_it_was(tmp_path: Path) -> None:
    """Steps sent, the newest one that the tracker has, the number of its run there."""
    path = tmp_path / "trackers" / "wandb.jsonl"
    journal = Journal(path, "abc")
    for step in range(4):
        journal.note_sending(step, f"d{step:015d}")
    journal.note_held(2)
    again = Journal(path, "abc")
    assert (again.held, dict(again.digests), again.id) == (2, {n: f"d{n:015d}" for n in range(4)}, "abc")
    again.note_back(2)
    again = Journal(path, "abc")
    assert (again.held, list(again.digests)) == (1, [0, 1])
    again.start_again()
    again.note_sending(1, "e000000000000001")
    third = Journal(path, "abc")
    assert (third.held, dict(third.digests), third.id, third.finished) == (-1, {1: "e000000000000001"}, "abc-1", False)
    third.note_finished()
    assert Journal(path, "abc").finished


def test_a_line_cut_short_by_a_full_disk_costs_only_itself(tmp_path: Path) -> None:
    """The step counts as not sent, and is asked for."""
    path = tmp_path / "a.jsonl"
    Journal(path, "abc").note_sending(1, "d000000000000001")
    path.write_bytes(path.read_bytes() + b'\n{"step": 2, "dig')
    journal = Journal(path, "abc")
    assert dict(journal.digests) == {1: "d000000000000001"}
    journal.note_sending(2, "d000000000000002")
    assert dict(Journal(path, "abc").digests) == {1: "d000000000000001", 2: "d000000000000002"}


def test_a_long_journal_is_read_in_time_that_grows_with_its_length(tmp_path: Path) -> None:
    """Ten times the steps take about ten times as long, not a hundred: a run may have a million of them."""

    def seconds(steps: int) -> float:
        path = tmp_path / f"{steps}.jsonl"
        lines = [f'\n{{"step": {step}, "digest": "0123456789abcdef"}}\n\n{{"held": {step}}}\n' for step in range(steps)]
        path.write_text('{"run": "abc", "generation": 0}\n' + "".join(lines))
        began = time.process_time()
        journal = Journal(path, "abc")
        assert (journal.held, journal.newest, len(journal.digests)) == (steps - 1, steps - 1, steps)
        return time.process_time() - began

    assert seconds(5000) < 40 * seconds(500)


@pytest.mark.parametrize("damage", [b"5", b"null", b'["step"]', b'{"other": 1}', b'{"step": "x"}', b"\xff", b'{"st'])
def test_a_damaged_line_counts_for_nothing(tmp_path: Path, damage: bytes) -> None:
    """It neither ends the process nor stands for the end of the run; as the first line it starts the journal again."""
    path = tmp_path / "a.jsonl"
    journal = Journal(path, "abc")
    journal.note_sending(1, "d000000000000001")
    with path.open("ab") as file:
        file.write(b"\n" + damage + b"\n")
    again = Journal(path, "abc")
    assert (dict(again.digests), again.held, again.finished) == ({1: "d000000000000001"}, -1, False)
    path.write_bytes(damage + b"\n" + path.read_bytes().partition(b"\n")[2])
    assert run_of(path) == ""
    assert dict(Journal(path, "abc").digests) == {}


def test_a_journal_of_another_run_counts_for_nothing(tmp_path: Path) -> None:
    """A new run in the same folder."""
    path = tmp_path / "a.jsonl"
    Journal(path, "abc").note_held(7)
    assert (Journal(path, "other").held, Journal(path, "abc").held) == (-1, -1)


def test_nested_values_become_a_flat_table() -> None:
    """Lists by their numbers; empty branches are left out."""
    assert flat({"a": [{"b": 1}, "c"], "d": {}, "e": None}) == {"a.0.b": 1, "a.1": "c", "e": None}


def test_digests_of_a_long_run_take_eight_bytes_a_step(tmp_path: Path) -> None:
    """As a dict they took twenty times as much."""
    digests = Digests()
    before = sys.getsizeof(digests._values)
    for step in range(100_000):
        digests.add(step, f"{step + 1:016x}")
    assert sys.getsizeof(digests._values) - before < 1_000_000
    assert (digests[99_999], digests.newest, len(digests)) == ("00000000000186a0", 99_999, 100_000)


def test_a_step_that_was_never_sent_has_no_digest() -> None:
    """Of a journal that has lost a line; an empty digest is one of a step that was sent."""
    digests = Digests()
    digests.add(1, "")
    digests.add(4, "000000000000000f")
    assert dict(digests) == {1: "", 4: "000000000000000f"}
    digests.forget_after(3)
    assert (dict(digests), digests.newest) == ({1: ""}, 1)


@pytest.mark.parametrize(("step", "digest"), [(1, "no hex"), (-1, ""), (10**12, "")])
def test_a_step_that_no_journal_has_is_refused(step: int, digest: str) -> None:
    """A damaged line neither fills the memory nor stands for a step."""
    with pytest.raises(ValueError, match=f"step {step}"):
        Digests().add(step, digest)
