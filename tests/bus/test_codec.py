"""The codec: views without copies, and nothing but `DecodeError` for frames that are no message."""

import random
import time
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import codec
from schemas import limits
from schemas.arrays import SMALL_BYTES, wire_bytes
from schemas.errors import DecodeError
from schemas.messages import (
    MESSAGE_TYPES,
    DroppedOrdinal,
    Message,
    ObserverDirective,
    RolloutGroup,
    StepBatch,
    drop_fields,
    single_turn,
)
from tests.schemas.messages.examples import DIRECTIVE_FIELDS, EXAMPLES, decoded, example_frames

KINDS = sorted(MESSAGE_TYPES)
Frames = list[bytes]


def _refused(frames: Any) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        decoded(frames)
    return caught.value


def _with_header(kind: str, change: Any) -> Frames:
    """Frames of an example whose opened frame 0 was changed in place."""
    frames = example_frames(kind)
    opened = msgpack.unpackb(frames[0])
    change(opened)
    return [msgpack.packb(opened), *frames[1:]]


# --- views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [bytes, bytearray, lambda frame: memoryview(bytearray(frame))])
@pytest.mark.parametrize("kind", ["scored_group", "rollout_heartbeat", "step_batch"])
def test_small_arrays_travel_in_the_header_and_are_read_only(buffer: Any, kind: str) -> None:
    """A message of small arrays has one frame, or two with texts; the arrays are aligned, and can't be written."""
    frames = [buffer(frame) for frame in example_frames(kind)]
    assert len(frames) == (2 if MESSAGE_TYPES[kind].texts else 1)
    for array in codec.decode(frames).arrays().values():
        assert array.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize("buffer", [bytes, bytearray, lambda frame: memoryview(bytearray(frame))])
def test_large_arrays_are_read_only_views_of_the_frames(buffer: Any) -> None:
    """Decoding copies no large array, and it can't be written, even if the frame could."""
    group = _long_group(np.arange(2001))
    frames = [buffer(frame) for frame in codec.encode(group)]
    found = codec.decode(frames)
    large = [array for array in found.arrays().values() if array.nbytes > SMALL_BYTES]
    assert len(large) >= 4
    for array, frame in zip(large, frames[1:-1], strict=True):  # behind them the texts
        assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_large_arrays_are_sent_without_a_copy() -> None:
    """Beyond `SMALL_BYTES` a frame is the array's own memory."""
    offsets = np.arange(2001)
    group = _long_group(offsets)
    frames = codec.encode(group)
    assert any(np.shares_memory(np.frombuffer(frame, np.uint8), offsets) for frame in frames[1:-1])
    large = [array.nbytes for array in group.arrays().values() if array.nbytes > SMALL_BYTES]
    assert [len(frame) for frame in frames[1:-1]] == large


@pytest.mark.parametrize("num", [0, 1, 7, 511, 512, 513, 1023, 1024, 1025, 4096])
def test_arrays_of_any_size_round_trip(num: int) -> None:
    """Sizes around the one from which an array has a frame of its own."""
    holds = np.arange(2 * num).reshape(-1, 2)
    heartbeat = EXAMPLES["rollout_heartbeat"].model_copy(update={"holds": holds})
    frames = codec.encode(heartbeat)
    assert len(frames) == (2 if holds.nbytes > SMALL_BYTES else 1)
    assert codec.decode([bytes(frame) for frame in frames]).equals(heartbeat)
    directive = EXAMPLES["rollout_directive"].model_copy(update={"release": holds})
    encoded = codec.encode(directive)
    assert len(encoded) == len(frames)
    assert bytes(encoded[0]).endswith(wire_bytes(directive.neighbour_loads)), "small loads end the header"
    assert decoded([bytes(frame) for frame in encoded]).equals(directive)


@pytest.mark.parametrize("kind", [*KINDS, "long"])
def test_a_frame_for_each_array_is_read_too(kind: str) -> None:
    """As older builds have written groups into ledgers."""
    message = _long_group(np.arange(2001)) if kind == "long" else EXAMPLES[kind]
    assert decoded(_as_before(message)).equals(message)


