"""Checker of files in the JSON trace event format, by its documented rules and those of Perfetto's reader.

Perfetto's own reader is a program that its Python package downloads at the first use, which tests can't. So the rules
are here: what the format's description asks for, and what the reader drops or counts as an error (spans of a thread
that overlap without nesting, flows that no span encloses, flows without a start).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}
"""Metadata events, with their argument and its type."""
FLOW = {"s": 0, "t": 1, "f": 2}
TIE = 1e-3
"""Microseconds; times are written with three digits behind the point."""

Event = dict[str, Any]


def problems_of(document: Any) -> list[str]:
    """Return what is wrong with a parsed trace file; empty if nothing is."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    found = [] if document.get("displayTimeUnit") in ("ms", "ns") else ["displayTimeUnit is neither ms nor ns"]
    events = document["traceEvents"]
    found += [f"event {number}: {problem}" for number, event in enumerate(events) for problem in _of_event(event)]
    if found:
        return found
    return [*_of_names(events), *_of_nesting(events), *_of_flows(events)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_metadata(event: Event) -> bool:
    wanted, args = METADATA.get(str(event.get("name")), {}), event.get("args", {})
    return (
        bool(wanted) and set(args) == set(wanted) and all(isinstance(args[key], kind) for key, kind in wanted.items())
    )


RULES: list[tuple[str, str, Callable[[Event], bool]]] = [
    ("XMistf", "name is no text", lambda e: isinstance(e.get("name"), str)),
    ("XMistf", "pid is no number", lambda e: isinstance(e.get("pid"), int)),
    ("XMistf", "tid is no number", lambda e: isinstance(e.get("tid"), int)),
    ("XMistf", "ts is no time", lambda e: _is_number(e.get("ts")) and e["ts"] >= 0),
    ("XMistf", "args is no object", lambda e: isinstance(e.get("args", {}), dict)),
    ("X", "dur is no length", lambda e: _is_number(e.get("dur")) and e["dur"] >= 0),
    ("Xstf", "cat is no text", lambda e: isinstance(e.get("cat"), str)),
    ("i", "s is no scope", lambda e: e.get("s") in ("g", "p", "t")),
    ("stf", "a flow without id", lambda e: isinstance(e.get("id"), int | str)),
    ("f", "a flow's end would bind to the next span, not to the one around it", lambda e: e.get("bp") == "e"),
    ("M", "unknown metadata", _is_metadata),
]
"""Phases, what is wrong, and what is right."""


def _of_event(event: Any) -> list[str]:
    if not isinstance(event, dict) or event.get("ph") not in tuple("XMistf"):
        return ["is no object with a known phase"]
    return [words for phases, words, is_right in RULES if event["ph"] in phases and not is_right(event)]


def _of_names(events: list[Event]) -> list[str]:
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"}
    found = [f"thread {key} has no name" for key in sorted(used - named)]
    return found + [f"process {pid} has no name" for pid in sorted({pid for pid, _ in used} - processes)]


def _threads(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    return threads


def _of_nesting(events: list[Event]) -> list[str]:
    found = []
    for thread, spans in _threads(events).items():
        ends: list[float] = []
        for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            while ends and ends[-1] <= span["ts"] + TIE / 2:
                ends.pop()
            end = span["ts"] + span["dur"]
            if ends and end > ends[-1] + TIE:
                found.append(f"thread {thread}: {span['name']} at {span['ts']} ends outside of the span around it")
            ends.append(end)
    return found


def _of_flows(events: list[Event]) -> list[str]:
    threads, flows, found = _threads(events), defaultdict(list), []
    for event in events:
        if event["ph"] in FLOW:
            flows[event["cat"], event["id"]].append(event)
            spans = threads.get((event["pid"], event["tid"]), [])
            if not any(span["ts"] - TIE <= event["ts"] <= span["ts"] + span["dur"] + TIE for span in spans):
                found.append(f"flow {event['id']}: no span around its {event['ph']} at {event['ts']}")
    for (_, flow), steps in flows.items():
        phases = [FLOW[event["ph"]] for event in sorted(steps, key=lambda event: (event["ts"], FLOW[event["ph"]]))]
        if phases != sorted(phases) or phases.count(0) != 1 or phases.count(2) != 1:
            found.append(f"flow {flow}: is no start, steps and end in the order of time")
    return found
