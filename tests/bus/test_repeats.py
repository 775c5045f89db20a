"""Heartbeats that repeat the one before are told by their bytes, and are the message that decoding would give."""

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from bus import codec
from bus.control import repeats
from bus.control.repeats import KEPT_BYTES, Repeated, Repeats
from schemas import limits
from schemas.errors import DecodeError
from schemas.messages import HEARTBEAT_KINDS, Heartbeat, Message, RolloutHeartbeat
from tests.schemas.messages.examples import EXAMPLES

ME = b"rollout-0/b0"
KINDS = [kind.kind for kind in HEARTBEAT_KINDS]
NUMBERS = (0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1)
"""The smallest and largest number of each length that msgpack has for one."""


def example(kind: str = "rollout_heartbeat", **changes: Any) -> Heartbeat:
    """The example of a kind, with changes."""
    message = EXAMPLES[kind].model_copy(update=changes)
    assert isinstance(message, Heartbeat)
    return message


def frames_of(message: Heartbeat) -> list[zmq.Frame]:
    """Frames as they are received."""
    return [zmq.Frame(bytes(frame)) for frame in codec.encode(message)]


def whole(decoded: Message | Repeated) -> Message:
    """The message, also of a heartbeat at rest that has come again."""
    return decoded.message if isinstance(decoded, Repeated) else decoded


def outcome(decode: Callable[[], Message | Repeated]) -> Any:
    """What decoding gives: all values with their types, or the reason of the refusal."""
    try:
        message = whole(decode())
    except DecodeError as error:
        return error.reason, str(error)
    values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in message}
    return type(message), {name: (type(value), value) for name, value in values.items()}