def _as_before(message: Message) -> Frames:
    """The frames of a build that joined no arrays."""
    frames = [bytes(frame) for frame in codec.encode(message)]
    opened = msgpack.unpackb(frames[0], unicode_errors="surrogatepass")
    opened[2]["%"] = opened[2]["%"][:2]
    arrays = [array.tobytes() for array in message.arrays().values()]
    return [msgpack.packb(opened, unicode_errors="surrogatepass"), *arrays, *frames[-1:][: len(message.texts)]]


def test_arrays_of_any_order_in_memory_round_trip() -> None:
    """Strided and Fortran-ordered arrays arrive as what they are."""
    group = EXAMPLES["scored_group"].model_copy(
        update={
            "rewards_FG": np.asfortranarray([[1.0, 2.0], [3.0, 4.0]]),
            "token_ids": np.arange(10, dtype=np.int32)[::2],
        }
    )
    assert codec.decode([bytes(frame) for frame in codec.encode(group)]).equals(group)
    strided = _long_group(np.arange(4002)[::2] // 2)
    assert codec.decode([bytes(frame) for frame in codec.encode(strided)]).equals(strided)


def _long_group(offsets: np.ndarray[Any, np.dtype[np.int64]]) -> RolloutGroup:
    num = int(offsets[-1])
    return RolloutGroup(
        **dict(EXAMPLES["rollout_group"])
        | {
            "completions": [""] * num,
            "stop_conditions": ["stop"] * num,
            **single_turn(np.array([5], np.int32), offsets, np.array([[0, 1, 7]])),
            "segment_temperatures": np.ones(1, np.float32),
            "token_ids": np.zeros(num, np.int32),
            "loss_mask": np.ones(num, np.uint8),
            "logprobs": np.zeros(num, np.float32),
        }
    )


def test_what_json_allows_in_columns_round_trips() -> None:
    """Lone surrogates, NaN and nesting come through, since a data set may hold them."""
    columns = {"broken": "half \ud83d a pair", "nested": [[{"a": [1, 2.5, None, False]}]]}
    group = EXAMPLES["rollout_group"].model_copy(update={"columns": columns})
    found = codec.decode([bytes(frame) for frame in codec.encode(group)])
    assert isinstance(found, RolloutGroup)
    assert found.columns == columns


def test_value_that_cannot_be_sent_is_named_and_leaves_the_codec_usable() -> None:
    """A field that msgpack does not know is a TypeError with the value, and the next message is whole."""
    directive = ObserverDirective(**DIRECTIVE_FIELDS, progress={"path": object()})
    with pytest.raises(TypeError, match="a object can't be sent: <object"):
        codec.encode(directive)
    test = EXAMPLES["observer_directive"]
    assert codec.decode([bytes(frame) for frame in codec.encode(test)]).equals(test)


# --- refusals with a reason ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "malformed"),
        ([b""], "malformed"),
        ([b"\xc1"], "malformed"),
        ([b"\x91" * 100_000], "malformed"),
        ([msgpack.packb(["rollout_group", 1])], "malformed"),
        ([msgpack.packb(["rollout_group", 1, []])], "malformed"),
        ([msgpack.packb(["gossip", 1, {}])], "unknown_kind"),
        ([msgpack.packb([["rollout_group"], 1, {}])], "unknown_kind"),
        ([msgpack.packb(["rollout_group", 99, {}])], "unknown_version"),
        ([msgpack.packb(["rollout_group", None, {}])], "unknown_version"),
        ([msgpack.packb(["observer_heartbeat", 2, {}])], "bad_array"),
        ([b"x"] * (limits.FRAMES + 1), "malformed"),
        (example_frames("rollout_group")[:-1], "bad_array"),
        ([*example_frames("rollout_group"), b""], "bad_array"),
        ([*example_frames("rollout_group")[:-1], b"123"], "bad_array"),
        ([*example_frames("rollout_group")[:-1], bytes(16)], "bad_array"),
        (_with_header("rollout_directive", lambda o: o[2]["%"].__setitem__(2, o[2]["%"][2][:-8])), "bad_array"),
        (_with_header("rollout_directive", lambda o: o[2]["%"].__setitem__(2, o[2]["%"][2] + bytes(8))), "bad_array"),
        ([*example_frames("rollout_directive"), b""], "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"].pop()), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"].append(b"")), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"].__setitem__(2, o[2]["%"][2][:-1])), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"].__setitem__(2, o[2]["%"][2] + bytes(8))), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"].__setitem__(2, "text")), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"].__setitem__(2, 7)), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2].update({"%": None})), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"].__setitem__(0, "a:<f8[N]")), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"][1].__setitem__(0, -4)), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"][1].__setitem__(0, "4")), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"][1].__setitem__(2, 2**63)), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2]["%"][1].pop()), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2].pop("ordinal")), "bad_header"),
        (_with_header("rollout_group", lambda o: o[2].update(colour="red")), "bad_header"),
        (_with_header("rollout_group", lambda o: o[2].update(attempt="many")), "bad_header"),
        (_with_header("rollout_group", lambda o: o[2].update(stop_conditions=["one"])), "bad_header"),
        (_with_header("rollout_group", lambda o: o[2].update(completions=["one"])), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2].update(completions=[1])), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2].update(completions=[-1, 12])), "bad_array"),
        (_with_header("rollout_group", lambda o: o[2].update(token_ids=[])), "bad_header"),
    ],
)
def test_frames_that_are_no_message_have_a_reason(frames: Frames, reason: str) -> None:
    """Each way to be wrong is told apart by a word that a counter can carry."""
    assert _refused(frames).reason == reason


