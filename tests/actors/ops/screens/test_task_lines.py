"""Progress of a command: a bar on a terminal, lines elsewhere."""

import io
import signal
import time

import pytest

from actors.ops.screens.task_lines import Bars, TextLines
from actors.process.tasks import Task


def made(age: float, total: float = 4.0) -> Task:
    """A task of this age in seconds."""
    task = Task("read data.jsonl", total, "rows", None)
    task._started = time.monotonic() - age
    return task


def test_a_terminal_has_a_bar_that_goes_with_its_task() -> None:
    """With name and amount; short work has none."""
    stream, short, long = io.StringIO(), made(0.1), made(5.0)
    bars = Bars(stream)
    bars.told(short)
    bars.ended(short)
    assert stream.getvalue() == ""
    long.done = 1.0
    bars.told(long)
    assert "read data.jsonl:  25%" in stream.getvalue()
    assert "1/4" in stream.getvalue()
    bars.ended(long)
    assert stream.getvalue().endswith("\r")


def test_a_bar_of_another_task_takes_the_place_of_the_one_before() -> None:
    """One bar at a time is on the screen."""
    stream, first, second = io.StringIO(), made(5.0), made(5.0, total=8.0)
    bars = Bars(stream)
    bars.told(first)
    bars.told(second)
    bars.ended(first)  # it is not shown any more
    second.done = 2.0
    bars.told(second)
    assert "2/8" in stream.getvalue().rpartition("\r")[2]


def test_a_pipe_has_lines_at_intervals() -> None:
    """The first after 10 s."""
    stream, task = io.StringIO(), made(5.0)
    lines = TextLines(stream)
    lines.told(task)
    assert stream.getvalue() == ""
    task._started, task.done = time.monotonic() - 12.0, 3.0
    lines.told(task)
    lines.told(task)
    assert stream.getvalue() == "read data.jsonl: 3 of 4 rows, about 4 s left\n"


def test_a_stream_that_is_gone_ends_no_work() -> None:
    """A closed pipe, or a full disk."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    task = made(12.0)
    TextLines(Gone()).told(task)
    bars = Bars(Gone())
    bars.told(task)
    bars.ended(task)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_ctrl_c_in_the_middle_of_a_bar_waits_for_the_bar(after: int) -> None:
    """At its first, second or third write: the interrupt comes once the bar is whole, and the bar then goes."""

    class Pressed(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes == after:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    stream, task = Pressed(), made(5.0)
    bars = Bars(stream)
    handler = signal.getsignal(signal.SIGINT)

    def work() -> None:
        for done in (1.0, 2.0, 3.0):
            task.done = done
            bars.told(task)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert "read data.jsonl:" in stream.getvalue().rpartition("\r")[2]
    bars.ended(task)
    assert stream.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""
    assert stream.getvalue().endswith("\r")
    assert signal.getsignal(signal.SIGINT) is handler
