"""What a person sees of real commands on a terminal of 80 and 200 columns, and in a file."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.config import dump_config
from tests.marks import first_of
from tests.ring.harness import PATIENCE_SECONDS, ring_config
from tests.terminal import Seen, on_terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ACTORS = (sys.executable, "-m", "actors")
ROOT = Path(__file__).parents[2]
WIDTHS = (80, 200)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Characters that steer a terminal, but for the end of a line."""


def run_file(folder: Path, **sections: Any) -> str:
    """Path of a run with the fake engine."""
    path = folder / "run.yaml"
    path.write_text(dump_config(ring_config(folder, **sections)))
    return str(path)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path leaves room in a line of 80 columns."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def rows_file(folder: Path, number: int) -> Path:
    """A data set."""
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for index in range(number):
            file.write(f'{{"prompt": "question {index}", "answer": "{index}"}}\n')
    return path


def check_of(folder: Path, number: int = 300_000) -> list[str]:
    """A command that reads a large data set, for some seconds."""
    rows = {"type": "jsonl", "path": str(rows_file(folder, number))}
    config = run_file(
        folder, environments=[rows], reward={"functions": [{"path": "exact_match"}]}, eval={"num_prompts": 0}
    )
    return [*ACTORS, "check", config]


@pytest.mark.parametrize("columns", first_of(WIDTHS))
def test_a_run_is_a_screen_in_place_that_ends_with_its_result(folder: Path, columns: int) -> None:
    """While it runs there is one screen; at the end there is one, and what the run has come to below it."""
    config = run_file(folder, inference={"engine": {"type": "fake", "token_seconds": 0.02}}, trainer={"max_steps": 6})
    seen = on_terminal([*ACTORS, "up", config], columns, folder=ROOT, seconds=PATIENCE_SECONDS)
    assert seen.code == 0, seen.lines
    for picture in seen.pictures:
        assert sum(line.startswith("policy ") for line in picture) <= 1, picture
    running = [picture for picture in seen.pictures if any(line.startswith("sampling ") for line in picture)]
    assert running
    told = {line.split()[0]: line for line in running[-1] if line}
    for stage in ("sampling", "scoring", "scored", "packed", "batches"):
        assert re.search(r"\d of \d.*[#.]{20}  (groups|batches)\b.*[a-z]{2}$", told[stage]), told[stage]
    assert any(re.search(r" step \d/6 .*about \d+ s left", line) for line in seen.ever)
    assert [line for line in seen.ever if line.startswith("trouble")] == []
    assert [line.split()[0] for line in seen.lines if line][:3] == ["run", "ring", "policy"]
    assert any(line.startswith("done: 6 steps in ") for line in seen.lines)


@pytest.mark.parametrize("columns", first_of(WIDTHS))
def test_reading_a_large_data_set_has_a_bar_that_is_gone_at_the_end(tmp_path: Path, columns: int) -> None:
    """As wide as the terminal, with the share, the amount and the time left."""
    seen = on_terminal(check_of(tmp_path), columns, folder=ROOT, seconds=PATIENCE_SECONDS)
    assert seen.code == 0, seen.lines
    bars = [line for line in seen.ever if line.startswith("read rows.jsonl: ")]
    assert any(re.search(r"\d+%\|.*\| [\d.]+M/[\d.]+M \[\d\d:\d\d<\d\d:\d\d, .*B/s\]$", line) for line in bars), bars
    assert max(map(len, bars)) in (columns - 1, columns)
    assert not [line for line in seen.lines if "%|" in line]


def test_ctrl_c_ends_a_command_with_a_word_and_no_traceback(tmp_path: Path) -> None:
    """In the middle of the bar, which is gone then."""
    asked: list[int] = []

    def interrupt(seen: Seen, pid: int) -> None:
        if not asked and any("%|" in line for line in seen.pictures[-1]):
            asked.append(pid)
            os.kill(pid, signal.SIGINT)

    # far more than is read until the bar is seen, also by a test that gets little of the machine
    command = check_of(tmp_path, 3_000_000)
    seen = on_terminal(command, 80, folder=ROOT, act=interrupt, seconds=PATIENCE_SECONDS)
    assert asked
    assert (seen.code, [line for line in seen.lines if line][-1]) == (128 + signal.SIGINT, "interrupted")
    assert not [line for line in seen.lines if "Traceback" in line or "%|" in line]


def test_a_file_has_lines_without_control_characters(tmp_path: Path) -> None:
    """As the journal of a service: of a run, and of a command that reads a large data set."""
    config = run_file(tmp_path, trainer={"max_steps": 3})
    for command in ([*ACTORS, "up", config], check_of(tmp_path / "check")):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        text = done.stdout.decode()
        assert done.returncode == 0, text
        assert text.endswith("\n")
        assert not CONTROL.search(text), text
