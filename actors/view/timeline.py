"""Timeline of a step for its page: rows of spans by actor, where the time went in words, and the file for Perfetto.

Both read the blocks of the files that have spans of the step, and all of a file at the first look alone. The file for
Perfetto also has the earlier spans of the step's groups.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from actors.ops.trace.files import Span, SpanIndex
from actors.ops.trace.picture import place_of, title_of, trace_events
from actors.ops.trace.rows import Row, rows_of
from actors.ops.trace.window import Window, steps_of, window_of
from actors.ops.trace.words import words
from schemas.errors import ConfigError

SHORTEST = 1 / 600
"""Share of the step below which a span is left out of the picture, which has about two points for it."""
TRACK_ROWS = 12
"""Rows of a track in the picture; more groups at once are counted only."""
TEXT_CHARACTERS = 120
"""Characters of the arguments of a span."""

Value = dict[str, Any]


class NoTimelineError(Exception):
    """There are no spans of the step; the text says why."""


def timeline_of(index: SpanIndex, step: int) -> Value:
    """Return the picture of a step: `words` alone if there is none, else rows of spans.

    A span is [start, seconds, name, whether it waits, depth, text]; seconds are from the start of the step on, which
    is that of the trainer's wait for its batch.
    """
    try:
        with _said_to_pages():
            window = window_of(index.marked(), step, step)
    except NoTimelineError as error:
        return {"words": str(error), "actors": []}
    recorded = index.within(window.start, window.end)
    by_actor: dict[str, list[Span]] = {}
    for span in recorded.spans:
        by_actor.setdefault(span.actor, []).append(span)
    actors = [{"actor": actor, **_rows(by_actor[actor], window)} for actor in sorted(by_actor, key=place_of)]
    return {
        "words": "",
        "seconds": window.seconds,
        "start": window.start,
        "actors": actors,
        "shortest": SHORTEST * window.seconds,
        "said": words(recorded, window),
    }


def trace_of(index: SpanIndex, step: int) -> Value:
    """Return the content of the trace file of a step.

    Raises:
        NoTimelineError: there are no spans of the step.
    """
    with _said_to_pages():
        return trace_events(*steps_of(index, step, step))


@contextmanager
def _said_to_pages() -> Iterator[None]:
    """Raise NoTimelineError in place of a ConfigError of the block, without the option that only the command has."""
    try:
        yield
    except ConfigError as error:
        raise NoTimelineError("; ".join(error.problems).partition(": ")[2]) from error


def _rows(spans: list[Span], window: Window) -> Value:
    """Return the rows of an actor, and the numbers of spans that are too short or in too many rows to be shown."""
    rows, short, hidden = [], 0, 0
    for row in rows_of(spans):
        if row.index >= TRACK_ROWS:
            hidden += len(row.spans)
            continue
        drawn = list(_drawn(row, window))
        short += len(row.spans) - len(drawn)
        rows.append({"title": title_of(row), "spans": drawn})
    return {"rows": rows, "short": short, "hidden": hidden}


def _drawn(row: Row, window: Window) -> list[list[Any]]:
    """Return the spans of a row that are long enough, cut to the window; `depth` counts the spans around a span."""
    found: list[list[Any]] = []
    ends: list[float] = []
    for span in row.spans:
        while ends and ends[-1] <= span.start:
            ends.pop()
        start, end = max(span.start, window.start), min(span.end, window.end)
        if end - start >= SHORTEST * window.seconds:
            times = [round(start - window.start, 6), round(end - start, 6)]
            found.append([*times, span.name, span.waits, len(ends), _text(span.args, span.seconds)])
        ends.append(span.end)
    return found


def _text(args: Mapping[str, Any], seconds: float) -> str:
    """Return length and arguments of a span; lists of groups are left out."""
    told = [f"{name} {value}" for name, value in args.items() if not isinstance(value, list | dict)]
    return ", ".join([f"{seconds:.6g} s", *told])[:TEXT_CHARACTERS]
