"""The thread that writes the packer's files: nothing is written twice, nothing waits for a file system that hangs."""

import threading

import pytest

from actors.telemetry import writer as writer_module
from actors.telemetry.writer import WriteError, Writer
from tests.ring.harness import wait_until


@pytest.fixture
def writer(monkeypatch):
    """One that waits for nothing long: for tests in which every write that is waited for hangs."""
    monkeypatch.setattr(writer_module, "PATIENCE_SECONDS", 0.05)
    return Writer()


@pytest.fixture
def hanging():
    """A write that hangs until the event is set, and how often it has been begun."""
    go_on, begun = threading.Event(), []

    def work():
        begun.append(1)
        assert go_on.wait(60.0)

    yield work, go_on, begun
    go_on.set()


def until_written(writer, path, what, work):
    """Ask again until it is written."""

    def done():
        try:
            writer.write(path, what, work)
        except WriteError:
            return False
        return True

    wait_until(done, "it is written")


def test_a_write_that_hangs_is_done_once_however_often_it_is_asked_for(writer, hanging, tmp_path):
    """Each asking fails in words, and the one after its end takes its result."""
    work, go_on, begun = hanging
    for _ in range(5):
        with pytest.raises(WriteError, match=r"a: the file system has not answered for \d+ s"):
            writer.write(tmp_path / "a", "line 1", work)
    go_on.set()
    until_written(writer, tmp_path / "a", "line 1", work)
    assert len(begun) == 1


def test_another_write_of_the_same_file_waits_for_the_one_that_hangs(writer, hanging, tmp_path):
    """The result of what is no longer wanted is dropped, and what is wanted now is written after it."""
    work, go_on, begun = hanging
    written = []
    with pytest.raises(WriteError):
        writer.write(tmp_path / "a", "line 1", work)
    with pytest.raises(WriteError):
        writer.write(tmp_path / "a", "line 2", lambda: written.append(2))
    assert written == []
    go_on.set()
    until_written(writer, tmp_path / "a", "line 2", lambda: written.append(2))
    assert (len(begun), written) == (1, [2])


def test_a_write_is_not_taken_for_done_when_the_one_before_it_ends(writer, hanging, tmp_path, monkeypatch):
    """The one that hangs ends just while the next one of the file is waited for: that one is written then."""
    work, go_on, _ = hanging
    written = []
    with pytest.raises(WriteError):
        writer.write(tmp_path / "a", "line 1", work)
    monkeypatch.setattr(writer_module, "PATIENCE_SECONDS", 60.0)
    threading.Timer(0.05, go_on.set).start()
    writer.write(tmp_path / "a", "line 2", lambda: written.append(2))
    assert written == [2]


def test_an_error_of_the_write_is_raised_where_it_was_asked_for(tmp_path):
    """That of the operating system names the file; any other one is raised as it is."""
    writer = Writer()

    def full():
        raise OSError(28, "No space left on device")

    def wrong():
        raise KeyError("step")

    with pytest.raises(WriteError, match=r"a: No space left on device"):
        writer.write(tmp_path / "a", "x", full)
    with pytest.raises(KeyError):
        writer.write(tmp_path / "a", "x", wrong)
