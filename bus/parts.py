"""Batches larger than a message: cut into parts by the sender, joined again by the receiver.

A part is a slice of a frame, so cutting copies nothing. A batch is a pure function of its step (P18), and is cut in the
same way each time: parts of two sends of a batch complete each other.
"""

import numpy as np

from bus import codec
from schemas import limits
from schemas.errors import DecodeError
from schemas.messages import BatchPart, StepBatch

WHOLE_BYTES = 64 << 20
"""Bytes of arrays, images and experts up to which a batch is sent as one message."""
NAMES = ("run", "term", "incarnation", "rank", "step")
"""Fields that a part has in common with its batch."""


def messages_of(batch: StepBatch) -> list[StepBatch | BatchPart]:
    """Return the messages that carry a batch: the batch, or its parts if it is larger than WHOLE_BYTES.

    The parts share memory with the batch, which must not change until they are sent.

    Raises:
        MessageTooLargeError: the batch is beyond `limits.BATCH_BYTES`, or its header is beyond that of a message.
    """
    blobs = sum(len(blob) for field in batch.blobs for blob in getattr(batch, field))
    if sum(array.nbytes for array in batch.arrays().values()) + blobs <= WHOLE_BYTES:
        return [batch]
    frames = codec.encode(batch, in_parts=True)
    same = {name: getattr(batch, name) for name in NAMES}
    parts, frame_bytes, end = list[StepBatch | BatchPart](), [len(frame) for frame in frames], 0
    for frame in frames:
        data = np.frombuffer(frame, np.uint8)
        for start in range(0, data.size, limits.PART_BYTES):
            piece = data[start : start + limits.PART_BYTES]
            parts.append(BatchPart(**same, frame_bytes=frame_bytes, start=end + start, data=piece))
        end += data.size
    return parts


class Assembly:
    """Parts of a batch that have come. `first` is any of them: all name the same frames, or the batch is refused."""

    def __init__(self, first: BatchPart) -> None:
        self._first = first
        self._data = np.empty(first.num_bytes, np.uint8)
        self._lengths: dict[int, int] = {}
        """Bytes of each part that has come, by its start."""

    def belongs(self, part: BatchPart) -> bool:
        """Return whether a part is of this batch: of a packer of the same term, for the same gang."""
        return (part.run, part.term, part.incarnation) == (self._first.run, self._first.term, self._first.incarnation)

    def add(self, part: BatchPart) -> StepBatch | None:
        """Take in a part; return the batch once all parts are here.

        Raises:
            DecodeError: the parts are no batch.
        """
        if part.frame_bytes != self._first.frame_bytes:
            raise DecodeError("bad_array", f"parts of step {part.step} name different frames")
        self._data[part.start : part.start + part.data.size] = part.data
        self._lengths[part.start] = part.data.size
        if sum(self._lengths.values()) < self._data.size:
            return None
        end = 0
        for start, length in sorted(self._lengths.items()):
            if start != end:
                raise DecodeError("bad_array", f"parts of step {part.step} overlap at byte {start}")
            end += length
        self._data.flags.writeable = False
        data, frames = memoryview(self._data), list[memoryview]()  # type: ignore[arg-type]
        for size in self._first.frame_bytes:
            frames.append(data[:size])
            data = data[size:]
        batch = codec.decode(frames, most_bytes=limits.BATCH_BYTES)
        if not isinstance(batch, StepBatch) or any(getattr(part, name) != getattr(batch, name) for name in NAMES):
            raise DecodeError("bad_header", f"parts of step {part.step} are a {batch.kind} of another step or rank")
        return batch
