"""Reader of the spans that the actors of a run have written (`actors.telemetry.spans`)."""

import contextlib
import math
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import record_of
from actors.telemetry.spans import OLDER_SUFFIX, SUFFIX

ORDINAL = re.compile(rb'"ordinal": ?(\d+)')
"""Argument of a span of a group that is trained."""
BLOCK_BYTES = 64 << 10
"""Bytes of a file from which on its next write starts another block of the index."""


@dataclass(frozen=True, slots=True)
class Span:
    """Work or waiting of an actor, in wall-clock seconds since 1970."""

    actor: str
    track: str
    """Name of a thread, or of lanes."""
    lane: str
    """Piece of work among many of its track; empty in a thread."""
    name: str
    start: float
    seconds: float
    waits: bool
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """Time at which the span has ended."""
        return self.start + self.seconds


@dataclass(frozen=True)
class Recorded:
    """Spans of a run, out of its files."""

    spans: list[Span]
    processes: list[tuple[str, int, float]]
    """Actor, pid and wall-clock time of each process of the run, when its first spans were written."""
    lost: Mapping[str, int]
    """Spans of the whole run that could not be kept, by actor."""


@dataclass(frozen=True)
class _Head:
    """Line before the spans of one write."""

    actor: str
    pid: int
    machine: str
    wall: float
    monotonic: float
    lost: int


@dataclass
class _Block:
    """Some writes of a process, one after the other in a file."""

    head: _Head
    start: int
    """Byte of the first line."""
    end: int
    first: float = math.inf
    """Start of the earliest span, in seconds of the machine's monotonic clock."""
    last: float = -math.inf
    """End of the latest span."""
    lowest: float = math.inf
    """Smallest ordinal of a group in the arguments of a span."""
    highest: float = -math.inf


class _IndexedFile:
    """A file with the times of its blocks, as far as it has been read.

    Args:
        marked: actor and names of the spans that are kept whole.
    """

    def __init__(self, marked: tuple[str, Collection[str]]) -> None:
        self._marked = marked
        self.path = Path()
        self.blocks: list[_Block] = []
        self.marks: list[tuple[str, bytes]] = []
        """Machine and line of each marked span."""
        self.newest: dict[str, _Head] = {}
        """Newest head by machine."""
        self.started: dict[tuple[str, int], _Head] = {}
        """First head of each process, by actor and pid."""
        self.lost: dict[str, int] = {}
        """Spans that could not be kept, by actor."""

    def read_on(self, path: Path) -> None:
        """Read the whole lines that are new. The path changes when the file becomes the older one."""
        self.path = path
        with path.open("rb") as file:
            position = file.seek(self.blocks[-1].end if self.blocks else 0)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._take(raw, position, position + len(raw))
                position += len(raw)

    def _take(self, raw: bytes, start: int, end: int) -> None:
        if (head := _head_of(raw)) is not None:
            self.newest[head.machine] = head
            self.started.setdefault((head.actor, head.pid), head)
            self.lost[head.actor] = self.lost.get(head.actor, 0) + head.lost
            block = self.blocks[-1] if self.blocks else None
            is_same = block is not None and (block.head.actor, block.head.machine) == (head.actor, head.machine)
            if block is None or not is_same or block.end - block.start >= BLOCK_BYTES:
                self.blocks.append(_Block(head, start, end))
                return
        if not self.blocks:
            return
        block = self.blocks[-1]
        block.end = end
        if (times := _times_of(raw)) is not None:
            block.first, block.last = min(block.first, times[0]), max(block.last, sum(times))
        if (ordinal := _ordinal_of(raw)) is not None:
            block.lowest, block.highest = min(block.lowest, ordinal), max(block.highest, ordinal)
        actor, names = self._marked
        if block.head.actor == actor and any(f'"{name}"'.encode() in raw for name in names):
            self.marks.append((block.head.machine, raw))


