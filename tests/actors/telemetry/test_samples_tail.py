"""Lines of samples.jsonl are told once and none is left out, while the file is cut, written again and renamed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry import samples_tail
from actors.telemetry.reporter import OLDER_SAMPLES, SAMPLES, Reporter
from actors.telemetry.samples_tail import SamplesTail
from tests.actors.packer.test_record import scored

LINE_BYTES = 400
"""About the bytes of a line, so that a file of these tests has about ten of them."""


def record(reporter: Reporter, step: int, ordinal: int, purpose: str = "train") -> None:
    """Append a group."""
    reporter.report_samples(
        step, scored([0.0, 1.0], [-1, 1]).model_copy(update={"ordinal": ordinal, "purpose": purpose})
    )


def ordinals(tail: SamplesTail) -> list[int]:
    """Ordinals of the groups told by a look."""
    return [line["ordinal"] for line in tail.new()]


def in_files(output: Path) -> list[int]:
    """Ordinals in the files, the older file first."""
    texts = [(output / name).read_text() for name in (OLDER_SAMPLES, SAMPLES) if (output / name).exists()]
    return [json.loads(line)["ordinal"] for text in texts for line in text.splitlines()]


@pytest.mark.parametrize("looks", [10, 100, 1500])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_line_is_told_once_whatever_happens_to_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int, seed: int
) -> None:
    """Appends of up to 8 lines, cuts by a start of the packer, the same lines or others again, and new files."""
    monkeypatch.setattr("actors.telemetry.reporter.MAX_SAMPLES_BYTES", 10 * LINE_BYTES)
    choice, reporter, tail = random.Random(seed), Reporter(tmp_path), SamplesTail(tmp_path)
    step = ordinal = 0
    of_step: dict[int, int] = {}
    """Ordinal of each step ever written, by which a step that is trained again has the same line."""
    told: set[int] = set()
    for _ in range(looks):
        if choice.random() < 0.2:
            step = choice.randint(max(0, step - 6), step)
            Reporter(tmp_path).begin(step, [], lambda line: None)
            if choice.random() < 0.5:  # the steps get other lines
                of_step = {n: number for n, number in of_step.items() if n <= step}
        # none at times, so that the look comes between a cut and the next line
        for _ in range(choice.choice([0, 0, 1, 3, 8])):
            step += 1
            if step not in of_step:
                ordinal += 1
                of_step[step] = ordinal
            record(reporter, step, of_step[step])
        new = ordinals(tail)
        assert not told & set(new), "told twice"
        told |= set(new)
        assert told >= set(in_files(tmp_path)), "left out"
    assert len(told) == ordinal > looks / 2


def test_the_reader_starts_behind_the_lines_that_are_there(tmp_path: Path) -> None:
    """Also behind half a line, which is told once it is whole."""
    reporter = Reporter(tmp_path)
    record(reporter, 1, 1)
    whole = (tmp_path / SAMPLES).read_bytes()
    half = whole.replace(b'"ordinal": 1', b'"ordinal": 2')
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(half[:100])
    tail = SamplesTail(tmp_path)
    assert ordinals(tail) == []
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(half[100:])
    assert ordinals(tail) == [2]
    assert ordinals(tail) == []


def test_a_run_that_is_not_there_yet_is_read_from_its_first_line(tmp_path: Path) -> None:
    """The folder comes later than the reader."""
    tail = SamplesTail(tmp_path / "run")
    assert ordinals(tail) == []
    record(Reporter(tmp_path / "run"), 1, 1)
    assert ordinals(tail) == [1]


def test_two_files_that_came_between_two_looks_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was open, the one behind it, which is the older one by now, and the newest."""
    reporter = Reporter(tmp_path)
    record(reporter, 1, 1)
    tail = SamplesTail(tmp_path)
    monkeypatch.setattr("actors.telemetry.reporter.MAX_SAMPLES_BYTES", 1)
    for number in (2, 3, 4):
        record(reporter, number, number)
    # each line made a file of its own; that of 2 is gone with its name, and was never seen
    assert ordinals(tail) == [3, 4]
    record(reporter, 5, 5)
    assert ordinals(tail) == [5]


def test_an_evaluation_that_a_cut_moves_is_not_told_again(tmp_path: Path) -> None:
    """The evaluation of version 1 ended while step 3 was trained; a start goes back to step 1 and keeps it."""
    reporter, tail = Reporter(tmp_path), SamplesTail(tmp_path)
    for step, ordinal, purpose in [(1, 1, "train"), (2, 2, "train"), (3, 3, "train"), (1, 4, "eval"), (4, 5, "train")]:
        record(reporter, step, ordinal, purpose)
    assert ordinals(tail) == [1, 2, 3, 4, 5]
    Reporter(tmp_path).begin(1, [1], lambda line: None)
    assert in_files(tmp_path) == [1, 4]
    record(reporter, 2, 6)
    assert ordinals(tail) == [6]


def test_a_cut_behind_all_that_is_remembered_goes_on_with_the_next_lines(tmp_path: Path, monkeypatch: Any) -> None:
    """Lines are not told twice, even if some of the cut are never told."""
    monkeypatch.setattr(samples_tail, "REMEMBERED", 3)
    reporter, tail = Reporter(tmp_path), SamplesTail(tmp_path)
    for number in range(1, 9):
        record(reporter, number, number)
    assert ordinals(tail) == list(range(1, 9))
    Reporter(tmp_path).begin(2, [], lambda line: None)
    assert ordinals(tail) == []
    record(reporter, 3, 30)
    assert ordinals(tail) == [30]
