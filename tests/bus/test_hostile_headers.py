"""What a header of any content costs whoever receives it: CPU and memory are bounded, and frames are counted."""

import gc
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_origin

import msgpack
import numpy as np
import pytest
import zmq
from pydantic import FailFast

from bus import codec
from bus.control import identity_of
from bus.data import Inbox
from bus.topology import Addresses
from schemas import limits
from schemas.errors import ConfigError, DecodeError, MessageTooLargeError
from schemas.messages import DATA_KINDS, MESSAGE_TYPES, Frozen, ObserverDirective, RolloutGroup, _values_in, single_turn
from tests.bus.conftest import MakeConfig, connect
from tests.marks import first_of, long_but
from tests.schemas.messages.examples import DIRECTIVE_FIELDS, EXAMPLES, decoded, example_frames

pytestmark = pytest.mark.slow

SIZE = 1 << 20
CPU_SECONDS = 0.1
FACTOR = 5
"""Of a slow machine that others use too."""
MEMORY_BYTES = 64 << 20


def _list_of(item: bytes, size: int = SIZE) -> bytes:
    count = (size - 5) // len(item)
    return b"\xdd" + struct.pack(">I", count) + item * count


def _map_of(value: bytes, size: int = SIZE) -> bytes:
    """Keys of four characters, none twice."""
    count = (size - 5) // (5 + len(value))
    return b"\xdf" + struct.pack(">I", count) + b"".join(b"\xa4%04x" % (n & 0xFFFF) + value for n in range(count))


def _spread(item: bytes, items: int) -> bytes:
    """A list of lists that are each as long as a list may be."""
    inner = b"\xdd" + struct.pack(">I", items) + item * items
    return _list_of(inner)


