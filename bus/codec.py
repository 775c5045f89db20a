"""Messages to frames (`encode`) and back (`decode`). Both sides hold the bounds of `schemas.limits`; no pickle.

Frames are not trusted: sizes are checked before anything is parsed, lists and maps are counted while msgpack opens the
header, and pydantic checks types up to the first wrong element. Every fault becomes a `DecodeError` with a countable
reason. Receiving copies no large array: these are read-only views of the frames and live as long as the message.

    frame 0      msgpack [kind, version, header]; header = {"ordinal": 7, ..., "%": [layout, sizes, small]}; `layout`
                 names the arrays with dtype and axes, `sizes` gives axis lengths, `small` joins arrays up to 4 KiB
    frames 1..n  raw bytes of a larger array each
    then         UTF-8 of the kind's texts (`texts`), if any; the header has their lengths in bytes
    then         of each field of bytes of the kind (`blobs`), if any, its items joined in frames; the header has their
                 sizes
"""

import itertools
import re
import reprlib
import threading
from collections.abc import Mapping, Sequence, Sized
from types import MappingProxyType
from typing import Any

import msgpack
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from schemas import limits
from schemas.arrays import ArrayLayout
from schemas.errors import DecodeError, MessageTooLargeError
from schemas.messages import DATA_KINDS, MESSAGE_TYPES, Message, Neighbours
from schemas.messages.base import ARRAYS_KEY, AXES_AGREE

NO_ARRAYS = ("", ())
"""Description of the arrays of a kind without any: as in older builds, which then can read why they are refused."""
UNKNOWN_TABLE = "unknown_table"
"""Reason of an error: the message names a `Neighbours` that has not come."""

Frame = Sized
"""Flat buffer whose length is its number of bytes: `bytes`, a memoryview of bytes, `zmq.Frame`."""


def encode(message: Message, *, in_parts: bool = False) -> list[bytes | memoryview]:
    """Return the frames of a message.

    Large arrays share memory with the message, so the message must not change until the frames are sent.

    Args:
        message: the message.
        in_parts: True if the frames travel in parts (`bus.parts`): then frames and message may be larger.

    Raises:
        MessageTooLargeError: the message is beyond a bound of the receivers.
    """
    # not `model_dump`, which would convert each value inside, deeply
    header, layout = message.__dict__.copy(), message.layout
    if message.apart:
        header[message.apart] = header[message.apart].table
    joined, large = layout.split(header)
    header[ARRAYS_KEY] = (layout.text, layout.sizes(header), joined) if layout.specs else NO_ARRAYS
    for name in layout.specs:
        del header[name]
    # messages without them have the bytes that they had before there were such fields
    for name in message.rare:
        if not header[name]:
            del header[name]
    # a place for the header, which is packed last: texts change it
    frames: list[bytes | memoryview] = [b"", *large.values()]
    if message.texts:
        frames.append(_take_texts_out(header, message.texts))
    names = [*large, "texts"]
    for field in message.blobs:
        if blobs := header.get(field):
            header[field] = [len(blob) for blob in blobs]
            # a frame of one blob is this very blob, since joining a single object of bytes copies nothing
            joined_blobs = [b"".join(blobs[start:end]) for start, end in _blob_frames(header[field])]
            frames += joined_blobs
            names += [field] * len(joined_blobs)
    # before packing: msgpack would build megabytes for a list that no receiver takes
    for name, value in header.items():
        most = limits.LIST_ITEMS if isinstance(value, list) else limits.MAP_ITEMS
        if isinstance(value, list | dict) and len(value) > most:
            raise MessageTooLargeError(
                f"a {message.kind} has {len(value)} {name}, and {most} are the most that travel; fewer peers, or fewer "
                "groups or completions at a time, are needed"
            )
    frames[0] = _local.packer.pack((message.kind, message.version, header))
    _check_sizes(message, frames, names, in_parts=in_parts)
    return frames


