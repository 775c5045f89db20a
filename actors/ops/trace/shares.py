"""Where the time of an actor goes: seconds by kind of span, inner spans counted once, as inner ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.ops.trace.files import Span
from actors.ops.trace.rows import ROUNDING_SECONDS, rows_of

Interval = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Time of one track within some intervals."""

    track: str
    seconds: float
    """Length of the intervals together."""
    covered: float
    """Seconds of spans, those of parallel lanes added: two groups at once for a second are two."""
    lanes: bool
    """True if the track has lanes, so that `covered` may exceed `seconds`."""
    by_name: dict[str, float]
    """Seconds of each kind of span without inner spans, most first."""
    waits: frozenset[str]
    """Kinds of spans in which the track waits."""

    @property
    def waited(self) -> float:
        """Seconds of waiting."""
        return sum(seconds for name, seconds in self.by_name.items() if name in self.waits)

    @property
    def worked(self) -> float:
        """Seconds of work."""
        return self.covered - self.waited


def shares_of(spans: Sequence[Span], within: Sequence[Interval]) -> list[Shares]:
    """Return the time of each track of an actor within intervals that do not overlap."""
    length = sum(end - start for start, end in within)
    names: dict[str, dict[str, float]] = {}
    waits: dict[str, set[str]] = {}
    for row in rows_of(spans):
        found = names.setdefault(row.track, {})
        for span, start, end in _own_pieces(row.spans):
            seconds = sum(max(0.0, min(end, until) - max(start, since)) for since, until in _near(within, start, end))
            if seconds > 0:
                found[span.name] = found.get(span.name, 0.0) + seconds
                if span.waits:
                    waits.setdefault(row.track, set()).add(span.name)
    with_lanes = {span.track for span in spans if span.lane}
    return [
        Shares(
            track,
            length,
            sum(found.values()),
            track in with_lanes,
            dict(sorted(found.items(), key=lambda item: -item[1])),
            frozenset(waits.get(track, ())),
        )
        for track, found in names.items()
        if found
    ]


def _own_pieces(spans: Sequence[Span]) -> Iterable[tuple[Span, float, float]]:
    """Yield the parts of each span that no inner span covers. Spans are nested, and sorted by start."""
    opened: list[tuple[Span, float]] = []
    """Open spans from outer to inner, each with the time up to which it has been told."""

    def close(until: float) -> Iterable[tuple[Span, float, float]]:
        while opened and opened[-1][0].end <= until + ROUNDING_SECONDS:
            span, told = opened.pop()
            if span.end > told:
                yield span, told, span.end
            if opened:
                outer, outer_told = opened[-1]
                opened[-1] = outer, max(outer_told, span.end)

    for span in spans:
        yield from close(span.start)
        if opened:
            outer, told = opened[-1]
            if span.start > told:
                yield outer, told, span.start
            opened[-1] = outer, max(told, span.start)
        opened.append((span, span.start))
    yield from close(float("inf"))


def _near(within: Sequence[Interval], start: float, end: float) -> Iterable[Interval]:
    # few intervals, for example the waits of ten steps
    return (interval for interval in within if interval[0] < end and interval[1] > start)
