"""Spans of work and of waiting, for the timeline of a run: kept in memory, written to a file per actor by a thread.

    with span("commit"):                          work of this thread
    with span("wait for batch", waits=True):      the thread stands still
    with in_lane("groups", "17.1"):               one of many pieces of work that share a thread; spans inside follow

A process has one recorder, which the runtime starts. Without a recorder a span costs a look at a variable. Recording
never blocks and never fails: a full ring forgets its oldest spans, and what a disk does not take is lost and counted.
Seconds are those of the machine's monotonic clock, which all its processes share; each head of a file has the
wall-clock time beside it.
"""

import contextvars
import functools
import itertools
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import structlog

from bus import threads

log = structlog.get_logger("spans")

FOLDER = "events"
"""Folder below output_dir."""
SUFFIX, OLDER_SUFFIX = ".jsonl", ".older.jsonl"
"""Ends of the names of an actor's two files. The older file has what came before the first line of the other."""
RING_SPANS = 16_384
"""Spans that wait in memory at most."""
FLUSH_SECONDS = 0.5
"""Seconds between two writes; a process that is killed loses the spans of this time."""
CLOSE_SECONDS = 1.0
"""Longest wait for the last write at the end of a process."""
SHORT_SECONDS = 2e-4
"""Length below which parts of frequent work, and waits that may be none, are left out by their makers."""
HEAD_BYTES = 512
"""Room for the head of a write, in bytes."""
JOINED_SECONDS = 0.025
"""Length after which a span of joined rounds ends."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), default=str)
"""Made once, since `json.dumps` makes one per call. An argument of an odd type is written as its text."""
Lane = tuple[str, str]
"""Track, and the piece of work in it."""


class Record(NamedTuple):
    """A span as the ring has it."""

    number: int
    """Spans of the process are counted from 0, so that a gap tells of lost ones."""
    start: float
    """Monotonic clock, in seconds."""
    seconds: float
    track: str
    """Name of the thread, or of the lanes of many pieces of work."""
    lane: str
    """Piece of work within the track; empty where the track is a thread."""
    name: str
    waits: bool
    args: dict[str, Any]


class SpanRecorder:
    """Recorder of the spans of a process.

    Args:
        folder: folder of the files; made when the first span is written.
        actor: name of the actor, and of its files.
        max_bytes: bytes of both files together.
        is_ready: returns False while nothing may be written, because output_dir is not there.
    """

    def __init__(self, folder: Path, actor: str, max_bytes: int, is_ready: Callable[[], bool]) -> None:
        self._path, self._older = folder / f"{actor}{SUFFIX}", folder / f"{actor}{OLDER_SUFFIX}"
        self._actor, self._max_bytes, self._is_ready = actor, max_bytes, is_ready
        self._ring: deque[Record] = deque(maxlen=RING_SPANS)
        self._numbers = itertools.count()
        self._next = 0
        """Number of the next span to be written."""
        self._lost = 0
        """Spans lost since the last write."""
        self._is_failing = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread = threads.start_helper("spans", self._run)

    def add(self, start: float, seconds: float, lane: Lane, name: str, waits: bool, args: dict[str, Any]) -> None:
        """Add a span. Thread-safe, without a lock."""
        # both the count and the append are one step of the interpreter
        self._ring.append(Record(next(self._numbers), start, seconds, *lane, name, waits, args))

    def flush(self) -> None:
        """Write all spans so far. For the thread of this recorder, and for tests."""
        if not self._ring or not self._is_ready():
            return
        taken: list[Record] = []
        # a bounded batch, also while other threads add spans faster than this loop takes them
        for _ in range(RING_SPANS):
            try:
                taken.append(self._ring.popleft())
            except IndexError:
                break
        taken.sort()
        self._lost += taken[-1].number + 1 - self._next - len(taken)
        self._next = taken[-1].number + 1
        try:
            self._write([_line(record) for record in taken])
        except OSError as error:
            self._lost += len(taken)
            # once, and not for every half second of a full disk
            if not self._is_failing:
                log.warning("events of the timeline are lost", file=str(self._path), detail=str(error))
            self._is_failing = True
        else:
            self._is_failing, self._lost = False, 0

    def close(self) -> None:
        """Write what is left and stop. Waits CLOSE_SECONDS at most."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        is_last = False
        try:
            while not is_last:
                is_last = self._end.wait(FLUSH_SECONDS)
                self.flush()
        except Exception:
            # no actor ends for its telemetry; the ring goes on forgetting its oldest spans
            log.exception("events of the timeline are recorded no more", file=str(self._path))

    def _write(self, lines: list[bytes]) -> None:
        """Append a head and lines. A file that would grow too long first becomes the older one."""
        half = self._max_bytes // 2
        first, size = 0, sum(map(len, lines))
        # a batch longer than a file loses its oldest spans
        while first < len(lines) and size + HEAD_BYTES > half:
            size -= len(lines[first])
            first += 1
        self._lost += first
        data = _head(self._actor, self._lost) + b"".join(lines[first:])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size + len(data) + 1 > half:
            self._path.replace(self._older)
        with self._path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            # a process that was killed while it wrote has left half a line
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                data = b"\n" + data
            # a nearly full disk takes a part, and fails at the next write
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]