def decode(
    frames: Sequence[Frame],
    header_bytes: int | None = None,
    kinds: Mapping[str, type[Message]] = MESSAGE_TYPES,
    tables: Mapping[str, Neighbours] = MappingProxyType({}),
    most_bytes: int | None = None,
) -> Message:
    """Return the message in received frames.

    Args:
        frames: all frames of a message, in order.
        header_bytes: most bytes of frame 0; default: the limit of the data plane.
        kinds: types of messages by kind; default: those of the bus.
        tables: messages received before that this one may name (`Message.apart`), by name.
        most_bytes: most bytes of all frames; default: the limit of a message.

    Raises:
        DecodeError: the frames are no valid message. No other exception leaves this function.
    """
    # before anything is parsed: parsing takes far more memory than the bytes received
    size = num_bytes(frames)
    most = most_bytes or limits.MESSAGE_BYTES
    if size > most:
        raise DecodeError("oversize", f"{size} bytes, at most {most} are allowed")
    message_type, header = _open_header(frames, header_bytes or limits.DATA_HEADER_BYTES, kinds)
    if message_type.apart:
        name = header.get(message_type.apart)
        table = tables.get(name) if isinstance(name, str) else None
        if table is None:
            raise DecodeError(UNKNOWN_TABLE, f"a {message_type.kind} names the neighbours {reprlib.repr(name)}")
        header[message_type.apart] = table
    layout, description = message_type.layout, header.pop(ARRAYS_KEY, None)
    # ledgers of older builds have groups without joined arrays, and with or without a frame of texts
    is_old = isinstance(description, list) and len(description) == 2
    for field in reversed(message_type.blobs):  # those of the last field are behind all others
        if field in header:
            frames = _put_blobs_back(field, header, frames)
    end = len(frames)
    if message_type.texts and not (is_old and len(frames) == 1 + len(layout.specs)):
        end = max(1, end - 1)  # the header is no frame of texts
    header |= _open_arrays(layout, description, frames[1:end])
    try:
        if message_type.texts:
            _put_texts_back(header, message_type.texts, frames[end:])
        # AXES_AGREE saves a second check of the arrays: `_open_arrays` has made them from the layout
        message: Message = message_type.__pydantic_validator__.validate_python(header, context=AXES_AGREE)
        return message
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"]) or "message"
        # cut: a peer chooses the names inside the text, and so the length of the log line
        raise DecodeError("bad_header", f"{place}: {problem['msg']}"[:300]) from None
    except (TypeError, OverflowError, RecursionError) as error:
        raise DecodeError("bad_header", str(error)) from None


def check_plain(value: object) -> None:
    """Check that a value fits into a header: its size, lists, maps and nesting.

    Raises:
        TypeError, ValueError, OverflowError: the value is beyond a bound of the receivers, or has a type that
        msgpack can't hold.
    """
    packed = msgpack.packb(["", 1, {"": value}], unicode_errors="surrogatepass")
    if len(packed) > limits.DATA_HEADER_BYTES:
        raise ValueError(f"{len(packed)} bytes, and {limits.DATA_HEADER_BYTES} are the most that travel")
    try:
        _unpacked(packed)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        # msgpack's text about a long list or map names its own arguments, which users have never seen
        too_long = re.fullmatch(r"(\d+) exceeds max_(array|map)_len\((\d+)\)", str(error))
        if too_long is None:
            raise ValueError(str(error)) from error
        size, kind, most = too_long.groups()
        found = f"list of {size} items" if kind == "array" else f"map of {size} keys"
        raise ValueError(f"a {found}, and {most} are the most that travel") from error


def num_bytes(frames: Sequence[Frame]) -> int:
    """Return the sum of bytes of all frames."""
    return sum(map(len, frames))


