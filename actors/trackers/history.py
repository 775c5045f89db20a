"""History of a run as a tracker gets it: one entry per step, read from metrics.jsonl, evals.jsonl and samples.jsonl.

A step is given out once, complete: its metrics, the evaluation of its version if one is due, and samples of its
completions. It waits for its evaluation until that is there, or a later one is, or the run is over; and for
SETTLE_SECONDS, since a packer that crashes may write its newest lines again. Lines that were cut off and differ when
they are written again are reported: the run went back to an older step.
"""

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from actors.telemetry.names import renamed, renamed_evaluation
from actors.telemetry.reporter import OLDER_SAMPLES, SAMPLES
from actors.telemetry.tail import Tail
from actors.trackers.protocol import MAX_TEXT_CHARACTERS, Entry, Table
from schemas.config.trackers import MetricNames

SETTLE_SECONDS = 1.0
"""Age of a line in seconds, from which on it is given out."""
MAX_AHEAD = 500
"""Largest number of lines in memory; more are read once these are given out."""
VOLATILE = ("time", "engine_tokens", "engine_busy_seconds", "reward_groups", "reward_busy_seconds", "torch_threads")
"""Values that differ if the same step is recorded twice, besides those of `seconds_*`."""


@dataclass(frozen=True)
class _Waiting:
    line: Mapping[str, Any]
    seen_at: float


