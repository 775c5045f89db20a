"""Rows of a timeline: spans that overlap without one being inside the other stand below each other.

A thread has one row. Pieces of work that share a thread, such as the groups of a rollout, have a lane each, and lanes
take turns on as few rows as possible:

    lane 17    ─────group─────            row 0:  17  19
               ──request──                row 1:  18
    lane 18        ─────group─────
    lane 19                     ──group──
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.ops.trace.files import Span

ROUNDING_SECONDS = 2e-6
"""Overlap that is taken for rounding: files have microseconds."""


@dataclass(frozen=True)
class Row:
    """Spans of one row, by start; a span that starts inside another also ends inside."""

    track: str
    index: int
    spans: Sequence[Span]


def rows_of(spans: Iterable[Span]) -> list[Row]:
    """Return the rows of an actor's spans, by track; a track's first row is its longest used."""
    lanes: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.track, span.lane].append(span)
    # the rows of a lane are kept together in time: a row of the track is taken for the whole life of a lane's row
    pieces = [(track, piece) for (track, _), found in lanes.items() for piece in _nested(found)]
    pieces.sort(key=lambda both: both[1][0].start)
    placed: dict[str, list[list[Span]]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    for track, piece in pieces:
        end = max(span.end for span in piece)
        for index, until in enumerate(ends[track]):
            if piece[0].start >= until:
                placed[track][index] += piece
                ends[track][index] = end
                break
        else:
            placed[track].append(list(piece))
            ends[track].append(end)
    return [Row(track, index, row) for track in sorted(placed) for index, row in enumerate(placed[track])]


def _nested(spans: Sequence[Span]) -> list[list[Span]]:
    """Divide the spans of a lane into as few rows as a first fit finds, in each of which spans are nested."""
    rows: list[tuple[list[Span], list[float]]] = []
    # an outer span comes before the inner ones that start with it
    for span in sorted(spans, key=lambda span: (span.start, -span.seconds)):
        for row, open_ends in rows:
            while open_ends and open_ends[-1] <= span.start + ROUNDING_SECONDS:
                open_ends.pop()
            if not open_ends or span.end <= open_ends[-1] + ROUNDING_SECONDS:
                row.append(span)
                open_ends.append(span.end)
                break
        else:
            rows.append(([span], [span.end]))
    return [row for row, _ in rows]