def test_a_header_is_never_taken_for_the_texts() -> None:
    """Of a message without further frames, with lengths of texts that add up to the header's own."""
    opened = msgpack.unpackb(example_frames("rollout_group")[0])
    opened[2] |= {"prompt": 300, "completions": [0, 0]}
    lengths = len(msgpack.packb(opened))
    opened[2]["prompt"] = lengths
    frames = [msgpack.packb(opened)]
    assert len(frames[0]) == lengths
    assert str(_refused(frames)) == f"bad_array: texts: {lengths} bytes by the header, the frame has 0"


def test_dtype_of_another_build_is_refused_with_both_layouts() -> None:
    """A peer whose arrays differ is told what is expected and what it sent."""
    swapped = _with_header(
        "step_batch", lambda o: o[2]["%"].__setitem__(0, o[2]["%"][0].replace("token_ids:<i4", "token_ids:<i8"))
    )
    assert "expected the arrays 'drops_D:<i8[D,2] ordinals:<i8[K]" in str(_refused(swapped))


def test_sizes_are_bounded_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header or a message beyond its limit is refused whatever it holds."""
    monkeypatch.setattr(limits, "DATA_HEADER_BYTES", 100)
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 1000)
    assert _refused([b"\xc1" * 101]).reason == "oversize"
    assert _refused([b"\xc1", bytes(1000)]).reason == "oversize"
    assert _refused([b"\xc1" * 100]).reason == "malformed"


def test_error_names_the_field_and_stays_short() -> None:
    """The detail says which field is wrong, in a line that fits a log whatever was sent."""
    wrong = _with_header("rollout_group", lambda o: o[2].update(attempt="x" * 10_000))
    assert str(_refused(wrong)).startswith("bad_header: attempt: Input should be a valid integer")
    for change in ({"k" * 10_000: 1}, {"%": ["y" * 10_000, 1]}, {"%": [[[["deep"] * 900]]]}):
        assert len(str(_refused(_with_header("rollout_group", lambda o, c=change: o[2].update(c))))) < 600


# --- hostile input ---------------------------------------------------------------------------------------------------


def _deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: list[Any] = [
    None, True, 0, -1, 1.5, 2**63, 2**64 - 1, -(2**63), float("nan"), float("inf"), "", "x" * 10_000, "\x00\n",
    b"", b"\xff" * 100, [], {}, [[]], {"%": 1}, _deep(400), {"a": _deep(400)}, [1] * 1000, [None], ["", 1, None],
    msgpack.ExtType(5, b"pickle"), msgpack.Timestamp(0), {1: 2}, {b"k": 1},
]  # fmt: skip


def _replace_somewhere(rng: random.Random, value: Any) -> Any:
    """A copy of a tree with one node replaced, removed, doubled or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        action = rng.random()
        if action < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if action < 0.2:
            return value | {rng.choice(["extra", "kind", "%", "", "model_config"]): rng.choice(HOSTILE)}
        return value | {key: _replace_somewhere(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        action = rng.random()
        if action < 0.1:
            return value[:at] + value[at + 1 :]
        if action < 0.2:
            return value + value[at : at + 1]
        return [*value[:at], _replace_somewhere(rng, value[at]), *value[at + 1 :]]
    return rng.choice(HOSTILE)


def _flip(rng: random.Random, frame: bytes) -> bytes:
    if not frame:
        return b"\x00"
    flipped = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 8))):
        flipped[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _mutated(rng: random.Random, frames: Frames) -> Frames:
    """Frames that were a message, after one of the things that strangers and accidents do."""
    at = rng.randrange(len(frames))
    match rng.randrange(7):
        case 0:
            return [*frames[:at], _flip(rng, frames[at]), *frames[at + 1 :]]
        case 1:
            return [*frames[:at], frames[at][: rng.randrange(len(frames[at]) + 1)], *frames[at + 1 :]]
        case 2:
            return frames[:at] + frames[at + 1 :]
        case 3:
            return [*frames, *frames[at:]]
        case 4:
            return rng.sample(frames, len(frames))
        case 5:
            return [frames[0], *example_frames(rng.choice(KINDS))[1:]]
        case _:
            opened = _replace_somewhere(rng, msgpack.unpackb(frames[0]))
            return [msgpack.packb(opened), *frames[1:]]


@pytest.mark.slow
def test_mutated_messages_decode_or_are_refused() -> None:
    """12 000 mutations of valid messages: a valid message or a DecodeError with a reason, each within 0.2 s of CPU."""
    rng = random.Random(0)
    reasons: dict[str, int] = {}
    originals = [example_frames(kind) for kind in KINDS]
    for _ in range(12_000):
        frames = _mutated(rng, rng.choice(originals))
        started = time.thread_time()
        try:
            message = decoded(frames)
        except DecodeError as error:
            reason, detail = error.reason, str(error)
        else:
            reason, detail = "good", ""
            message.layout.check(message.__dict__)
            sent = [bytes(frame) for frame in codec.encode(message)]
            assert [bytes(frame) for frame in codec.encode(decoded(sent))] == sent
        reasons[reason] = reasons.get(reason, 0) + 1
        assert len(detail) < 1000
        assert time.thread_time() - started < 2.0
    assert set(reasons) >= {"good", "malformed", "unknown_kind", "unknown_version", "bad_header", "bad_array"}


def _nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=8), values, max_size=4)


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=20),
    _nested,
    max_leaves=12,
)
headers = st.tuples(st.sampled_from([*KINDS, "gossip", ""]), st.integers(0, 2), st.dictionaries(st.text(), trees))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    first=st.binary(max_size=200) | headers.map(msgpack.packb) | trees.map(msgpack.packb),
    others=st.lists(st.binary(max_size=64), max_size=12),
)
def test_random_frames_decode_or_are_refused(first: bytes, others: Frames) -> None:
    """Bytes and trees from nowhere never raise anything but DecodeError."""
    try:
        message = codec.decode([first, *others])
    except DecodeError:
        return
    assert isinstance(message, Message)