CONTENTS: dict[str, Callable[[], bytes]] = {
    "nil": lambda: _list_of(b"\xc0"),
    "empty maps": lambda: _list_of(b"\x80"),
    "empty lists": lambda: _list_of(b"\x90"),
    "lists of lists": lambda: _list_of(b"\x91\x90"),
    "maps of maps": lambda: _list_of(b"\x81\xa0\x80"),
    "a million small strings": lambda: _list_of(b"\xa0"),
    "strings of two bytes": lambda: _list_of(b"\xa2\xc4\x80"),
    "strings of four bytes": lambda: _list_of(b"\xa4\xf0\x9f\x98\x80"),
    "bytes": lambda: _list_of(b"\xc4\x02ab"),
    "large integers": lambda: _list_of(b"\xcf" + b"\xff" * 8),
    "small integers": lambda: _list_of(b"\xcd\x12\x34"),
    "NaN": lambda: _list_of(b"\xca\x7f\xc0\x00\x00"),
    "extensions": lambda: _list_of(b"\xd4\x05a"),
    "lists as long as may be, of nil": lambda: _spread(b"\xc0", limits.LIST_ITEMS),
    "lists as long as may be, of strings": lambda: _spread(b"\xa2\xc4\x80", limits.LIST_ITEMS),
    "short lists of strings": lambda: _spread(b"\xa2\xc4\x80", 100),
    "short lists of maps": lambda: _spread(b"\x81\xa1a\x80", 20),
    "keys": lambda: _map_of(b"\xc0"),
    "keys as many as may be": lambda: b"\xde\x10\x00" + b"".join(b"\xa4%04x\xc0" % n for n in range(4096)),
    "bytes as keys": lambda: b"\xde\x10\x00" + b"".join(b"\xc4\x05\xff%04x\xc0" % n for n in range(4096)),
    "the same key again": lambda: b"\xdf" + struct.pack(">I", SIZE // 3) + b"\xa1a\xc0" * (SIZE // 3),
    "nested 1 000 deep": lambda: b"\x91" * 1000 + b"\x90",
    "nested 600 deep": lambda: b"\x91" * 600 + b"\x90",
    "nested a million deep": lambda: b"\x91" * (SIZE - 100),
    "lists that announce more than comes": lambda: (b"\xdd" + struct.pack(">I", limits.LIST_ITEMS)) * 1000,
    "a long string": lambda: b"\xdb" + struct.pack(">I", SIZE - 200) + b"x" * (SIZE - 204) + "😀".encode(),
}  # fmt: skip
IN_EVERY_FIELD = (
    "empty maps",
    "lists as long as may be, of nil",
    "keys as many as may be",
    "bytes as keys",
)


def _frames(kind: str, field: str, content: bytes) -> list[bytes]:
    """An example whose field holds this content, in at most 1 MiB of header."""
    frames = example_frames(kind)
    opened = msgpack.unpackb(frames[0])
    opened[2][field] = "@@mark@@"
    header = msgpack.packb(opened).replace(b"\xa8@@mark@@", content)
    return [header[: SIZE + 4096], *frames[1:]]


def _decode(frames: list[bytes]) -> str:
    try:
        decoded(frames)
    except DecodeError as error:
        return error.reason if len(str(error)) < 1000 else "told at length"
    return "good"


def _cost(frames: list[bytes]) -> tuple[float, int, str]:
    """CPU seconds, the most bytes of memory at a time, and the outcome."""
    gc.collect()
    started = time.thread_time()
    outcome = _decode(frames)
    seconds = time.thread_time() - started
    tracemalloc.start()
    try:
        assert _decode(frames) == outcome
        return seconds, tracemalloc.get_traced_memory()[1], outcome
    finally:
        tracemalloc.stop()


def _cases() -> Iterator[tuple[str, str, str]]:
    """Every content in a field of any type and in a list; some in every field of every kind."""
    for content in CONTENTS:
        yield "rollout_heartbeat", "failures", content
        yield "rollout_group", "columns", content
        yield "rollout_heartbeat", "no such field", content
        yield "observer_directive", "progress", content
    for kind, message_type in MESSAGE_TYPES.items():
        for field in sorted(message_type.header_keys):
            for content in IN_EVERY_FIELD:
                yield kind, field, content


@pytest.mark.usefixtures("nothing_else_to_collect")
@pytest.mark.parametrize(
    "kind", long_but(["rollout_heartbeat", "rollout_group", "observer_directive"], sorted(MESSAGE_TYPES))
)
def test_a_header_of_one_mebibyte_costs_little_whatever_is_in_it(kind: str) -> None:
    """Any content in any field of any kind: at most 100 ms of CPU (with a factor) and 64 MiB."""
    made = {name: make() for name, make in CONTENTS.items()}
    for _, field, content in [case for case in _cases() if case[0] == kind]:
        seconds, memory, outcome = _cost(_frames(kind, field, made[content]))
        where = f"{content} in {kind}.{field}: {seconds:.3f} s, {memory >> 20} MiB, {outcome}"
        assert seconds < FACTOR * CPU_SECONDS, where
        assert memory < MEMORY_BYTES, where
        assert outcome != "told at length", where


def test_one_wrong_element_is_told_and_not_each() -> None:
    """The detail names the first wrong element of a list of wrong ones."""
    wrong = _frames("rollout_heartbeat", "failures", msgpack.packb([{}] * 1000))
    with pytest.raises(DecodeError, match=r"failures\.0\.ordinal: Field required"):
        codec.decode(wrong)


def _models() -> set[type[Frozen]]:
    """Message types and the values inside them."""
    found, todo = set[type[Frozen]](), list[type[Frozen]](MESSAGE_TYPES.values())
    while todo:
        model = todo.pop()
        found.add(model)
        todo += [m for field in model.model_fields.values() for m in _values_in(field.annotation) if m not in found]
    return found


def test_validation_of_every_list_ends_at_its_first_wrong_element() -> None:
    """A list declared without it would let a header cost gigabytes: `schemas.messages.base.Listed` is the type."""
    for model in _models():
        for name, field in model.model_fields.items():
            outer = get_origin(field.annotation) is not list or any(isinstance(m, FailFast) for m in field.metadata)
            assert outer, f"{model.__name__}.{name}"


@pytest.mark.parametrize("depth", [100, 400, 505, 508, 511, 600, 1000, 1030])
def test_what_was_received_can_be_sent_on(depth: int) -> None:
    """A group nested deeper than msgpack packs is refused on arrival: it would end the packer, which packs it again."""
    deep = _frames("scored_group", "columns", b"\x81\xa1a" + b"\x91" * depth + b"\x90")
    if _decode(deep) == "good":
        codec.encode(decoded(deep))
    assert depth > 400 or _decode(deep) == "good"
    assert depth < 1030 or _decode(deep) == "malformed"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _flood() -> list[list[bytes]]:
    """Frames that are no message, of the kinds that have cost most."""
    few = 256
    return [
        _frames("rollout_heartbeat", "failures", _list_of(b"\x80", few)),
        _frames("rollout_heartbeat", "failures", _list_of(b"\xc0", few)),
        _frames("reward_heartbeat", "failures", b"\x91" * few),
        _frames("trainer_heartbeat", "reports", b"\x91" * 900 + b"\x90"),
        _frames("inference_heartbeat", "name", _map_of(b"\xc0", few)),
        _frames("rollout_directive", "tickets", _list_of(b"\xa2ab", few)),
        [b"\xdd\xff\xff\xff\xff" * 10],
        [b"x"] * 200,
    ]


@pytest.mark.usefixtures("nothing_else_to_collect")
@pytest.mark.parametrize("num_frames", first_of([16_000, 100_000]))
def test_a_hundred_thousand_hostile_frames_leave_memory_flat_and_are_counted(
    make_config: MakeConfig, num_frames: int
) -> None:
    """Long lists, deep nesting and too many frames, over a socket: each is counted, none stays in memory."""
    flood = _flood()
    rounds = num_frames // len(flood)
    with ExitStack() as stack:
        config = make_config("inproc")
        inbox = Inbox("groups", Addresses(config), config.bus, "reward-0", "b0")
        stack.callback(inbox.close)
        sender: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        connect(sender, inbox.address, config.bus)
        stack.callback(sender.close, 0)
        before = 0
        for number in range(rounds):
            for frames in flood:
                sender.send_multipart([b"evil", *frames])
                assert inbox.receive(0.0) is None
            if number == rounds // 10:
                before = _resident()
        assert inbox.counts.dropped.total() == rounds * len(flood) == num_frames
        assert inbox.counts.num_messages == 0
        assert _resident() - before < 32 << 20


# --- what a sender is told -------------------------------------------------------------------------------------------


def _group(texts: list[str], **fields: Any) -> RolloutGroup:
    count = len(texts)
    return RolloutGroup(
        **dict(EXAMPLES["rollout_group"])
        | {
            "completions": texts,
            "stop_conditions": ["stop"] * count,
            "token_ids": np.zeros(count, np.int32),
            "loss_mask": np.ones(count, np.uint8),
            "logprobs": np.zeros(count, np.float32),
            **single_turn(np.array([5], np.int32), np.arange(count + 1), np.array([[0, 1, 7]])),
            "segment_temperatures": np.ones(1, np.float32),
        }
        | fields
    )


def test_texts_of_a_large_group_travel_beside_the_header() -> None:
    """128 completions of 32 000 tokens of English, 17 MB of text, are taken by a receiver as they were sent."""
    group = _group(["word " * 26_880] * 126 + ["half \ud83d a pair", "✓" * 100_000], prompt="a prompt ✓" * 50_000)
    frames = codec.encode(group)
    assert len(frames[0]) < 10_000
    found = codec.decode([bytes(frame) for frame in frames])
    assert found.equals(group)


def test_groups_that_a_ledger_of_an_older_build_holds_are_read() -> None:
    """They have their texts in the header, no frame of texts, and a frame for each array."""
    group = _group(["one", "two"], prompt="three")
    opened = msgpack.unpackb(bytes(codec.encode(group)[0]))
    opened[2] |= {"completions": ["one", "two"], "prompt": "three"}
    opened[2]["%"] = opened[2]["%"][:2]
    arrays = [array.tobytes() for array in group.arrays().values()]
    assert codec.decode([msgpack.packb(opened), *arrays]).equals(group)


@pytest.mark.parametrize("kind", [kind.kind for kind in DATA_KINDS if issubclass(kind, RolloutGroup)])
def test_a_sender_is_told_what_no_receiver_would_take(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, each frame and the total are held to the receiver's own numbers; the words name part and remedy."""
    monkeypatch.setattr(limits, "DATA_HEADER_BYTES", 21_000)
    monkeypatch.setattr(limits, "DATA_FRAME_BYTES", 50_000)
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 100_000)
    example = EXAMPLES[kind]
    # the frame of texts holds conversations too, where a kind has any
    none = {"transcripts": []} if kind != "step_batch" else {}
    for change, words in (
        ({"columns": {"tests": "x" * 21_000}}, r"bytes in its header .*, and 21000 .*columns"),
        ({"completions": ["x" * 50_001, ""], **none}, r"50001 bytes in one array, and 50000 .*\(texts\).*max_tokens"),
        ({"prompt_ids": np.zeros(12_501, np.int32)}, r"50004 bytes in one array, .*\(prompt_ids\)"),
        ({"prompt_ids": np.zeros(12_400, np.int32), "segments": np.zeros((1230, 5), np.int64),
          "segment_temperatures": np.zeros(1230, np.float32)}, r"bytes, and 100000 are the most that travel"),
    ):  # fmt: skip
        message = example.model_copy(update=change)
        with pytest.raises(MessageTooLargeError, match=words):
            codec.encode(message)
    fits = example.model_copy(update={"columns": {"tests": "x" * 19_000}, "completions": ["x" * 49_999, "y"], **none})
    codec.decode([bytes(frame) for frame in codec.encode(fits)])


def test_a_state_that_no_peer_would_take_is_told_at_the_sender() -> None:
    """The control plane takes 1 MiB of header, and both ends know."""
    directive = ObserverDirective(**DIRECTIVE_FIELDS, progress={"text": "x" * limits.CONTROL_HEADER_BYTES})
    with pytest.raises(MessageTooLargeError, match="a observer_directive has 10"):
        codec.encode(directive)


def test_ledger_and_receivers_take_what_a_sender_may_send() -> None:
    """No bound of a list or a map in a header is below what messages of ours hold."""
    group = _group([""] * 8000, columns={f"column {n}": "x" for n in range(4000)})
    assert codec.decode([bytes(frame) for frame in codec.encode(group)]).equals(group)


def test_lists_that_no_receiver_would_take_are_told_at_the_sender() -> None:
    """A step of more groups than a header's list may have, and a group of more completions, fail in words."""
    batch = EXAMPLES["step_batch"].model_copy(update={"digests": ["d"] * (limits.LIST_ITEMS + 1)})
    with pytest.raises(MessageTooLargeError, match="a step_batch has 8001 digests, and 8000 are the most that travel"):
        codec.encode(batch)
    group = _group([""] * 3, columns={f"column {n}": "x" for n in range(limits.MAP_ITEMS + 1)})
    with pytest.raises(MessageTooLargeError, match="4097 columns, and 4096 are the most"):
        codec.encode(group)


def test_what_one_peer_says_of_itself_can_be_told_to_all() -> None:
    """Addresses and names are bounded, and texts for people are cut: a directive is made of many peers' heartbeats."""
    for kind, field in (
        ("reward_heartbeat", "address"),
        ("inference_heartbeat", "url"),
        ("reward_heartbeat", "metrics_url"),
    ):
        with pytest.raises(DecodeError, match=rf"bad_header: {field}: .* more than 4096 bytes"):
            codec.decode(_frames(kind, field, msgpack.packb("x" * 5000)))
    for kind, field, most in (("inference_heartbeat", "error", 1000), ("trainer_heartbeat", "failure", 4000)):
        told = codec.decode(_frames(kind, field, msgpack.packb("x" * 100_000)))
        assert len(getattr(told, field)) == most


@pytest.mark.parametrize(
    "value",
    [
        {"a": [0] * (limits.LIST_ITEMS + 1)},
        {str(n): 0 for n in range(limits.MAP_ITEMS + 1)},
        {"a": [[[]] * 100 for _ in range(limits.CONTAINERS // 100)]},
        {"a": "x" * limits.DATA_HEADER_BYTES},
        {"a": 2**64},
        {"a": object()},
    ],
)
def test_columns_that_no_receiver_would_take_are_found_before_anything_is_sampled(value: Any) -> None:
    """A rollout asks before it samples; what it is told good is received."""
    with pytest.raises((ValueError, TypeError, OverflowError)):
        codec.check_plain(value)
    good = {"a": [0] * limits.LIST_ITEMS, "b": [[]] * 1000} | {str(n): 0 for n in range(1000)}
    codec.check_plain(good)
    group = _group(["one"], columns=good)
    assert codec.decode([bytes(frame) for frame in codec.encode(group)]).equals(group)


@pytest.mark.parametrize("name", ["rollout-\ud800", "x" * (limits.NAME_BYTES + 1), "é" * limits.NAME_BYTES])
def test_peers_with_names_that_no_identity_can_have_are_refused(name: str) -> None:
    """A lone surrogate, or more bytes than ZeroMQ takes, is no name; the sender is told at its start."""
    heartbeat = _frames("rollout_heartbeat", "name", msgpack.packb(name, unicode_errors="surrogatepass"))
    with pytest.raises(DecodeError, match=r"bad_header: name: .* a name has"):
        codec.decode(heartbeat)
    with pytest.raises(ConfigError, match="--name: a name has"):
        identity_of(name, "0123456789abcdef")
    assert len(identity_of("x" * limits.NAME_BYTES, "0123456789abcdef")) <= 255
