"""Heartbeats of peers that have nothing new to say: told by their bytes, and not decoded again.

A process at rest repeats its heartbeat each second, and only the number is another one. `Repeats` keeps the newest
heartbeat of each peer with its bytes before and after the number. A frame with the same bytes there is the same
message: it would be decoded to the same values and pass the same checks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgpack
import zmq

from bus import codec
from schemas import limits
from schemas.messages import Heartbeat, Message

KEPT_BYTES = 4096
"""Bytes of the largest heartbeat that is kept. A larger one, e.g. with hundreds of groups, is decoded each time."""
MAX_REMEMBERED = 10_000
"""Largest number of peers whose newest heartbeat is kept; the longest unchanged are forgotten first."""
_NUMBER = b"sequence"
"""Name of the field with the number."""


class Known(NamedTuple):
    """A decoded heartbeat, and the bytes of its frame before and after the number."""

    heartbeat: Heartbeat
    head: bytes
    tail: bytes


class Repeats:
    """Decoder of heartbeats with a memory of the newest one of each peer. For one thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def decode(self, identity: bytes, frames: Sequence[zmq.Frame]) -> Message:
        """Return the message in received frames, as `codec.decode` does.

        A heartbeat that repeats the newest one of its peer shares all values with that one, but for the number.

        Raises:
            DecodeError: the frames are no valid message.
        """
        known = self._known.get(identity)
        frame = frames[0].bytes if len(frames) == 1 and len(frames[0]) <= KEPT_BYTES else b""
        if known is not None and frame.startswith(known.head):
            number, end = _number(frame, len(known.head))
            if end and len(frame) - end == len(known.tail) and frame.endswith(known.tail):
                return known.heartbeat.numbered(number)
        message = codec.decode(frames, limits.CONTROL_HEADER_BYTES)
        self._known.pop(identity, None)
        if frame and isinstance(message, Heartbeat):
            self._keep(identity, frame, message, known)
        return message

    def forget(self, identity: bytes) -> None:
        """Forget the heartbeat of a peer."""
        self._known.pop(identity, None)

    def _keep(self, identity: bytes, frame: bytes, message: Heartbeat, before: Known | None) -> None:
        # the bytes in front of the number name run, sender and process, which rarely change
        head = before.head if before is not None and frame.startswith(before.head) else _head(message)
        number, end = _number(frame, len(head)) if frame.startswith(head) else (-1, 0)
        # msgpack takes the last of two equal keys: a number further behind would be the one that counts
        if not end or number != message.sequence or _NUMBER in frame[end:]:
            return
        self._known[identity] = Known(message, head, frame[end:])
        if len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]


def _head(message: Heartbeat) -> bytes:
    """Return the bytes in front of the number, as `codec.encode` writes them."""
    packer = msgpack.Packer(unicode_errors="surrogatepass")
    parts = [packer.pack_array_header(3), packer.pack(message.kind), packer.pack(message.version)]
    parts.append(packer.pack_map_header(len(message.header_keys)))
    for name in ("run", "name", "boot_id"):
        parts += [packer.pack(name), packer.pack(getattr(message, name))]
    return b"".join([*parts, packer.pack(_NUMBER.decode())])


def _number(frame: bytes, start: int) -> tuple[int, int]:
    """Return msgpack's unsigned integer at a place of a frame, and the place behind it; (0, 0) for anything else."""
    first = frame[start] if start < len(frame) else 0xC0
    if first < 0x80:
        return first, start + 1
    if not 0xCC <= first <= 0xCF:
        return 0, 0
    # 0xcc to 0xcf: 1, 2, 4 or 8 bytes, the highest first
    end = start + 1 + (1 << first - 0xCC)
    return (int.from_bytes(frame[start + 1 : end], "big"), end) if end <= len(frame) else (0, 0)
