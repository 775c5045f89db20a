"""Functions to send and receive frames without waiting, and to count and log dropped frames.

pyzmq's `send_multipart` and `recv_multipart` combine flags as enums for each frame, and ask the socket after each frame
whether more follow. Here flags are plain integers and `frame.more` tells. A message of nine frames takes 4 µs instead
of 11 to send, and 6 µs instead of 11 to receive.
"""

import time
from collections.abc import Iterator, Sequence

import structlog
import zmq

from bus.counts import EdgeCounts
from schemas.errors import DecodeError
from schemas.messages import Directive, Message

log = structlog.get_logger("bus")

DROP_LOG_INTERVAL_SECONDS = 5.0
"""Seconds between two log lines about dropped frames of an edge."""
MAX_IN_A_ROW = 1000
"""Messages read in a row before a thread does anything else."""
COPIED_BYTES = 64 << 10
"""Size in bytes from which frames share memory with the socket: sharing costs 10 µs of bookkeeping per frame."""

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def send_frames(socket: "zmq.Socket[bytes]", frames: Sequence[bytes | memoryview]) -> None:
    """Queue all frames as one message, or none.

    Raises:
        zmq.Again: the queue is full (high-water mark), or no peer is connected.
        zmq.ZMQError: a ROUTER has no connection to the peer (EHOSTUNREACH).
    """
    send = socket.send
    # libzmq decides about room at the first frame alone; the others of the message are always taken
    for frame in frames[:-1]:
        send(frame, _MORE, len(frame) < COPIED_BYTES)  # third argument: copy
    send(frames[-1], _NOBLOCK, len(frames[-1]) < COPIED_BYTES)


def receive_frames(socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """Return all frames of the next message; libzmq delivers a message only when its last frame has come.

    Raises:
        zmq.Again: no message is there.
    """
    receive = socket.recv
    # a zmq.Frame instead of bytes: no copy is made, and the frame knows its connection
    frame = receive(_NOBLOCK, copy=False)
    frames = [frame]
    while frame.more:
        frame = receive(_NOBLOCK, copy=False)
        frames.append(frame)
    return frames


def waiting(socket: "zmq.Socket[bytes]", at_most: int) -> Iterator[list[zmq.Frame]]:
    """Yield waiting messages, as lists of frames, until none is left or `at_most` have been read."""
    for _ in range(at_most):
        try:
            frames = receive_frames(socket)
        except zmq.Again:
            return
        yield frames


def drop(counts: EdgeCounts, error: DecodeError, peer: str) -> None:
    """Count and log frames that are no valid message."""
    note_drop(counts, error.reason, peer, _shown(str(error)))


def drop_fenced(counts: EdgeCounts, reason: str, message: Message, peer: str) -> None:
    """Count and log a message for another run (P1: each receiver compares run ids) or of an older term (P2: fencing).

    Args:
        counts: counters of the edge.
        reason: `foreign_run` or `old_term`.
        message: the dropped message.
        peer: name of the sender, for the log.
    """
    detail = f"{reason}: a {message.kind} of run {message.run}"
    if isinstance(message, Directive):
        detail += f", term {message.term}; is bus.control the address of another run, or are there two packers?"
    note_drop(counts, reason, peer, _shown(detail))


def note_drop(counts: EdgeCounts, reason: str, peer: str, detail: str) -> None:
    """Count a drop, with a log line at most every DROP_LOG_INTERVAL_SECONDS: a peer may send nothing but bad frames."""
    # counted always, logged now and then: the counter is exact, the log readable
    counts.dropped[reason] += 1
    if time.monotonic() >= counts.next_drop_log:
        counts.next_drop_log = time.monotonic() + DROP_LOG_INTERVAL_SECONDS
        dropped = sum(counts.dropped.values())
        log.warning("frame dropped", edge=counts.edge, peer=peer, reason=reason, detail=detail, dropped=dropped)


def peer_of(frame: zmq.Frame) -> str:
    """Return the sender for a log line, `NAME at ADDRESS`, from the first frame; `NAME` if no address is known.

    The name is the peer's own claim, cut to 64 bytes.
    """
    name = _shown(frame.bytes[:64].decode("utf-8", "backslashreplace"))
    try:
        return f"{name} at {frame.get('Peer-Address')}"
    except zmq.ZMQError:
        return name


def _shown(text: str) -> str:
    """Return text from a peer fit for a log line: with characters escaped if any is not printable."""
    return text if text.isprintable() else ascii(text)
