"""Log lines carry who wrote them."""

import contextlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import structlog

from actors.process import exits
from actors.telemetry import logs
from schemas.config.services import TelemetryConfig


@pytest.fixture
def stream(monkeypatch):
    """Where the lines go; structlog is as before afterwards."""
    monkeypatch.setattr(logs, "_FIELDS", {})
    buffer = io.StringIO()
    yield buffer
    structlog.reset_defaults()


def test_lines_are_json_where_there_is_no_terminal_with_fields_of_the_process(stream):
    """Actor and name stand in every line, also in those of other threads."""
    logs.configure_logs(TelemetryConfig(), stream)
    logs.bind_everywhere(actor="rollout", name="rollout-3")
    thread = threading.Thread(target=lambda: structlog.get_logger("x").warning("engine failed", ordinal=7))
    thread.start()
    thread.join()
    line = json.loads(stream.getvalue())
    assert line.pop("timestamp")
    assert line == {"actor": "rollout", "name": "rollout-3", "event": "engine failed", "level": "warning", "ordinal": 7}


def test_lines_below_the_level_are_left_out(stream):
    """telemetry.log_level warning: no info."""
    logs.configure_logs(TelemetryConfig(log_level="warning"), stream)
    structlog.get_logger("x").info("step trained")
    structlog.get_logger("x").error("gave up")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["gave up"]


def test_a_pipe_that_nobody_reads_holds_no_thread_up_and_loses_no_line_that_has_room(monkeypatch):
    """More than a pipe takes is said at once; read later, all lines are there in their order."""
    monkeypatch.setattr(logs, "PATIENCE_SECONDS", 0.05)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        lines = logs.Lines(stream)
        for number in range(500):
            lines.write(f"{number} {'x' * 1000}")
        assert [reader.readline().split()[0] for _ in range(500)] == [str(number) for number in range(500)]


def test_lines_that_find_no_room_are_counted(monkeypatch):
    """What waits for a reader is bounded; how many lines were lost is said with the next one."""
    monkeypatch.setattr(logs, "MAX_WAITING", 3)
    monkeypatch.setattr(logs, "PATIENCE_SECONDS", 0.05)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        lines = logs.Lines(stream)
        lines.write("x" * (1 << 20))
        for number in range(10):
            lines.write(str(number))
        reader.readline()
        assert [reader.readline().strip() for _ in range(3)] == ["8 log lines lost: nothing reads the output", "0", "1"]


class Stream(io.StringIO):
    """Has no memory for one line, and for the next ones it has."""

    full = True

    def write(self, text):
        """Write, but for the first line."""
        if self.full:
            self.full = False
            raise MemoryError
        return super().write(text)


def test_the_end_of_the_thread_that_writes_is_written_by_another_one(monkeypatch, stream):
    """Else the process would end without a word of why."""
    codes, ended = [], threading.Event()
    monkeypatch.setattr(exits, "leave", lambda code: (codes.append(code), ended.set()))
    monkeypatch.setattr(threading, "excepthook", exits.end_with_thread)
    full = Stream()
    logs.configure_logs(TelemetryConfig(), full)
    structlog.get_logger("x").warning("lost")
    assert ended.wait(60.0)
    [said] = [json.loads(line) for line in full.getvalue().splitlines()]
    assert (said["event"], said["thread"], codes) == ("thread failed", "log", [exits.EXIT_ERROR])
    structlog.get_logger("x").warning("afterwards")
    assert json.loads(full.getvalue().splitlines()[-1])["event"] == "afterwards"


def test_a_stream_that_can_not_be_written_ends_nothing():
    """A full disk, or a stream that has been closed."""
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:
        lines = logs.Lines(full)
        lines.write("lost")
        lines.write("lost too")
    lines.write("after its end")


SLOW = """
import sys, time
import structlog
from actors.process import exits
from actors.telemetry import logs
from schemas.config.services import TelemetryConfig

class Slow:
    def write(self, text):
        time.sleep(0.3)
        sys.stderr.write(text)
    def isatty(self): return False
    def flush(self): sys.stderr.flush()

logs.PATIENCE_SECONDS, logs.FLUSH_SECONDS, exits.FLUSH_SECONDS = 0.0, 60.0, 60.0
logs.configure_logs(TelemetryConfig(), Slow())
structlog.get_logger("x").error("last words")
exits.before_leave = logs.flush
if sys.argv[1] == "leave":
    exits.leave(3)
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leave", "return"])
def test_the_last_line_is_written_before_the_process_ends(how):
    """The thread that writes gets to it late, as on a busy machine; the process waits for it, however it ends."""
    done = subprocess.run([sys.executable, "-c", SLOW, how], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 3
    assert json.loads(done.stderr)["event"] == "last words"


def test_lines_of_a_forked_child_are_written(tmp_path):
    """User code forks: the child has something to say, and no thread of its parent's."""
    with (tmp_path / "log").open("w") as stream:
        lines = logs.Lines(stream)
        lines.write("parent")
        child = multiprocessing.get_context("fork").Process(target=lines.write, args=("child",), daemon=True)
        child.start()
        child.join(60.0)
        assert child.exitcode == 0
        lines.write("parent again")
    assert (tmp_path / "log").read_text().splitlines() == ["parent", "child", "parent again"]