@pytest.mark.slow
def test_a_step_after_a_fork_tells_of_as_many_drops_as_there_are() -> None:
    """100 000 ordinals given up at once travel with the next step, each with its reason."""
    dropped = [DroppedOrdinal(ordinal=i, reason="forked" if i % 3 else "poison") for i in range(100_000)]
    batch = EXAMPLES["step_batch"].model_copy(update=drop_fields(dropped))
    found = codec.decode(codec.encode(batch))
    assert isinstance(found, StepBatch)
    assert found.dropped == dropped


# --- images ----------------------------------------------------------------------------------------------------------

PICTURES = [b"\x89PNG one", bytes(5000), b""]


def _seen(**fields: Any) -> RolloutGroup:
    """A group that shows three images, one of them twice."""
    places = [{"image": image, "start": start, "length": 1} for start, image in enumerate((0, 1, 0, 2))]
    return RolloutGroup(**EXAMPLES["rollout_group"].__dict__ | {"images": PICTURES, "image_places": places} | fields)


def test_images_are_the_last_frames_and_change_no_other() -> None:
    """A group without them has the frames that it had before there were images; the bytes are not encoded again."""
    plain, group = EXAMPLES["rollout_group"], _seen()
    frames, before = codec.encode(group), example_frames("rollout_group")
    assert [bytes(frame) for frame in frames[1:]] == [*before[1:], b"".join(PICTURES)]
    header, header_before = (msgpack.unpackb(one)[2] for one in (frames[0], before[0]))
    assert header.pop("images") == [len(picture) for picture in PICTURES]
    assert len(header.pop("image_places")) == 4
    assert header == header_before
    assert not plain.images


