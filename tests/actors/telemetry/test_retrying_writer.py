"""Writes that fail are tried again, told and counted."""

import pytest
import structlog

from actors.telemetry import retrying_writer
from actors.telemetry.retrying_writer import RetryingWriter
from actors.telemetry.writer import WriteError


class Clock:
    """A monotonic clock that a test sets."""

    now = 100.0

    def monotonic(self):
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """What `RetryingWriter` takes for the time."""
    made = Clock()
    monkeypatch.setattr(retrying_writer, "time", made)
    return made


def full():
    """No room."""
    raise WriteError("/run/metrics.jsonl: No space left on device")


def test_file_that_failed_is_left_alone_for_a_second_and_others_are_not(clock):
    """Tried at 100 and at 101 s, not between; another file is written meanwhile."""
    tried = []
    writes = RetryingWriter(lambda: tried.append(clock.now))
    for clock.now in (100.0, 100.5, 101.0):
        assert not writes.write("metrics.jsonl", full)
        assert writes.write("evals.jsonl", lambda: None)
    assert tried == [100.0, 101.0]
    assert list(writes.problems) == ["metrics.jsonl"]
    clock.now = 102.0
    assert writes.write("metrics.jsonl", lambda: None)
    assert writes.problems == {}


def test_failures_are_told_every_ten_seconds_in_words(clock):
    """40 s without room for two files: told at 100 (the first), 110, 120, 130, with paths, reasons, and what to do."""
    writes = RetryingWriter(lambda: None)
    with structlog.testing.capture_logs() as told:
        for clock.now in range(100, 140):
            writes.write("metrics.jsonl", full)
            writes.write("samples.jsonl", full)
        clock.now = 141
        writes.write("metrics.jsonl", lambda: None)
    assert [line["event"].partition(",")[0] for line in told] == ["can't be written"] * 4 + ["written again"]
    assert told[1]["files"] == ["/run/metrics.jsonl: No space left on device"] * 2
    assert "free space; training goes on" in told[0]["event"]


def test_error_that_is_not_of_the_file_is_not_swallowed(clock):
    """A tracker that can't be reached raises an OSError too; it is none of ours."""
    with pytest.raises(ConnectionError):
        RetryingWriter(lambda: None).write("metrics.jsonl", lambda: (_ for _ in ()).throw(ConnectionError()))
