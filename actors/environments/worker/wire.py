"""Messages between a rollout actor and its workers: one msgpack map per ZeroMQ message, with the key `kind`."""

from typing import Any

import msgpack

PROTOCOL = 1
"""Version of the messages, in the worker's `hello`."""
BEAT_SECONDS = 1.0
"""Seconds between two beats, in both directions."""
SILENCE_SECONDS = 60.0
"""Seconds without a message after which a worker takes the rollout actor for dead, and ends."""
MESSAGE_BYTES = 16 << 20
"""Limit of a message."""
TEXT_CHARACTERS = 4000
"""Limit of an error's text."""

Message = dict[str, Any]


class TooLargeError(ValueError):
    """Error for a message beyond MESSAGE_BYTES."""


def pack(message: Message) -> bytes:
    """Return the bytes of a message. Numbers of numpy become numbers; half a surrogate pair becomes its escape.

    Raises:
        TooLargeError: the message is beyond MESSAGE_BYTES.
        TypeError: a value is neither text, number, list nor map.
        OverflowError: a number is beyond 64 bits.
        ValueError: the message is nested too deep.
    """
    # no UTF-8 has lone surrogates, and not every decoder takes them
    data: bytes = msgpack.packb(message, default=_plain, unicode_errors="backslashreplace")
    if len(data) > MESSAGE_BYTES:
        raise TooLargeError(f"a message of {len(data)} bytes exceeds the limit of {MESSAGE_BYTES} bytes")
    return data


def unpack(data: bytes) -> Message:
    """Return the message in some bytes.

    Raises:
        ValueError: no msgpack map with a `kind`, or beyond MESSAGE_BYTES.
    """
    if len(data) > MESSAGE_BYTES:
        raise TooLargeError(f"a message of {len(data)} bytes exceeds the limit of {MESSAGE_BYTES} bytes")
    message = msgpack.unpackb(data, strict_map_key=False)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("a message is a map with the key kind")
    return message


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return list(value)
    raise TypeError(f"{type(value).__name__} is neither text, number, list nor map: {value!r}"[:TEXT_CHARACTERS])
