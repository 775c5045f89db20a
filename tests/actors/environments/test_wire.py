"""Messages between rollout actors and workers, and what workers print."""

import time
from typing import Any

import msgpack
import numpy as np
import pytest

from actors.environments.output import LINE_BYTES, PrintedLines
from actors.environments.worker import wire


def test_numbers_of_numpy_travel_as_numbers() -> None:
    """Environments compute with them; sets become lists."""
    message = {"kind": "answer", "a": np.float32(0.5), "b": np.int64(3), "c": {1}, "d": np.bool_(True)}
    assert wire.unpack(wire.pack(message)) == {"kind": "answer", "a": 0.5, "b": 3, "c": [1], "d": True}


def test_half_a_surrogate_pair_travels_as_its_escape() -> None:
    """Python's texts may have one, UTF-8 has none."""
    assert wire.unpack(wire.pack({"kind": "answer", "text": "a\ud800b"}))["text"] == "a\\ud800b"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (msgpack.packb([1]), "a map with the key kind"),
        (msgpack.packb({"call": 1}), "a map with the key kind"),
        (msgpack.packb({"kind": 1}), "a map with the key kind"),
        (b"\xc1", "^$"),
        (b"", "incomplete"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, words: str) -> None:
    """As a ValueError, whatever msgpack raises."""
    with pytest.raises(ValueError, match=words):
        wire.unpack(data)


def test_a_message_beyond_the_limit_is_refused_at_both_ends() -> None:
    """The sender is told the sizes."""
    with pytest.raises(wire.TooLargeError, match="exceeds the limit of 16777216 bytes"):
        wire.pack({"kind": "answer", "text": "x" * wire.MESSAGE_BYTES})
    with pytest.raises(wire.TooLargeError, match="exceeds the limit"):
        wire.unpack(b"x" * (wire.MESSAGE_BYTES + 1))


def test_an_object_is_named() -> None:
    """A class of the user's in a turn's messages, say."""

    class Thing:
        pass

    with pytest.raises(TypeError, match="Thing is neither text, number, list nor map"):
        wire.pack({"kind": "answer", "thing": Thing()})


def test_lines_are_whole_and_the_last_may_have_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may come in parts; bytes that are no text are shown."""
    lines = PrintedLines()
    assert lines.add(b"one\ntw") == ["one"]
    assert lines.add(b"o\n\xff\n\nthree") == ["two", "\ufffd"]
    assert lines.end() == ["three"]


def test_output_beyond_the_rate_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a pause is shown again, with the count before it; long lines are cut."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = PrintedLines(bytes_per_second=10)
    shown: list[Any] = lines.add(b"a" * 60 + b"\n" + b"b" * 60 + b"\n")
    assert shown == ["a" * 60]
    now[0] = 100.0
    assert lines.add(b"c\n") == ["(60 bytes of output were dropped) c"]
    assert lines.add(b"d" * 5000) == []
    assert lines.dropped_bytes == 60 + 5000 - LINE_BYTES