class _Local(threading.local):
    """A packer per thread: reuse saves a buffer of 256 KiB per message, sharing between threads is not safe."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(default=_fields_of, unicode_errors="surrogatepass")


def _fields_of(value: object) -> dict[str, Any]:
    """Return the fields of a model inside a header (a policy, a ticket) as a map for msgpack."""
    if isinstance(value, BaseModel):
        # not a copy: msgpack reads the fields at once, and `model_dump` would convert each value inside
        return value.__dict__
    raise TypeError(f"a {type(value).__name__} can't be sent: {value!r:.80}")


_local = _Local()


def header_limit(message: Message) -> int:
    """Return the limit in bytes for the header of this message."""
    return limits.DATA_HEADER_BYTES if isinstance(message, DATA_KINDS) else limits.CONTROL_HEADER_BYTES


def _check_sizes(
    message: Message, frames: Sequence[bytes | memoryview], names: Sequence[str], *, in_parts: bool
) -> None:
    """Check the sizes of the header, of each further frame, with its name, and of the whole message.

    Raises:
        MessageTooLargeError: a size is beyond the receivers' limit; the text names the part and the keys to lower.
    """
    kind, header, most = message.kind, len(frames[0]), header_limit(message)
    if header > most:
        raise MessageTooLargeError(
            f"a {kind} has {header} bytes in its header (all but large arrays and texts), and {most} are the most that "
            "travel; "
            + (
                "columns and chat prompts of an example are in there: keep what is large in a file and name the file "
                "in a column"
                if most == limits.DATA_HEADER_BYTES
                else "fewer peers or fewer groups at a time are needed"
            )
        )
    largest = limits.DATA_FRAME_BYTES if isinstance(message, DATA_KINDS) else limits.CONTROL_FRAME_BYTES
    largest = limits.BATCH_BYTES if in_parts else largest
    # not strict: a kind without texts has a frame less
    for name, frame in zip(names, frames[1:], strict=False):
        if len(frame) > largest:
            raise MessageTooLargeError(
                f"a {kind} has {len(frame)} bytes in one array, and {largest} are the most that travel ({name}); "
                "lower packer.groups_per_step, rollout.group_size or rollout.max_tokens"
            )
    most = limits.MESSAGE_BYTES if isinstance(message, DATA_KINDS) else limits.CONTROL_MESSAGE_BYTES
    most = limits.BATCH_BYTES if in_parts else most
    if num_bytes(frames) > most:
        raise MessageTooLargeError(
            f"a {kind} has {num_bytes(frames)} bytes, and {most} are the most that travel; "
            "lower packer.groups_per_step, rollout.group_size or rollout.max_tokens"
            + (", or set trainer.router_replay: false" if "routed_experts" in names else "")
        )


def _take_texts_out(header: dict[str, Any], names: Sequence[str]) -> bytes:
    """Replace each text in the header by its length in bytes; return all texts as UTF-8, joined."""
    pieces: list[bytes] = []
    # a list of anything but texts (the messages of a chat prompt) stays in the header: receivers find no lengths there
    for name in names:
        value = header[name]
        if isinstance(value, str):
            # surrogatepass: Python strings from JSON may hold lone surrogates, which must arrive as they were sent
            pieces.append(value.encode("utf-8", "surrogatepass"))
            header[name] = len(pieces[-1])
        elif all(isinstance(text, str) for text in value):
            texts = [text.encode("utf-8", "surrogatepass") for text in value]
            pieces += texts
            header[name] = [len(text) for text in texts]
    return b"".join(pieces)


def _put_texts_back(header: dict[str, Any], names: Sequence[str], frames: Sequence[Frame]) -> None:
    """Undo `_take_texts_out`.

    Without a frame of texts, the header itself holds the texts: ledgers of older builds have such groups.
    """
    found: dict[str, Any] = {}
    for name in names:
        value = header.get(name)
        # `type(...) is int`, since True and False are instances of int
        if all(type(item) is int for item in (value if isinstance(value, list) else [value])):
            found[name] = value
    if not frames and not any(found.values()):
        return
    sizes = [size for value in found.values() for size in (value if isinstance(value, list) else [value])]
    total = len(frames[0]) if frames else 0
    # a negative length could make the sum right, and let one text overlap with another
    if min(sizes, default=0) < 0 or sum(sizes) != total:
        raise DecodeError("bad_array", f"texts: {sum(sizes)} bytes by the header, the frame has {total}")
    ends = iter(itertools.accumulate(sizes))
    data, start = memoryview(frames[0]) if frames else b"", 0  # type: ignore[arg-type]

    def next_text() -> str:
        nonlocal start
        end = next(ends)
        text, start = str(data[start:end], "utf-8", "surrogatepass"), end
        return text

    try:
        for name, value in found.items():
            header[name] = [next_text() for _ in value] if isinstance(value, list) else next_text()
    except ValueError as error:
        raise DecodeError("bad_array", f"texts: {error}"[:300]) from None


def _blob_frames(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last (exclusive) blob of each frame: as many as fit into a frame, and one at least."""
    found, start, filled = list[tuple[int, int]](), 0, 0
    for number, size in enumerate(sizes):
        if number > start and filled + size > limits.DATA_FRAME_BYTES:
            found.append((start, number))
            start, filled = number, 0
        filled += size
    return [*found, (start, len(sizes))]