@pytest.mark.parametrize("buffer", [bytes, bytearray, lambda frame: memoryview(bytearray(frame))])
@pytest.mark.parametrize("number", [1, 3, limits.IMAGES])
def test_images_round_trip(buffer: Any, number: int) -> None:
    """One, a few, and as many as a group may have, with a reward actor in between."""
    pictures = [f"{n}".encode() * n for n in range(number)]
    places = [{"image": n, "start": n, "length": 1} for n in range(number)]
    prompt_ids, offsets = np.zeros(number, np.int32), np.array([0, number])
    group = _seen(images=pictures, image_places=places, prompt_ids=prompt_ids, prompt_offsets=offsets)
    found = codec.decode([buffer(frame) for frame in codec.encode(group)])
    assert isinstance(found, RolloutGroup)
    assert found.equals(group)
    scored = EXAMPLES["scored_group"].model_copy(
        update={name: found.__dict__[name] for name in ("images", "image_places", "prompt_ids", "prompt_offsets")}
        | {"sample_prompts": np.zeros(3, np.int64)}
    )
    assert codec.decode([buffer(frame) for frame in codec.encode(scored)]).equals(scored)


@pytest.mark.parametrize("most", [1, 5000, 5007, 5008])
def test_images_share_frames_up_to_the_limit_of_a_frame(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """An image is never divided, one that fills a frame is not copied, and receivers divide frames by the same rule."""
    monkeypatch.setattr(limits, "DATA_FRAME_BYTES", most)
    sizes = [len(picture) for picture in PICTURES]
    bounds = codec._blob_frames(sizes)
    assert [number for start, end in bounds for number in range(start, end)] == [0, 1, 2]
    assert all(sum(sizes[start:end]) <= most or end - start == 1 for start, end in bounds)
    assert len(bounds) == {1: 3, 5000: 2, 5007: 2, 5008: 1}[most]


@pytest.mark.parametrize(
    "sizes",
    [0, -1, 3, True, "3", [], [3], [9, 5000, -1], [8, 4999, 0], [8, 5000, True], [[8]], 1 << 40, b"bytes", {"a": 1}],
)
def test_sizes_of_images_that_do_not_fit_the_frames_are_refused(sizes: Any) -> None:
    """Nothing but a DecodeError; images in the header itself are refused too."""
    frames = [bytes(frame) for frame in codec.encode(_seen())]
    opened = msgpack.unpackb(frames[0])
    opened[2]["images"] = sizes
    error = _refused([msgpack.packb(opened), *frames[1:]])
    assert error.reason in ("bad_array", "bad_header")


def test_another_number_of_images_is_refused() -> None:
    """One frame too few or too many is a fault of texts or of places."""
    frames = [bytes(frame) for frame in codec.encode(_seen())]
    assert _refused(frames[:-1]).reason in ("bad_array", "bad_header")
    assert _refused([*frames, b"more"]).reason in ("bad_array", "bad_header")