class SpanIndex:
    """Index of the spans of a run: a look at a time reads the blocks of the files that have spans of this time.

    The first look reads the files once, line by line, without parsing their spans; each later one what is new in them.
    Half lines of killed processes, and lines of other programs, are left out. All processes of a machine share its
    monotonic clock, so one difference to the wall clock holds for all of them: that of the machine's newest write.
    Methods may be called from several threads.

    Args:
        folder: folder of the files.
        actor: actor of the marked spans, which are kept in memory: those by which a time is found.
        names: names of the marked spans.
    """

    def __init__(self, folder: Path, actor: str, names: Collection[str]) -> None:
        self._folder, self._marked = folder, (actor, names)
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int], _IndexedFile] = {}
        """Files by device and inode."""

    def marked(self) -> list[Span]:
        """Return the marked spans in the files."""
        with self._lock:
            offsets = self._update()
            marks = [mark for file in self._files.values() for mark in file.marks]
        found = (_span_of(record_of(raw), self._marked[0], offsets[machine]) for machine, raw in marks)
        return [span for span in found if span is not None and span.name in self._marked[1]]

    def within(self, start: float, end: float, ordinals: Collection[int] = ()) -> Recorded:
        """Return the spans that overlap a time, in seconds since 1970, and all spans of groups with these ordinals."""
        with self._lock:
            offsets = self._update()
            files = list(self._files.values())
            spans = [span for file in files for span in _chosen(file, start, end, ordinals, offsets)]
            lost: dict[str, int] = {}
            for actor, number in (pair for file in files for pair in file.lost.items()):
                lost[actor] = lost.get(actor, 0) + number
            # the older file of an actor comes first, so a process that wrote both has the head of the older one
            started: dict[tuple[str, int], _Head] = {}
            for file in files:
                started = file.started | started
        processes = [(*key, head.monotonic + offsets[head.machine]) for key, head in started.items()]
        return Recorded(spans, processes, {name: number for name, number in lost.items() if number})

    def _update(self) -> dict[str, float]:
        """Read what is new; return the difference of the wall clock to the monotonic one by machine."""
        there = {}
        for path in _paths(self._folder):
            with contextlib.suppress(FileNotFoundError):  # it has just become the older one
                found = path.stat()
                key = found.st_dev, found.st_ino
                there[key] = self._files.get(key) or _IndexedFile(self._marked)
                there[key].read_on(path)
        self._files = there
        heads = sorted((head for file in there.values() for head in file.newest.values()), key=lambda h: h.monotonic)
        return {head.machine: head.wall - head.monotonic for head in heads}


def _chosen(
    file: _IndexedFile, start: float, end: float, ordinals: Collection[int], offsets: Mapping[str, float]
) -> Iterator[Span]:
    """Yield the spans of a file that overlap a time or are of groups with these ordinals."""
    lowest, highest = min(ordinals, default=math.inf), max(ordinals, default=-math.inf)
    with contextlib.suppress(FileNotFoundError), file.path.open("rb") as opened:
        for block in file.blocks:
            offset = offsets[block.head.machine]
            begin, until = start - offset, end - offset
            has_time = block.first < until and block.last > begin
            has_groups = block.lowest <= highest and block.highest >= lowest
            if not has_time and not has_groups:
                continue
            opened.seek(block.start)
            for raw in opened.read(block.end - block.start).splitlines(keepends=True):
                if _may_overlap(raw, begin, until) or (has_groups and _ordinal_of(raw) in ordinals):
                    span = _span_of(record_of(raw), block.head.actor, offset)
                    if span is not None:
                        yield span


def _paths(folder: Path) -> Iterator[Path]:
    """Yield the files by actor, the older one of an actor first."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if not path.name.endswith(OLDER_SUFFIX):
            older = path.with_name(path.name.removesuffix(SUFFIX) + OLDER_SUFFIX)
            yield from (one for one in (older, path) if one.is_file())


def _may_overlap(raw: bytes, start: float, end: float) -> bool:
    """Return whether the line of a span may be of a time, from its first two numbers alone."""
    times = _times_of(raw)
    # without them it is no span, or one of another program
    return times is None or (times[0] < end and sum(times) > start)


def _times_of(raw: bytes) -> tuple[float, float] | None:
    """Return start and seconds of the line of a span, from its first two numbers alone; None if it has none."""
    first, _, rest = raw[1:96].partition(b",")
    try:
        return float(first), float(rest.partition(b",")[0])
    except ValueError:
        return None


def _ordinal_of(raw: bytes) -> int | None:
    """Return the ordinal of the group in the arguments of a span; None if it has none, or that of an evaluation."""
    found = ORDINAL.search(raw)
    return int(found[1]) if found else None


def _head_of(raw: bytes) -> _Head | None:
    line = record_of(raw) if raw[:1] == b"{" else None
    try:
        return _Head(**line) if isinstance(line, dict) else None
    except TypeError:
        return None


def _span_of(line: Any, actor: str, offset: float) -> Span | None:
    match line:
        case [
            int() | float() as start,
            int() | float() as seconds,
            str(track),
            str(lane),
            str(name),
            waits,
            dict(args),
        ]:
            return Span(actor, track, lane, name, start + offset, seconds, bool(waits), args)
    return None