def assert_decoded_alike(known: Heartbeat, frames: Sequence[zmq.Frame]) -> None:
    """Frames behind a known heartbeat must have the same outcome as with the codec alone."""
    decoder = Repeats()
    decoder.decode(ME, frames_of(known))
    expected = outcome(lambda: codec.decode(frames, limits.CONTROL_HEADER_BYTES))
    assert outcome(lambda: decoder.decode(ME, frames)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_heartbeat_is_not_decoded_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is equal to the decoded message, with its own number, whichever length that has."""
    decoder = Repeats()
    decoder.decode(ME, frames_of(example(kind, sequence=5)))
    sent = {number: frames_of(example(kind, sequence=number)) for number in NUMBERS}
    expected = {number: codec.decode(frames) for number, frames in sent.items()}
    monkeypatch.setattr(codec, "decode", lambda *arguments: pytest.fail("decoded again"))
    for number, frames in sent.items():
        message = whole(decoder.decode(ME, frames))
        assert isinstance(message, Heartbeat)
        assert message.sequence == number
        assert message.equals(expected[number])
        assert message.repeats(message.numbered(3)) == expected[number].repeats(expected[number])  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_heartbeat_at_rest_is_told_by_its_number_alone(kind: str) -> None:
    """Of kinds whose repetitions nobody waits for, and without work: whoever has work is looked at each time."""
    message = example(kind, sequence=5)
    nothing = {name: value[:0] for name, value in message.arrays().items()}
    for changes in ({}, nothing):
        decoder, sent = Repeats(), example(kind, sequence=5, **changes)
        decoder.decode(ME, frames_of(sent))
        again = decoder.decode(ME, frames_of(sent.numbered(6)))
        has_work = any(value.size for value in sent.arrays().values())
        assert isinstance(again, Repeated) == (message.quiet and not has_work)
        assert whole(again).equals(sent.numbered(6))
    assert message.quiet == (kind in {"rollout_heartbeat", "reward_heartbeat", "inference_heartbeat"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_is_seen_wherever_it_is(kind: str) -> None:
    """Also hostile frames are refused for the same reason as before."""
    known = example(kind, sequence=300)
    data = bytes(codec.encode(known)[0])
    for place in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            changed = data[:place] + bytes([data[place] ^ change]) + data[place + 1 :]
            assert_decoded_alike(known, [zmq.Frame(changed)])


@pytest.mark.parametrize("cut", [1, 8, 60])
def test_a_frame_with_less_or_more_bytes_is_no_repeat(cut: int) -> None:
    """Nor are two frames one."""
    known = example(sequence=300)
    data = bytes(codec.encode(known)[0])
    for frames in ([data[:-cut]], [data + bytes(cut)], [data[:cut]], [data, b""], [data[:cut], data[cut:]], []):
        assert_decoded_alike(known, [zmq.Frame(frame) for frame in frames])


def test_a_name_that_looks_like_the_field_of_the_number_is_none() -> None:
    """The place of the number follows from the bytes in front of it, not from a search."""
    for name in ("èsequence", "èsequenceÍ\x01,", "sequence"):
        known = example(name=name, sequence=300)
        for other in (example(name=name, sequence=301), example(name=name + "!", sequence=301)):
            assert_decoded_alike(known, frames_of(other))


def test_the_last_of_two_numbers_counts() -> None:
    """A frame may name a field twice, and then it is decoded each time."""
    message = example(sequence=300)
    kind, version, header = msgpack.unpackb(bytes(codec.encode(message)[0]))
    del header["metrics_url"]
    packer = msgpack.Packer()

    def frame(first: int, second: int) -> list[zmq.Frame]:
        pairs = [part for name, value in header.items() if name != "sequence" for part in (name, value)]
        fields = [*pairs[:6], "sequence", first, *pairs[6:], "sequence", second]
        start = b"\x93" + packer.pack(kind) + packer.pack(version) + packer.pack_map_header(len(fields) // 2)
        return [zmq.Frame(start + b"".join(packer.pack(part) for part in fields))]

    decoder = Repeats()
    for numbers in ((7, 7), (8, 7), (9, 7)):
        decoded = whole(decoder.decode(ME, frame(*numbers)))
        assert isinstance(decoded, Heartbeat)
        assert decoded.sequence == 7


def test_each_peer_repeats_itself_alone() -> None:
    """Equal bytes of another process are another message; and so is what a peer says after something else."""
    decoder, message = Repeats(), example(sequence=1)
    first = whole(decoder.decode(ME, frames_of(message)))
    other = whole(decoder.decode(b"rollout-1/b1", frames_of(message)))
    again = whole(decoder.decode(ME, frames_of(message.numbered(2))))
    changed = whole(decoder.decode(ME, frames_of(example(sequence=3, free_slots=77))))
    back = whole(decoder.decode(ME, frames_of(message.numbered(4))))
    for one in (first, other, again, changed, back):
        assert isinstance(one, RolloutHeartbeat)
    assert [m.sequence for m in (first, other, again, changed, back)] == [1, 1, 2, 3, 4]  # type: ignore[attr-defined]
    assert again.holds is first.holds is not other.holds  # type: ignore[attr-defined]
    assert changed.free_slots == 77  # type: ignore[attr-defined]
    assert back.holds is not first.holds  # type: ignore[attr-defined]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of peers, and by the size of what is kept of each; the rest is decoded as before."""
    monkeypatch.setattr(repeats, "MAX_REMEMBERED", 10)
    decoder = Repeats()
    for peer in range(25):
        decoder.decode(b"rollout-%d/b" % peer, frames_of(example(sequence=1)))
    assert len(decoder) == 10
    decoder.forget(b"rollout-24/b")
    assert len(decoder) == 9
    large = example(sequence=1, metrics_url="", holds=np.arange(2 * KEPT_BYTES).reshape(-1, 2))
    text = example(sequence=1, failures=[failure for failure in _failures() for _ in range(20)])
    for message in (large, text):
        for number in (1, 2):
            decoded = whole(decoder.decode(ME, frames_of(message.numbered(number))))
            assert decoded.equals(message.numbered(number))
        assert len(decoder) == 9


def _failures() -> list[Any]:
    failures = [failure.model_copy(update={"detail": "x" * 300}) for failure in EXAMPLES["rollout_heartbeat"].failures]  # type: ignore[attr-defined]
    assert failures
    return failures