def _put_blobs_back(field: str, header: dict[str, Any], frames: Sequence[Frame]) -> Sequence[Frame]:
    """Replace the sizes of a field's blobs by their bytes in the last frames; return the frames before these."""
    sizes = header[field]
    if not isinstance(sizes, list) or not sizes or any(type(size) is not int or size < 0 for size in sizes):
        raise DecodeError("bad_array", f"{field}: {reprlib.repr(sizes)} are no sizes")
    shares = _blob_frames(sizes)
    held = [len(frame) for frame in frames[1:][-len(shares) :]]
    if held != [sum(sizes[start:end]) for start, end in shares]:
        raise DecodeError("bad_array", f"{field}: {sum(sizes)} bytes by the header, frames have {held}")
    blobs = list[bytes]()
    for (start, end), frame in zip(shares, frames[-len(shares) :], strict=True):
        view, place = memoryview(frame), 0  # type: ignore[arg-type]
        for size in sizes[start:end]:
            # copied, since pydantic takes bytes alone
            blobs.append(bytes(view[place : place + size]))
            place += size
    header[field] = blobs
    return frames[: -len(shares)]


class _Count:
    """Counts lists and maps while msgpack opens them: each takes 60 to 300 bytes of memory for 1 byte received."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, value: Any) -> Any:
        self.num += 1
        if self.num > limits.CONTAINERS:
            raise ValueError(f"more than {limits.CONTAINERS} lists and maps")
        return value


def _unpacked(frame: Frame) -> Any:
    """Return the value that msgpack reads from a frame, within bounds of lists, maps and nesting.

    Raises:
        ValueError, RecursionError, msgpack.exceptions.UnpackException: the frame is not msgpack, or is beyond a bound.
    """
    count = _Count()
    opened = msgpack.unpackb(
        frame,
        unicode_errors="surrogatepass",
        list_hook=count,
        object_hook=count,
        max_array_len=limits.LIST_ITEMS,
        max_map_len=limits.MAP_ITEMS,
        max_ext_len=0,  # no extension types
    )
    if count.num >= limits.NESTING_CHECKED_FROM:
        # msgpack unpacks deeper than it packs; no sender has packed such a header
        msgpack.packb(opened, unicode_errors="surrogatepass")
    return opened


def _open_header(
    frames: Sequence[Frame], header_bytes: int, kinds: Mapping[str, type[Message]]
) -> tuple[type[Message], dict[str, Any]]:
    if not 1 <= len(frames) <= limits.FRAMES:
        raise DecodeError("malformed", f"{len(frames)} frames, 1 to {limits.FRAMES} are allowed")
    if len(frames[0]) > header_bytes:
        raise DecodeError("oversize", f"a header of {len(frames[0])} bytes, at most {header_bytes} are allowed")
    try:
        opened = _unpacked(frames[0])
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise DecodeError("malformed", f"frame 0 is not msgpack: {error}"[:300]) from None
    if not isinstance(opened, list) or len(opened) != 3 or not isinstance(opened[2], dict):
        raise DecodeError("malformed", "frame 0 is not [kind, version, header]")
    kind, version, header = opened
    # a list as the kind has no hash, so asking the table would raise TypeError
    message_type = kinds.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        # shortened: a peer decides about the length of the text
        raise DecodeError("unknown_kind", reprlib.repr(kind))
    if version != message_type.version:
        raise DecodeError(
            "unknown_version", f"{kind} {reprlib.repr(version)}, this build speaks {message_type.version}"
        )
    if not header.keys() <= message_type.header_keys:
        unknown = next(iter(header.keys() - message_type.header_keys))
        raise DecodeError("bad_header", f"{reprlib.repr(unknown)} is no field of a {kind}")
    return message_type, header


def _open_arrays(layout: ArrayLayout, description: Any, frames: Sequence[Frame]) -> dict[str, NDArray[Any]]:
    joined = description[2] if isinstance(description, list) and len(description) == 3 else None
    if not isinstance(description, list) or len(description) not in (2, 3) or description[0] != layout.text:
        raise DecodeError("bad_array", f"expected the arrays {layout.text!r}, got {reprlib.repr(description)}")
    try:
        return layout.open(description[1], joined, frames)
    except (TypeError, ValueError, OverflowError) as error:
        raise DecodeError("bad_array", f"{error}"[:300]) from None