def _head(actor: str, lost: int) -> bytes:
    """Return the line before the spans of a write: whose they are, and one moment on both clocks."""
    head = {
        "actor": actor,
        "pid": os.getpid(),
        "machine": _machine(),
        "wall": round(time.time(), 6),
        "monotonic": round(time.monotonic(), 6),
        "lost": lost,
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n"


def _line(record: Record) -> bytes:
    _, start, seconds, track, lane, name, waits, args = record
    fields = [round(start, 6), round(seconds, 6), track, lane, name, int(waits), args]
    return _ENCODER.encode(fields).encode() + b"\n"


@functools.cache
def _machine() -> str:
    """Return a name for the clock that all processes of this machine share: it starts again with each boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return socket.gethostname()


_recorder: SpanRecorder | None = None
"""Recorder of this process; None: nothing is recorded."""
_lane: contextvars.ContextVar[Lane | None] = contextvars.ContextVar("lane", default=None)
"""Lane of the running task; None: the track of the thread."""


def start(recorder: SpanRecorder) -> None:
    """Record the spans of this process from now on."""
    global _recorder
    _recorder = recorder
    recorder.start()


def stop() -> None:
    """Write what is left, and record nothing any more."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def is_recording() -> bool:
    """Return whether spans of this process are kept."""
    return _recorder is not None


def _forget_in_child() -> None:
    # a forked child has the ring and not the thread: it would write nothing, or its parent's spans once more
    global _recorder
    _recorder = None


os.register_at_fork(after_in_child=_forget_in_child)


class Span:
    """A span under way; a context manager. `args` may be added to until its end."""

    __slots__ = ("_least", "_name", "_start", "_waits", "args")

    def __init__(self, name: str, waits: bool, least: float, args: dict[str, Any]) -> None:
        self._name, self._waits, self._least, self.args = name, waits, least, args

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if _recorder is None:
            return
        seconds = time.monotonic() - self._start
        if seconds < self._least:
            return
        if kind is not None:
            self.args["error"] = kind.__name__
        _recorder.add(self._start, seconds, _lane.get() or _thread_lane(), self._name, self._waits, self.args)


def span(name: str, *, waits: bool = False, least: float = 0.0, **args: Any) -> Span:
    """Return a context manager that records its block as a span.

    Args:
        name: kind of work, the same for all spans of the kind.
        waits: True if the thread or task stands still in the block.
        least: shorter spans are not recorded, in seconds.
        args: plain values that tell this span from others, for example its step.
    """
    return Span(name, waits, least, args)


def record(name: str, start: float, end: float, *, waits: bool = False, lane: Lane | None = None, **args: Any) -> None:
    """Record a span whose times are known.

    Args:
        name: as for `span`.
        start, end: times of `time.monotonic`.
        waits: as for `span`.
        lane: track and piece of work; None: as for `span`.
        args: as for `span`.
    """
    if _recorder is not None:
        _recorder.add(start, end - start, lane or _lane.get() or _thread_lane(), name, waits, args)


def _thread_lane() -> Lane:
    name = threading.current_thread().name
    # threads of a pool, score_0, score_1, …, are lanes of one track
    pool, _, number = name.rpartition("_")
    if number.isdecimal():
        return pool, number
    return ("main" if name == "MainThread" else name), ""


@contextmanager
def in_lane(track: str, lane: str) -> Iterator[None]:
    """Put the spans of this task, and of tasks that it starts, into a lane."""
    token = _lane.set((track, lane))
    try:
        yield
    finally:
        _lane.reset(token)


class JoinedRounds:
    """Spans of short rounds that follow each other: one span for those of JOINED_SECONDS, with their number.

    A decoded token takes a millisecond or two with a small model, and a span for each would be most of the file.

    Args:
        name: name of the spans.
    """

    def __init__(self, name: str) -> None:
        self._name, self._rounds = name, 0
        self._start = self._end = 0.0
        self._args: dict[str, Any] = {}

    def add(self, start: float, end: float, **args: Any) -> None:
        """Add a round. The arguments of the first round of a span are those of the span."""
        if not self._rounds:
            self._start, self._args = start, args
        self._rounds, self._end = self._rounds + 1, end
        if end - self._start >= JOINED_SECONDS:
            self.close()

    def close(self) -> None:
        """End the span, because other work follows."""
        if self._rounds:
            record(self._name, self._start, self._end, rounds=self._rounds, **self._args)
            self._rounds = 0
