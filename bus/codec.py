"""Messages to frames and back.

Frame 0 is msgpack `[kind, version, header]`; the header is a map of the plain fields, with `"%"` holding `[layout,
sizes]`: the name, dtype and axes of each array, and how long each axis is. Each array is one raw frame after it.
Receiving copies nothing: arrays are views of the frames, so they live as long as the message does and are read-only.

What arrives is not trusted: sizes are bounded before anything is parsed, types are checked by the declared message, and
whatever is wrong becomes one `DecodeError` with a countable reason. Nothing is ever unpickled.
"""

import reprlib
import threading
from collections.abc import Sequence, Sized
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from schemas.arrays import ArrayLayout
from schemas.errors import DecodeError
from schemas.messages import MESSAGE_TYPES, Frozen, Message
from schemas.messages.base import AXES_AGREE

ARRAYS_KEY = "%"
MAX_HEADER_BYTES = 16 << 20
MAX_MESSAGE_BYTES = 1 << 30
MAX_FRAMES = 32
MAX_FRAME_BYTES = 64 << 20
"""What a socket takes in one frame: 16 million tokens. A stranger can have it hold as much until the handshake ends."""
COPIED_BYTES = 4096
"""Up to here a copy of an array is cheaper than a view of it."""

Frame = Sized
"""A flat buffer whose length is its number of bytes: `bytes`, a memoryview of bytes, `zmq.Frame`."""


def encode(message: Message) -> list[bytes | memoryview]:
    """Frames of a message; large arrays share memory with it, so it must not change until they are sent."""
    header, layout = message.__dict__.copy(), message.layout
    header[ARRAYS_KEY] = (layout.text, layout.sizes(header))
    frames: list[bytes | memoryview] = [b""]
    for name in layout.specs:
        array = header.pop(name)
        small = array.nbytes <= COPIED_BYTES
        frames.append(array.tobytes() if small else np.ascontiguousarray(array).data.cast("B"))
    frames[0] = _local.packer.pack((message.kind, message.version, header))
    return frames


def decode(frames: Sequence[Frame]) -> Message:
    """The message in these frames.

    Raises:
        DecodeError: whatever is wrong with them; no other exception leaves this function.
    """
    size = num_bytes(frames)  # before anything is parsed
    if size > MAX_MESSAGE_BYTES:
        raise DecodeError("oversize", f"{size} bytes, allowed are {MAX_MESSAGE_BYTES}")
    message_type, header = _open_header(frames)
    header |= _open_arrays(message_type.layout, header.pop(ARRAYS_KEY, None), frames[1:])
    try:
        message: Message = message_type.__pydantic_validator__.validate_python(header, context=AXES_AGREE)
        return message
    except ValidationError as error:
        raise DecodeError("bad_header", _first_problem(error)) from None
    except (TypeError, OverflowError, RecursionError) as error:
        raise DecodeError("bad_header", str(error)) from None


def num_bytes(frames: Sequence[Frame]) -> int:
    """Bytes of all frames."""
    return sum(map(len, frames))


class _Local(threading.local):
    """A packer per thread: reusing one saves a buffer of 256 KiB a message, sharing one is not safe."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(default=_fields_of, unicode_errors="surrogatepass")


def _fields_of(value: object) -> dict[str, Any]:
    """The fields of a value inside a header (policies, tickets)."""
    if isinstance(value, Frozen):
        return value.__dict__
    raise TypeError(f"a {type(value).__name__} can't be sent: {value!r:.80}")


_local = _Local()


def _open_header(frames: Sequence[Frame]) -> tuple[type[Message], dict[str, Any]]:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise DecodeError("malformed", f"{len(frames)} frames, allowed are 1 to {MAX_FRAMES}")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise DecodeError("oversize", f"a header of {len(frames[0])} bytes, allowed are {MAX_HEADER_BYTES}")
    try:
        opened = msgpack.unpackb(frames[0], unicode_errors="surrogatepass")
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise DecodeError("malformed", f"frame 0 is not msgpack: {error}") from None
    if not isinstance(opened, list) or len(opened) != 3 or not isinstance(opened[2], dict):
        raise DecodeError("malformed", "frame 0 is not [kind, version, header]")
    kind, version, header = opened
    message_type = MESSAGE_TYPES.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise DecodeError("unknown_kind", reprlib.repr(kind))
    if version != message_type.version:
        raise DecodeError(
            "unknown_version", f"{kind} {reprlib.repr(version)}, this build speaks {message_type.version}"
        )
    return message_type, header


def _open_arrays(layout: ArrayLayout, description: Any, frames: Sequence[Frame]) -> dict[str, NDArray[Any]]:
    if not isinstance(description, list) or len(description) != 2 or description[0] != layout.text:
        raise DecodeError("bad_array", f"expected the arrays {layout.text!r}, got {reprlib.repr(description)}")
    try:
        return layout.open(description[1], frames)
    except (TypeError, ValueError, OverflowError) as error:
        raise DecodeError("bad_array", f"{error}"[:300]) from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc']) or 'message'}: {problem['msg']}"[:300]
