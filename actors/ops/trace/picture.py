"""A timeline as a file in the JSON trace event format of Chrome and Perfetto.

Each actor is a process of the file, each row of its spans a thread. Spans are complete events (`X`), the start of a
process is an instant (`i`), and a group's way from sampling to the step that trained it is a flow (`s`, `t`, `f`) whose
id is the ordinal. Times are microseconds from the first event on.

Source: Trace Event Format (Google), and Perfetto's reader, which drops spans of a thread that overlap without nesting.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from actors.ops.trace.files import Recorded, Span
from actors.ops.trace.rows import Row, rows_of
from actors.ops.trace.window import Window

ORDER = ("packer", "trainer", "inference", "rollout", "reward")
"""Order of kinds of actors from top to bottom; others follow."""
MICRO = 1e6

Event = dict[str, Any]


def trace_events(recorded: Recorded, window: Window) -> dict[str, Any]:
    """Return the content of a trace file: what happens in the window, and the sampling and scoring of its groups."""
    trained = window.step_of
    shown = [span for span in recorded.spans if _is_shown(span, window, trained.keys())]
    zero = min([window.start, *(span.start for span in shown)])
    events: list[Event] = []
    places: dict[int, tuple[int, int]] = {}
    """Process and thread of each span in the file, by the identity of the span."""
    by_actor: dict[str, list[Span]] = {}
    for span in shown:
        by_actor.setdefault(span.actor, []).append(span)
    for pid, actor in enumerate(sorted(by_actor, key=place_of), 1):
        rows = rows_of(by_actor[actor])
        events += [_meta(pid, 0, "process_name", name=actor), _meta(pid, 0, "process_sort_index", sort_index=pid)]
        for tid, row in enumerate(rows, 1):
            events += [_meta(pid, tid, "thread_name", name=title_of(row))]
            events += [_meta(pid, tid, "thread_sort_index", sort_index=tid)]
            events += _complete(row, pid, tid, zero)
            places |= {id(span): (pid, tid) for span in row.spans}
        events += [
            {"ph": "i", "s": "p", "name": f"process {os_pid}", "pid": pid, "tid": 1, "ts": _micros(at - zero)}
            for name, os_pid, at in recorded.processes
            if name == actor and window.start <= at <= window.end
        ]
    for ordinal, way in _ways(shown, window).items():
        events += _flow(ordinal, way, places, zero)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "steps": f"{window.steps[0].args['step']}..{window.steps[-1].args['step']}",
            "zero_in_seconds_since_1970": zero,
            "lost_spans": dict(recorded.lost),
        },
    }


def _is_shown(span: Span, window: Window, ordinals: Collection[Any]) -> bool:
    """Return whether a span belongs in the file of a window: it overlaps the window, or has one of these groups."""
    return (span.start < window.end and span.end > window.start) or span.args.get("ordinal") in ordinals


def place_of(actor: str) -> tuple[int, str, int]:
    """Return the place of an actor: by kind, then by number, so that rollout-10 comes after rollout-9."""
    kind, _, number = actor.rpartition("-")
    known = ORDER.index(kind.partition("-")[0]) if kind.partition("-")[0] in ORDER else len(ORDER)
    return known, kind, int(number) if number.isdecimal() else 0


def title_of(row: Row) -> str:
    """Return the name of a row: that of its track, with a number where the track has several."""
    return f"{row.track} {row.index + 1}" if row.index or any(span.lane for span in row.spans) else row.track


def _meta(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _micros(seconds: float) -> float:
    return round(seconds * MICRO, 3)


def _complete(row: Row, pid: int, tid: int, zero: float) -> Iterable[Event]:
    """Yield the events of a row; an inner span ends no later than the outer ones, in spite of rounding."""
    open_ends: list[float] = []
    for span in row.spans:
        start, end = _micros(span.start - zero), _micros(span.end - zero)
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends:
            end = min(end, open_ends[-1])
        open_ends.append(end)
        args = {name: _plain(value) for name, value in span.args.items()}
        kind = "wait" if span.waits else "work"
        event = {"ph": "X", "name": span.name, "cat": kind, "pid": pid, "tid": tid, "ts": start}
        yield event | {"dur": max(0.0, round(end - start, 3))} | ({"args": args} if args else {})


def _plain(value: Any) -> Any:
    """Return a value as strict JSON has it: no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _ways(spans: Sequence[Span], window: Window) -> dict[int, list[Span]]:
    """Return the way of each group trained in the window: its sampling, its scoring, its step.

    Of several attempts the last one that ended before the step is taken.
    """
    trained = window.step_of
    ways: dict[int, list[Span]] = {}
    for name in ("group", "score"):
        last: dict[int, Span] = {}
        for span in spans:
            ordinal = span.args.get("ordinal")
            step = trained.get(ordinal) if isinstance(ordinal, int) and span.name == name else None
            if step is not None and ordinal is not None and span.end <= step.start and "error" not in span.args:
                last[ordinal] = max(span, last.get(ordinal, span), key=lambda one: one.end)
        for ordinal, span in last.items():
            ways.setdefault(ordinal, []).append(span)
    return {ordinal: [*way, trained[ordinal]] for ordinal, way in ways.items()}


def _flow(ordinal: int, way: Sequence[Span], places: dict[int, tuple[int, int]], zero: float) -> Iterable[Event]:
    """Yield the arrows of a group, from the end of its sampling to the start of its step."""
    for index, span in enumerate(way):
        pid, tid = places[id(span)]
        phase = "s" if index == 0 else "f" if index == len(way) - 1 else "t"
        # inside of its span, to which a reader binds it: just before the end, or at the start
        at = max(span.start, span.end - 1 / MICRO) if phase == "s" else span.start
        event = {"ph": phase, "id": ordinal, "cat": "group", "name": f"group {ordinal}", "pid": pid, "tid": tid}
        yield event | {"ts": _micros(at - zero)} | ({"bp": "e"} if phase == "f" else {})
