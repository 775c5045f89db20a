"""Messages to frames and back.

Frame 0 is msgpack `[kind, version, header]`; the header is a map of the plain fields, with `"%"` listing the arrays in
order as `[name, dtype, shape]`. Each array is one raw frame after it. Receiving copies nothing: arrays are views of
the frames, so they live as long as the message does and are read-only.

What arrives is not trusted: sizes are bounded before anything is parsed, types are checked by the declared message, and
whatever is wrong becomes one `DecodeError` with a countable reason. Nothing is ever unpickled.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from typing_extensions import Buffer

from schemas.errors import DecodeError
from schemas.messages import MESSAGE_TYPES, Message, array_specs

ARRAYS_KEY = "%"
MAX_HEADER_BYTES = 16 << 20
MAX_MESSAGE_BYTES = 1 << 30
MAX_FRAMES = 32

Frame = Buffer


def encode(message: Message) -> list[bytes | memoryview]:
    """Frames of a message; array frames share memory with the message, so it must not change until they are sent."""
    specs = array_specs(type(message))
    values = message.__dict__
    described = []
    frames: list[bytes | memoryview] = [b""]
    for name in specs:
        array = np.ascontiguousarray(values[name])
        described.append((name, array.dtype.str, array.shape))
        frames.append(array.data if array.size else b"")
    header = message.model_dump(exclude=specs.keys()) if specs else message.model_dump()  # type: ignore[arg-type]
    header[ARRAYS_KEY] = described
    frames[0] = msgpack.packb([message.kind, message.version, header], use_bin_type=True)
    return frames


def decode(frames: Sequence[Frame]) -> Message:
    """The message in these frames.

    Raises:
        DecodeError: whatever is wrong with them; no other exception leaves this function.
    """
    message_type, header = _open_header(frames)
    described = header.pop(ARRAYS_KEY, None)
    specs = array_specs(message_type)
    if not isinstance(described, list) or len(described) != len(specs) or len(frames) != len(specs) + 1:
        raise DecodeError("bad_array", f"{message_type.kind} has {len(specs)} arrays, got {len(frames) - 1} frames")
    for (name, spec), description, frame in zip(specs.items(), described, frames[1:], strict=True):
        header[name] = _open_array(name, spec.dtype, description, frame)
    try:
        return message_type.model_validate(header)
    except ValidationError as error:
        raise DecodeError("bad_header", _first_problem(error)) from None
    except (TypeError, OverflowError, RecursionError) as error:
        raise DecodeError("bad_header", str(error)) from None


def num_bytes(frames: Sequence[Frame]) -> int:
    """Bytes of all frames."""
    return sum(memoryview(frame).nbytes for frame in frames)


def _open_header(frames: Sequence[Frame]) -> tuple[type[Message], dict[str, Any]]:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise DecodeError("malformed", f"{len(frames)} frames, allowed are 1 to {MAX_FRAMES}")
    size = num_bytes(frames)
    if size > MAX_MESSAGE_BYTES or memoryview(frames[0]).nbytes > MAX_HEADER_BYTES:
        raise DecodeError("oversize", f"{size} bytes, allowed are {MAX_MESSAGE_BYTES} (header {MAX_HEADER_BYTES})")
    try:
        opened = msgpack.unpackb(frames[0], raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise DecodeError("malformed", f"frame 0 is not msgpack: {error}") from None
    if not isinstance(opened, list) or len(opened) != 3 or not isinstance(opened[2], dict):
        raise DecodeError("malformed", "frame 0 is not [kind, version, header]")
    kind, version, header = opened
    message_type = MESSAGE_TYPES.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise DecodeError("unknown_kind", f"{kind!r:.60}")
    if version != message_type.version:
        raise DecodeError(
            "unknown_version", f"{kind} version {version!r:.20}, this build speaks {message_type.version}"
        )
    return message_type, header


def _open_array(name: str, dtype: np.dtype[Any], description: Any, frame: Frame) -> NDArray[Any]:
    """A view of the frame with the shape that the header says, if name, dtype and size are right."""
    try:
        sent_name, sent_dtype, shape = description
        good = sent_name == name and sent_dtype == dtype.str and all(type(n) is int and n >= 0 for n in shape)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise DecodeError("bad_array", f"expected {name} {dtype.str}, got {description!r:.80}")
    buffer = memoryview(frame)
    if math.prod(shape) * dtype.itemsize != buffer.nbytes:
        raise DecodeError("bad_array", f"{name}: shape {shape} of {dtype.str} does not fit {buffer.nbytes} bytes")
    array = np.frombuffer(buffer, dtype) if len(shape) == 1 else np.frombuffer(buffer, dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc']) or 'message'}: {problem['msg']}"[:300]
