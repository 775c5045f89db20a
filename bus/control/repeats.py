"""Heartbeats of peers that have nothing new to say: told by their bytes, and not decoded again.

A process at rest repeats its heartbeat each second, and only the number is another one. `Repeats` keeps the newest
heartbeat of each peer with its bytes before and after the number. A frame with the same bytes there is the same
message: it would be decoded to the same values and pass the same checks. No message is made of it, unless somebody
asks for one.
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
_LENGTHS = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
"""Bytes of an unsigned integer of msgpack by its first byte, this one included."""


class Repeated(NamedTuple):
    """A heartbeat at rest (`Heartbeat.at_rest`), come again with another number."""

    peer: str
    """Sender, `NAME/BOOT_ID`."""
    heartbeat: Heartbeat
    """The heartbeat that it repeats, as decoded."""
    sequence: int
    """Its own number."""

    @property
    def message(self) -> Heartbeat:
        """The whole heartbeat."""
        return self.heartbeat.numbered(self.sequence)


class Known(NamedTuple):
    """A decoded heartbeat, and the bytes of its frame before and after the number."""

    heartbeat: Heartbeat
    peer: str
    """Sender, as in `Repeated`; empty if the heartbeat is not at rest."""
    head: bytes
    tail: bytes
    start: int
    """Bytes of the head."""
    length: int
    """Bytes of the tail."""


class Repeats:
    """Decoder of heartbeats with a memory of the newest one of each peer. For one thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def decode(self, identity: bytes, frames: Sequence[zmq.Frame]) -> Message | Repeated:
        """Return the message in received frames, as `codec.decode` does, or that a heartbeat at rest has come again.

        Any other heartbeat that repeats the newest one of its peer shares all values with that one, but for the number.

        Raises:
            DecodeError: the frames are no valid message.
        """
        known = self._known.get(identity)
        frame = frames[0].bytes if len(frames) == 1 and len(frames[0]) <= KEPT_BYTES else b""
        if known is not None and frame.startswith(known.head) and frame.endswith(known.tail):
            number = _number(frame[known.start : len(frame) - known.length])
            if number is not None:
                if known.peer:
                    return Repeated(known.peer, known.heartbeat, number)
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
        if not frame.startswith(head):
            return
        start = len(head)
        tail = frame[start + _LENGTHS.get(frame[start], 1) :]
        # msgpack takes the last of two equal keys: a number further behind would be the one that counts
        if _number(frame[start : len(frame) - len(tail)]) != message.sequence or _NUMBER in tail:
            return
        peer = identity.decode("utf-8", "replace") if message.at_rest else ""
        self._known[identity] = Known(message, peer, head, tail, start, len(tail))
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


def _number(data: bytes) -> int | None:
    """Return the unsigned integer that these bytes are in msgpack; None for anything else."""
    if len(data) == 1 and data[0] < 0x80:
        return data[0]
    # the highest byte first
    return int.from_bytes(data[1:], "big") if data and _LENGTHS.get(data[0]) == len(data) else None
