"""Reader of the spans that the actors of a run have written (`actors.telemetry.spans`)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import record_of
from actors.telemetry.spans import OLDER_SUFFIX, SUFFIX


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
    """All spans in the files of a run."""

    spans: list[Span]
    processes: list[tuple[str, int, float]]
    """Actor, pid and wall-clock time of each process, when its first spans were written."""
    lost: Mapping[str, int]
    """Spans that could not be kept, by actor."""


@dataclass(frozen=True)
class _Head:
    """Line before the spans of one write."""

    actor: str
    pid: int
    machine: str
    wall: float
    monotonic: float
    lost: int


def read_spans(
    folder: Path,
    wanted: Callable[[Span], bool] | None = None,
    *,
    actor: str = "",
    within: tuple[float, float] | None = None,
) -> Recorded:
    """Return the spans in the files of a folder; none if the folder is not there.

    Half lines of killed processes, and lines of other programs, are left out. All processes of a machine share its
    monotonic clock, so one difference to the wall clock holds for all of them: that of the machine's newest write.
    Files are read line by line, so the memory is that of the spans that are returned.

    Args:
        folder: folder of the files.
        wanted: returns True for spans to return; None: all.
        actor: name of the only actor to return spans of; empty: all actors.
        within: start and end in seconds since 1970; spans outside are skipped, most of them without being parsed.
    """
    paths = list(_paths(folder))
    # a first reading for the heads alone: the newest one of a machine gives the times of all its spans
    heads = [head for path in paths for raw in _raw_lines(path) if (head := _head_of(raw)) is not None]
    # by the machine's own clock, which tells the order of writes whatever its wall clock did meanwhile
    heads.sort(key=lambda head: head.monotonic)
    offsets = {head.machine: head.wall - head.monotonic for head in heads}
    lost: dict[str, int] = {}
    processes: dict[tuple[str, int], float] = {}
    for head in heads:
        lost[head.actor] = lost.get(head.actor, 0) + head.lost
        processes.setdefault((head.actor, head.pid), head.monotonic + offsets[head.machine])
    spans, owner, offset = [], None, 0.0
    for path in paths:
        for raw in _raw_lines(path):
            if (head := _head_of(raw)) is not None:
                # a machine may have joined since the first reading
                owner, offset = head, offsets.get(head.machine, head.wall - head.monotonic)
            elif owner is None or (actor and owner.actor != actor):
                continue
            elif within is None or _may_overlap(raw, within[0] - offset, within[1] - offset):
                span = _span_of(record_of(raw), owner.actor, offset)
                if span is not None and (wanted is None or wanted(span)):
                    spans.append(span)
    started = [(name, pid, at) for (name, pid), at in processes.items()]
    return Recorded(spans, started, {name: number for name, number in lost.items() if number})


def _paths(folder: Path) -> Iterator[Path]:
    """Yield the files by actor, the older one of an actor first."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if not path.name.endswith(OLDER_SUFFIX):
            older = path.with_name(path.name.removesuffix(SUFFIX) + OLDER_SUFFIX)
            yield from (one for one in (older, path) if one.is_file())


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:  # it has just become the older one
        return


def _may_overlap(raw: bytes, start: float, end: float) -> bool:
    """Return whether the line of a span may be of a time, from its first two numbers alone."""
    first, _, rest = raw[1:96].partition(b",")
    try:
        begun = float(first)
        return begun < end and begun + float(rest.partition(b",")[0]) > start
    except ValueError:  # no span, or one of another program
        return True


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
