"""A timeline in words: the share of time in which each actor works and waits, and the work done meanwhile elsewhere."""

from collections.abc import Iterable, Sequence

from actors.ops.trace.files import Recorded, Span
from actors.ops.trace.picture import place_of
from actors.ops.trace.shares import Interval, Shares, shares_of
from actors.ops.trace.window import TRAINER, Window

SHOWN = 5
"""Kinds of spans shown of a track."""
LEAST = 0.005
"""Smallest share of time that is worth a word."""


def words(recorded: Recorded, window: Window) -> str:
    """Return the lines of `actors trace`."""
    first, last = (step.args["step"] for step in (window.steps[0], window.steps[-1]))
    number = len(window.steps)
    lines = [f"steps {first} to {last}: {window.seconds:.2f} s, {window.seconds / number:.3f} s a step"]
    actors: dict[str, list[Span]] = {}
    for span in recorded.spans:
        if span.start < window.end and span.end > window.start:
            actors.setdefault(span.actor, []).append(span)
    order = sorted(actors, key=place_of)
    lines += [line for actor in order for line in _lines(actor, actors[actor], [(window.start, window.end)])]
    waits = [_cut(span, window) for span in actors.get(TRAINER, ()) if span.name == "wait for batch"]
    waited = sum(end - start for start, end in waits)
    if waited >= LEAST * window.seconds:
        lines += ["", f"while {TRAINER} waited for its batches ({waited:.2f} s, {waited / window.seconds:.0%}):"]
        others = [actor for actor in order if actor != TRAINER]
        lines += [line for actor in others for line in _lines(actor, actors[actor], waits)]
    lost = [f"{actor} {number}" for actor, number in sorted(recorded.lost.items())]
    return "\n".join([*lines, *([f"lost spans of the whole run: {', '.join(lost)}"] if lost else [])])


def _cut(span: Span, window: Window) -> Interval:
    return max(span.start, window.start), min(span.end, window.end)


def _lines(actor: str, spans: Sequence[Span], within: Sequence[Interval]) -> Iterable[str]:
    """Yield a line for each track of an actor with something to say."""
    for shares in shares_of(spans, within):
        if shares.covered >= LEAST * shares.seconds:
            yield f"  {f'{actor} {shares.track}':24} {_sentence(shares)}"


def _sentence(shares: Shares) -> str:
    whole = shares.covered if shares.lanes else shares.seconds
    opening = f"{shares.covered / shares.seconds:.1f} at once: " if shares.lanes else ""
    parts = [
        f"{verb} {seconds / whole:.0%} ({_parts(shares, is_wait, whole)})"
        for verb, is_wait, seconds in (("works", False, shares.worked), ("waits", True, shares.waited))
        if seconds >= LEAST * whole
    ]
    rest = 1 - (shares.covered / whole)
    if rest >= LEAST:
        parts.append(f"nothing recorded {rest:.0%}")
    return opening + ", ".join(parts)


def _parts(shares: Shares, is_wait: bool, whole: float) -> str:
    found = [(name, seconds) for name, seconds in shares.by_name.items() if (name in shares.waits) is is_wait]
    shown = [(name.removeprefix("wait "), seconds) for name, seconds in found[:SHOWN] if seconds >= LEAST * whole]
    told = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in shown)
    return told or "of many kinds"
