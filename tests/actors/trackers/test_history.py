"""Entries of a run as trackers get them, from files that are cut off and written again."""

from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.tail import Tail
from actors.trackers.history import SETTLE_SECONDS, History, digest_of, table_of
from tests.actors.trackers.doubles import sample_line, step_line, write


class Reader:
    """A History with a clock of its own, and the digests of what it gave out."""

    def __init__(self, folder: Path, due: tuple[int, ...] = (), names: Any = "ours") -> None:
        self.now = 0.0
        self.folder, self.sent = folder, dict[int, str]()
        self.history = History(folder, due.__contains__, names, lambda: self.now)

    def steps(self, *, is_over: bool = False, wait: float = SETTLE_SECONDS) -> list[int]:
        """Steps that are given out now, after a wait."""
        assert self.history.read(self.sent) is None
        self.now += wait
        found = list(self.history.take(is_over=is_over))
        self.sent |= {entry.step: digest for entry, digest in found}
        self.entries = {entry.step: entry for entry, _ in found}
        return [entry.step for entry, _ in found]

    def lines(self, *steps: int, **values: Any) -> None:
        """Replace metrics.jsonl."""
        write(self.folder / "metrics.jsonl", [step_line(step, **values) for step in steps])


def test_a_step_is_given_out_once_it_has_settled_with_its_samples(tmp_path: Path) -> None:
    """The packer may write the newest line again in its first moment; null is no value; a table has TRL's columns."""
    reader = Reader(tmp_path)
    reader.lines(1, 2)
    write(tmp_path / "samples.jsonl", [sample_line(1), sample_line(9, purpose="eval"), sample_line(2), sample_line(3)])
    assert reader.steps(wait=0.0) == []
    assert reader.steps() == [1, 2]
    entry = reader.entries[2]
    assert entry.values == {"reward_mean": 0.2, "reward/mine": 0.5, "seconds_gather": 0.1}
    assert entry.time == 1002.0
    assert entry.samples is not None
    assert entry.samples.columns[:7] == ("step", "environment", "prompt", "completion", "reward", "mine", "advantage")
    assert [row[3:7] for row in entry.samples.rows] == [("2", 1.0, 1.0, 0.7), ("3", 0.0, 0.0, -0.7)]
    reader.lines(1, 2, 3)
    assert reader.steps() == [3]
    assert reader.entries[3].samples is not None


def test_a_step_waits_for_its_evaluation_unless_a_later_one_is_there_or_the_run_is_over(tmp_path: Path) -> None:
    """So the values of an evaluation stand at their version, in the same entry."""
    reader = Reader(tmp_path, due=(0, 2, 4))
    reader.lines(1, 2, 3, 4, 5)
    assert reader.steps() == []
    result = {"sums": {"mean_reward": 0.25, "exact_match": None}}
    write(tmp_path / "evals.jsonl", [{"version": 0, "environments": result}])
    assert reader.steps() == [0, 1]
    assert reader.entries[0].values == {"eval/sums/mean_reward": 0.25}
    write(tmp_path / "evals.jsonl", [{"version": version, "environments": result} for version in (0, 4)])
    assert reader.steps() == [2, 3, 4, 5]
    assert "eval/sums/mean_reward" in reader.entries[4].values
    assert "eval/sums/mean_reward" not in reader.entries[2].values
    reader = Reader(tmp_path, due=(6,))
    reader.lines(1, 6)
    assert reader.steps() == [1]
    assert reader.steps(is_over=True) == [6]


def test_a_line_written_again_is_known_and_a_line_trained_again_is_told(tmp_path: Path) -> None:
    """A packer that starts cuts lines off; times and loads of processes differ then, and what was trained does not."""
    reader = Reader(tmp_path)
    reader.lines(1, 2, 3)
    assert reader.steps() == [1, 2, 3]
    reader.lines(1)
    assert reader.steps() == []
    reader.lines(1, 2, 3, time=5.0, seconds_gather=9.0, engine_tokens=7.0)
    assert reader.steps() == []
    write(tmp_path / "metrics.jsonl", [step_line(1), step_line(2, reward_mean=0.9), step_line(3)])
    assert reader.history.read(reader.sent) == 2
    reader.history.restart(2)
    reader.sent = {1: reader.sent[1]}
    assert reader.steps() == [2, 3]
    assert reader.entries[2].values["reward_mean"] == 0.9


