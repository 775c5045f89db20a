"""Long work of a process: its words, its times, and who is told of it."""

import time
from collections.abc import Iterator

import pytest
import structlog

from actors.process import tasks
from actors.process.library_bars import bars_for
from actors.process.membership import Membership
from actors.process.tasks import LogTeller, Task, reported, task, task_words
from schemas.messages import ObserverHeartbeat
from tests.actors.process.test_membership import Packer, peers  # noqa: F401 - a fixture
from tests.ring.harness import wait_until


class Recorder:
    """Teller that keeps what it is told."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.ends: list[str] = []

    def told(self, task: Task) -> None:
        """Keep the words."""
        self.words.append(task.words)

    def ended(self, task: Task) -> None:
        """Keep the name."""
        self.ends.append(task.name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A teller that is told at each step of the work."""
    made = Recorder()
    monkeypatch.setattr(tasks, "TELL_SECONDS", 0.0)
    tasks.tell_by(made)
    yield made
    tasks.tell_by(None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("load model", 30, 120, "tensors", 10.0), "load model: 30 of 120 tensors, about 30 s left"),
        (("read data", 2e9, 8e9, "bytes", 60.0), "read data: 2.0 of 8.0 GB, about 3 min left"),
        (("read data", 500, 900, "bytes", 4.0), "read data: 500 of 900 bytes, about 3 s left"),
        (("read data", 0, 8e9, "bytes", 60.0), "read data: 0.0 of 8.0 GB"),
        (("read data", 9e9, 8e9, "bytes", 60.0), "read data: 8.0 of 8.0 GB"),
        (("convert data", 3e6, 0, "bytes", 60.0), "convert data: 3.0 MB, for 60 s"),
        (("start vLLM", 0, 0, "", 300.0), "start vLLM: for 5 min"),
    ],
)
def test_words_of_a_task_have_the_amount_and_the_time_left(
    values: tuple[str, float, float, str, float], words: str
) -> None:
    """The time left follows from the mean pace; without a total there is the time so far."""
    assert task_words(*values) == words


def test_a_teller_hears_of_each_step_and_of_the_end_of_failed_work(recorder: Recorder) -> None:
    """A task ends with its block, well or not."""

    def read() -> None:
        with task("read data", 2, "rows") as reading:
            reading.advance()
            raise ValueError("no JSON")

    with pytest.raises(ValueError, match="no JSON"):
        read()
    assert recorder.words[0].startswith("read data: 1 of 2 rows")
    assert recorder.ends == ["read data"]
    assert reported() is None


def test_the_innermost_task_is_reported_and_measured(recorder: Recorder) -> None:
    """Work within work is what an actor does now."""
    with task("start engine"), task("write checkpoint", 10, "bytes", lambda: 4):
        found = reported()
        assert found is not None
        assert (found.name, found.done, found.total, found.unit) == ("write checkpoint", 4, 10, "bytes")
        assert abs(found.since - time.time()) < 60
    assert reported() is None


def test_a_measure_that_fails_keeps_the_last_amount() -> None:
    """A file may be replaced while it is measured."""

    def measure() -> float:
        raise FileNotFoundError("replaced")

    with task("convert data", 10, "bytes", measure) as converting:
        converting.done = 3
        found = reported()
    assert found is not None
    assert found.done == 3


def test_a_log_has_lines_at_intervals_and_the_end_of_long_work() -> None:
    """Short work says nothing."""
    made = LogTeller()
    with structlog.testing.capture_logs() as lines, task("read data", 4, "rows") as reading:
        made.told(reading)
        assert lines == []
        for age, count in ((11.0, 1), (12.0, 1), (42.0, 2)):
            reading._started = time.monotonic() - age
            reading.done = 1
            made.told(reading)
            assert len(lines) == count
        made.ended(reading)
    assert [line["event"] for line in lines] == ["under way", "under way", "ended"]
    assert lines[0]["task"] == "read data: 1 of 4 rows, about 33 s left"


def test_bars_of_a_library_tell_the_task(recorder: Recorder) -> None:
    """Bars of one unit are added up; another unit is the next part of the work."""
    with task("load model") as loading:
        bars = bars_for(loading)
        with bars(total=100, unit="B", desc="first") as first, bars(total=50, unit="B", desc="second") as second:
            first.update(60)
            second.update(50)
            assert (loading.done, loading.total, loading.unit) == (110, 150, "bytes")
        assert list(bars(["a", "b", "c"], desc="Loading weights", unit="tensors")) == ["a", "b", "c"]
        assert (loading.done, loading.total, loading.unit) == (3, 3, "tensors")
    assert "load model: 2 of 3 tensors, about 0 s left" in recorder.words


@pytest.mark.parametrize("peers", [30.0], indirect=True)
def test_heartbeats_carry_the_task_under_way(peers: tuple[Membership, Packer]) -> None:  # noqa: F811 - the fixture
    """And no task once it has ended."""
    _, packer = peers
    with task("load model", 4, "tensors") as loading:
        loading.advance(3)
        wait_until(lambda: packer.heartbeats[-1].task is not None, "a heartbeat with the task")
        found = packer.heartbeats[-1].task
        assert found is not None
        assert (found.name, found.done, found.total) == ("load model", 3, 4)
    wait_until(lambda: packer.heartbeats[-1].task is None, "a heartbeat without a task")


def test_progress_of_a_task_wakes_no_packer() -> None:
    """A heartbeat that only tells of more progress says nothing new."""
    assert "task" in ObserverHeartbeat.counters
