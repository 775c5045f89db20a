"""Timelines made by hand: spans with times that one can check in the head, and files of them."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from actors.ops.trace.files import Recorded, Span, SpanIndex

WAITS = ("wait for batch", "wait for requests", "request", "wait for events")


def made(actor: str, track: str, name: str, start: float, end: float, lane: str = "", **args: Any) -> Span:
    """A span of an actor."""
    return Span(actor, track, lane, name, start, end - start, name in WAITS, args)


def ten_steps() -> Recorded:
    """Steps 1 to 10 of 1 s each: 0.25 s wait, 0.5 s forward and backward, 0.25 s publishing; 2 groups a step.

    The groups of step k are sampled from k − 1 to k − 0.1 and scored for 0.05 s. The engine decodes, but for 0.1 s.
    """
    spans = []
    for k in range(1, 11):
        spans += [
            made("trainer-0", "main", "wait for batch", k, k + 0.25, step=k),
            made("trainer-0", "main", "step", k + 0.25, k + 1, step=k, ordinals=[2 * k - 2, 2 * k - 1]),
            made("trainer-0", "main", "forward and backward", k + 0.25, k + 0.75, micro_batch=0),
            made("trainer-0", "main", "publish weights", k + 0.75, k + 1),
            made("inference-0", "engine", "wait for requests", k, k + 0.1),
            made("inference-0", "engine", "decode", k + 0.1, k + 1, rounds=40),
            made("packer-0", "main", "pack", k + 0.2, k + 0.22, step=k),
        ]
        for member in range(2):
            ordinal, lane = 2 * k - 2 + member, f"{2 * k - 2 + member}.1"
            spans += [
                made("rollout-0", "groups", "group", k - 1, k - 0.1, lane, ordinal=ordinal, purpose="train"),
                made("rollout-0", "groups", "request", k - 0.9, k - 0.1, lane, engine="inference-0"),
                made("reward-0", "score", "score", k - 0.08, k - 0.03, str(member), ordinal=ordinal),
            ]
    return Recorded(spans, [("trainer-0", 4711, 0.5), ("trainer-0", 4712, 3.5)], {"packer-0": 3})


def write_file(
    folder: Path, actor: str, lines: Iterable[Any], *, machine: str = "a", wall: float = 1000.0, pid: int = 1
) -> None:
    """Append a head, at 0 s of the machine's monotonic clock, and lines to an actor's file."""
    head = {"actor": actor, "pid": pid, "machine": machine, "wall": wall, "monotonic": 0.0, "lost": 0}
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / f"{actor}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in (head, *lines))


def as_lines(spans: Iterable[Span]) -> list[Any]:
    """Spans as lines of a file, with their times on the monotonic clock."""
    return [[s.start, s.seconds, s.track, s.lane, s.name, int(s.waits), dict(s.args)] for s in spans]


def write_spans(folder: Path, recorded: Recorded) -> None:
    """Write spans to a file per actor; their times are those of the wall clock, from 0 on."""
    for actor in sorted({span.actor for span in recorded.spans}):
        own = [span for span in recorded.spans if span.actor == actor]
        write_file(folder, actor, as_lines(own), wall=0.0)


def all_spans(folder: Path) -> Recorded:
    """All spans in the files of a folder."""
    return SpanIndex(folder, "", ()).within(-math.inf, math.inf)