def test_samples_in_the_older_file_are_found(tmp_path: Path) -> None:
    """A tracker that was away, or the file's turn between two looks: no table is missing while the run has it."""
    reader = Reader(tmp_path)
    reader.lines(1, 2)
    write(tmp_path / "samples.jsonl", [sample_line(1), sample_line(2), sample_line(3)])
    assert reader.steps() == [1, 2]
    (tmp_path / "samples.jsonl").rename(tmp_path / "samples.older.jsonl")
    write(tmp_path / "samples.jsonl", [sample_line(4)])
    reader.lines(1, 2, 3, 4, 5)
    assert reader.steps() == [3, 4, 5]
    assert [reader.entries[step].samples is not None for step in (3, 4, 5)] == [True, True, False]


def test_a_file_that_is_cut_between_look_and_read_is_noticed(tmp_path: Path) -> None:
    """The process may be stopped there for hours, and lines written meanwhile are all to be read."""
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    write(path, [step_line(step) for step in (1, 2, 3)])
    assert [line["step"] for line in tail.new()] == [1, 2, 3]
    assert not tail.was_cut()
    write(path, [step_line(step, reward_mean=0.123456) for step in (1, 2, 3, 4, 5)])
    assert list(tail.new()) == []
    assert tail.was_cut()


def test_a_text_that_is_no_unicode_is_sent_all_the_same() -> None:
    """Half a pair of UTF-16 in a data set: a tracker that can't write it would never send another step."""
    table = table_of([sample_line(1, prompt="a\ud800b", completions=["2", "\udfff"])])
    assert table is not None
    assert table.rows[1][2:4] == ("a?b", "?")


def test_a_step_that_waits_keeps_no_more_lines_than_allowed(tmp_path: Path, monkeypatch: Any) -> None:
    """However often the files are looked at while an evaluation is awaited."""
    monkeypatch.setattr("actors.trackers.history.MAX_AHEAD", 3)
    reader = Reader(tmp_path, due=(1,))
    reader.lines(*range(1, 30))
    for _ in range(9):
        assert reader.steps() == []
    assert reader.history.newest == 3


def test_a_history_longer_than_the_memory_is_given_out_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    """The files are the buffer."""
    monkeypatch.setattr("actors.trackers.history.MAX_AHEAD", 3)
    reader = Reader(tmp_path)
    reader.lines(*range(1, 9))
    assert [reader.steps() for _ in range(3)] == [[1, 2, 3], [4, 5, 6], [7, 8]]


@pytest.mark.parametrize(("names", "expected"), [("trl", "reward"), ("prime-rl", "reward/all/mean"), ("areal", None)])
def test_metrics_have_the_names_that_are_configured(tmp_path: Path, names: str, expected: str | None) -> None:
    """As `telemetry.names` says."""
    reader = Reader(tmp_path, names=names)
    reader.lines(1)
    reader.steps()
    assert reader.entries[1].values[expected or "ppo_actor/task_reward/avg"] == 0.1


def test_a_trajectory_is_shown_with_its_conversation() -> None:
    """As JSON, with its turns; texts are cut to a length that trackers take."""
    messages = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "x" * 50_000}]]
    table = table_of([sample_line(1, messages=messages, turns=[1, 2], tool_calls=[0, 3], prompt=[{"role": "user"}])])
    assert table is not None
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert first["completion"] == '[{"role": "user", "content": "hi"}]'
    assert (second["turns"], second["tool_calls"], len(second["completion"])) == (2, 3, 20_000)
    assert table_of([]) is None


def test_a_digest_is_of_what_was_trained() -> None:
    """Equal for the same step recorded twice, different for other rewards or weights."""
    assert digest_of(step_line(1)) == digest_of(step_line(1, time=0.0, seconds_publish=3.0, reward_groups=1.0))
    assert len({digest_of(step_line(1, **values)) for values in ({}, {"reward_mean": 0.0}, {"weights": "b"})}) == 3