class History:
    """Reader of a run's files, entry by entry.

    Args:
        output: folder of the run.
        is_due: returns whether a version is evaluated.
        names: names of the metrics.
        clock: monotonic time in seconds.
        turn: called for each line that is read, since a long run takes minutes to read.
    """

    def __init__(
        self,
        output: Path,
        is_due: Callable[[int], bool],
        names: MetricNames = "ours",
        clock: Callable[[], float] = time.monotonic,
        turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_due, self._names, self._clock, self._turn = is_due, names, clock, turn
        self._steps, self._evals = Tail(output / "metrics.jsonl"), Tail(output / "evals.jsonl")
        self._samples = SampleReader(output)
        self._lines: deque[_Waiting] = deque()
        self._evaluations: dict[int, Mapping[str, Any]] = {}
        self._zero_is_open = is_due(0)
        self.newest = 0
        """Newest step whose line has been read."""
        self.next = 0
        """First step that is still to be given out; earlier lines are only compared with those that were sent."""

    def restart(self, first: int | None = None) -> None:
        """Read the files from the start again, to give out this step and later ones; None: to go on as before."""
        self.next = self.next if first is None else first
        self._steps.restart()
        self._evals.restart()
        self._samples.restart()
        self._lines.clear()
        self._evaluations.clear()
        self._zero_is_open, self.newest = self._is_due(0), 0

    def read(self, sent: Mapping[int, str]) -> int | None:
        """Read on; return the first step that was sent and has another line now, None if there is none.

        Args:
            sent: digest of the line of each step that was ever sent, by step.
        """
        # a packer that starts, and a return to an older step, cut lines off
        if self._steps.was_cut() or self._evals.was_cut():
            self.restart()
        for record in self._evals.new():
            self._evaluations[int(record["version"])] = record["environments"]
        now = self._clock()
        room = MAX_AHEAD - len(self._lines)
        for record in self._steps.new() if room > 0 else ():
            self._turn()
            step = self.newest = int(record["step"])
            if sent.get(step) and sent[step] != digest_of(record):
                self.restart()
                return step
            if step >= self.next:
                self._lines.append(_Waiting(record, now))
                room -= 1
            if room <= 0:
                break
        return None

    def take(self, *, is_over: bool) -> Iterator[tuple[Entry, str]]:
        """Yield the entries that are complete, each with the digest of its line.

        Args:
            is_over: True after the end of the run, when nothing can come any more.
        """
        if self._zero_is_open:
            if not self._has_evaluation(0, is_over=is_over):
                return
            self._zero_is_open = False
            if 0 in self._evaluations and self.next == 0:
                self.next = 1
                first = self._lines[0].line if self._lines else {}
                yield self._entry(0, {"time": first.get("time") or time.time()}), ""
        while self._lines:
            waiting = self._lines[0]
            step = int(waiting.line["step"])
            is_settled = is_over or self._clock() - waiting.seen_at >= SETTLE_SECONDS
            if not is_settled or not self._has_evaluation(step, is_over=is_over):
                return
            self._lines.popleft()
            self.next = step + 1
            yield self._entry(step, waiting.line), digest_of(waiting.line)

    def _has_evaluation(self, step: int, *, is_over: bool) -> bool:
        """Return whether the evaluation of a step is there, or need not be waited for."""
        return is_over or not self._is_due(step) or any(version >= step for version in self._evaluations)

    def _entry(self, step: int, line: Mapping[str, Any]) -> Entry:
        values = {name: value for name, value in line.items() if name not in ("step", "time", "weights")}
        results = self._evaluations.get(step, {})
        found = renamed(values, self._names) | renamed_evaluation(results, self._names)
        plain = {name: float(value) for name, value in found.items() if _is_number(value)}
        samples = table_of(self._samples.take(step)) if step else None
        return Entry(step, float(line.get("time") or 0.0), plain, samples)


class SampleReader:
    """Reader of the training samples in samples.older.jsonl and samples.jsonl, in the order of steps."""

    def __init__(self, output: Path) -> None:
        self._tails = [Tail(output / name) for name in (OLDER_SAMPLES, SAMPLES)]
        self._next: Mapping[str, Any] | None = None
        """First line of a later step."""

    def restart(self) -> None:
        """Read the files from the start again."""
        for tail in self._tails:
            tail.restart()
        self._next = None

    def take(self, step: int) -> list[Mapping[str, Any]]:
        """Return the groups of a step; those of earlier steps are left out."""
        if any(tail.was_cut() for tail in self._tails):
            self.restart()  # a file has become the older one, or lines were cut off
        if self._next is not None and self._next["step"] > step:
            return []
        found = [self._next] if self._next is not None and self._next["step"] == step else []
        self._next = None
        for record in chain.from_iterable(tail.new() for tail in self._tails):
            if record["purpose"] == "eval" or record["step"] < step:
                continue
            if record["step"] > step:
                self._next = record
                break
            found.append(record)
        return found


def table_of(groups: list[Mapping[str, Any]]) -> Table | None:
    """Return the completions of a step as a table, with the columns of TRL's table `completions`; None without any.

    Completions of an environment with turns have the whole conversation as JSON in the column `completion`.
    """
    if not groups:
        return None
    rewards = list(dict.fromkeys(name for group in groups for name in group["rewards"]))
    columns = ("step", "environment", "prompt", "completion", "reward", *rewards, "advantage", "turns", "tool_calls")
    rows = [_row(group, index, rewards) for group in groups for index in range(len(group["completions"]))]
    return Table(columns, tuple(rows))


def _row(group: Mapping[str, Any], index: int, rewards: list[str]) -> tuple[Any, ...]:
    prompt, played = group["prompt"], "messages" in group
    # a prompt may be a list of messages
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    said = json.dumps(group["messages"][index]) if played else group["completions"][index]
    return (
        *(group["step"], group["environment"], _sendable(text), _sendable(said)),
        group["reward"][index],
        *(group["rewards"][name][index] if name in group["rewards"] else None for name in rewards),
        group["advantages"][index],
        *((group["turns"][index], group["tool_calls"][index]) if played else (None, None)),
    )


def _sendable(text: str) -> str:
    """Return a text as every tracker takes it: cut, and without half a pair of UTF-16, which a data set may contain."""
    return text[:MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode()


def digest_of(line: Mapping[str, Any]) -> str:
    """Return the digest of a step's line, without values that differ if the same step is recorded again."""
    kept = {name: value for name, value in line.items() if name not in VOLATILE and not name.startswith("seconds_")}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
