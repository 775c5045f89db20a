"""Reader of the spans that the actors of a run have written (`actors.telemetry.spans`)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import read_lines
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


def read_spans(folder: Path) -> Recorded:
    """Return the spans in the files of a folder; none if the folder is not there.

    Half lines of killed processes, and lines of other programs, are left out. All processes of a machine share its
    monotonic clock, so one difference to the wall clock holds for all of them: that of the machine's newest write.
    """
    files = [[path.with_name(path.name.removesuffix(SUFFIX) + OLDER_SUFFIX), path] for path in _newer(folder)]
    lines = [line for pair in files for path in pair if path.is_file() for line in read_lines(path)]
    heads = [head for line in lines if (head := _head_of(line)) is not None]
    # by the machine's own clock, which tells the order of writes whatever its wall clock did meanwhile
    heads.sort(key=lambda head: head.monotonic)
    offsets = {head.machine: head.wall - head.monotonic for head in heads}
    lost: dict[str, int] = {}
    processes: dict[tuple[str, int], float] = {}
    for head in heads:
        lost[head.actor] = lost.get(head.actor, 0) + head.lost
        processes.setdefault((head.actor, head.pid), head.monotonic + offsets[head.machine])
    spans, owner = [], None
    for line in lines:
        if (head := _head_of(line)) is not None:
            owner = head
        elif owner is not None and (span := _span_of(line, owner.actor, offsets[owner.machine])) is not None:
            spans.append(span)
    started = [(actor, pid, at) for (actor, pid), at in processes.items()]
    return Recorded(spans, started, {actor: number for actor, number in lost.items() if number})


def _newer(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.endswith(OLDER_SUFFIX))


def _head_of(line: Any) -> _Head | None:
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
