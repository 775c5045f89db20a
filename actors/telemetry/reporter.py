"""Files of a run for people and programs: metrics.jsonl, evals.jsonl, samples.jsonl, summary.json.

All values of a step go through `Reporter.report_step`, where trackers can be added. A failed write, as on a full disk,
raises WriteError and may be repeated: a partial line is cut off before anything else is written.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from actors.telemetry.writer import Writer
from schemas.messages import ScoredGroup

SAMPLES, OLDER_SAMPLES = "samples.jsonl", "samples.older.jsonl"
MAX_SAMPLES_BYTES = 256 << 20
"""Size of samples.jsonl in bytes, above which it becomes the older file, replacing the one before."""
BLOCK_BYTES = 1 << 20
"""Bytes read at a time from the end of a file."""
StepSink = Callable[[int, Mapping[str, float]], None]
Line = dict[str, Any]
Size = tuple[int, int]
"""Height and width of an image in pixels."""


class Reporter:
    """Writer of a run's files.

    Args:
        output: folder of the run; created if needed.
        sinks: functions that get every step's values too.
    """

    def __init__(self, output: Path, sinks: tuple[StepSink, ...] = ()) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._output, self._sinks = output, sinks
        self.writer = Writer()
        self._whole: dict[str, int] = {}
        """Length of the complete lines, for each file whose last write may have left a partial line, by file name."""

    def begin(self, recorded_step: int, evaluated: Collection[int], on_step: Callable[[Line], None]) -> None:
        """Bring the files to the state that the ledger has recorded.

        Later lines, left by a crash, are cut off and written again; lines of another run are removed. summary.json is
        removed, since a run under way has none. metrics.jsonl and evals.jsonl are read line by line, samples only from
        the end as far as necessary.

        Args:
            recorded_step: last step recorded by the ledger.
            evaluated: versions whose evaluation is recorded by the ledger.
            on_step: called with each step's line, in order.
        """
        (self._output / "summary.json").unlink(missing_ok=True)
        versions = frozenset(evaluated)
        # samples have gigabytes in a long run, so only lines to be cut off are read
        for name in (SAMPLES, OLDER_SAMPLES):
            if self._cut_end(
                name,
                lambda line: line["step"] in versions if line["purpose"] == "eval" else line["step"] <= recorded_step,
            ):
                break
        self._keep("evals.jsonl", lambda line: line["version"] in versions)
        self._keep("metrics.jsonl", lambda line: line["step"] <= recorded_step, on_step)

    def report_eval(self, version: int, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """Append an evaluation to evals.jsonl, as a line."""
        self._append("evals.jsonl", {"version": version, "environments": results})

    def report_step(self, step: int, values: Mapping[str, float], weights: str = "") -> Line:
        """Append a step to metrics.jsonl; return the line as it will be read again.

        Args:
            step: number of the step.
            values: plain numbers by name; NaN and infinity become null.
            weights: digest of the version made by the step; empty if unknown.
        """
        line: Line = {"step": step} | {name: _plain(value) for name, value in values.items()}
        if weights:
            line["weights"] = weights
        self._append("metrics.jsonl", line)
        # after the line is written: a step whose write is tried again reaches a sink once
        for sink in self._sinks:
            sink(step, values)
        return line

    def report_samples(self, step: int, group: ScoredGroup, images: Mapping[str, Size] | None = None) -> None:
        """Append a group to samples.jsonl. A file above MAX_SAMPLES_BYTES first becomes the older file.

        Args:
            step: step of the group, or version that it evaluates.
            group: the group.
            images: height and width of its images, by digest.
        """
        rewards = {
            name: [_plain(value) for value in values]
            for name, values in zip(group.reward_names, group.rewards_FG.tolist(), strict=True)
        }
        self._append(
            SAMPLES,
            {
                "step": step,
                "ordinal": group.ordinal,
                "purpose": group.purpose,
                "environment": group.environment,
                "prompt": group.prompt,
                "columns": group.columns,
                "completions": group.completions,
                "stop_conditions": group.stop_conditions,
                "reward": [_plain(value) for value in group.rewards_G.tolist()],
                "rewards": rewards,
                "advantages": [round(value, 6) for value in group.advantages_G.tolist()],
                "versions": sorted({version for _, version in group.policies}),
            }
            | ({"images": images} if images else {})
            | ({"logged": group.logged_columns} if group.logged_columns else {})
            | _of_environment(group),
        )

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, atomically: a reader finds all of it or nothing."""
        path, text = self._output / "summary.json", json.dumps(summary, indent=2) + "\n"
        self.writer.write(path, "summary", partial(replace, path, text))

    def _keep(self, name: str, good: Callable[[Line], bool], take: Callable[[Line], None] = lambda line: None) -> None:
        """Cut off the lines of a file that are not good; an absent file stays absent.

        Normally these lines are at the end, and cutting needs no room on the disk. A file written by another program
        may have them anywhere, and is rewritten.
        """
        path = self._output / name
        if not path.is_file():
            return
        length, cut, scattered = 0, False, False
        for raw, line in _lines(path):
            if line is None or not good(line):
                cut = True
                continue
            take(line)
            scattered = scattered or cut or not raw.endswith(b"\n")
            length += len(raw)
        # scattered: a good line after a bad one, or without its line end, so cutting the end is not enough
        if scattered:
            staging = _staging(path)
            with staging.open("wb") as kept:
                lines = (raw.rstrip(b"\n") for raw, line in _lines(path) if line is not None and good(line))
                kept.writelines(raw + b"\n" for raw in lines)
            staging.replace(path)
        elif not length:
            path.unlink()
        elif cut:
            os.truncate(path, length)

    def _cut_end(self, name: str, good: Callable[[Line], bool]) -> bool:
        """Cut off the samples after the last good line of training; return whether there is such a line.

        Lines of training are in the order of steps, so all lines before a good one are good. Lines of an evaluation
        come later than their step's: good ones may follow bad ones, and are kept.
        """
        path = self._output / name
        if not path.is_file():
            return False
        evaluations: list[bytes] = []
        """Good lines of evaluations after the current position, last one first."""
        end = 0
        for start, raw in lines_from_the_end(path):
            line = record_of(raw)
            if line is None or not raw.endswith(b"\n") or not good(line):
                continue
            if line["purpose"] != "eval":
                end = start + len(raw)
                break
            evaluations.append(raw)
        if not end and not evaluations:
            path.unlink()
            return False
        kept = b"".join(reversed(evaluations))
        if end + len(kept) < path.stat().st_size:
            # in place, which needs no room on the disk
            with path.open("r+b") as file:
                file.seek(end)
                file.write(kept)
                file.truncate()
        return end > 0

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        path, line = self._output / name, (json.dumps(record) + "\n").encode()
        append = self._rotate_and_append if name == SAMPLES else self._append_line
        self.writer.write(path, line, partial(append, path, line))
        self._whole.pop(name, None)

    def _rotate_and_append(self, path: Path, line: bytes) -> None:
        if path.exists() and path.stat().st_size >= MAX_SAMPLES_BYTES:
            # the file replaces the older one, so both together have at most twice the limit and a line
            path.replace(self._output / OLDER_SAMPLES)
            self._whole.pop(SAMPLES, None)
        self._append_line(path, line)

    def _append_line(self, path: Path, line: bytes) -> None:
        """Append a line, after cutting off a partial line of an earlier write. Runs in the writer's thread."""
        with path.open("ab", buffering=0) as file:
            length = file.seek(0, os.SEEK_END)
            whole = min(self._whole.get(path.name, length), length)
            # kept until `_append` hears of success, so that the next write can cut a partial line off
            if whole < length:
                file.truncate(whole)
            self._whole[path.name] = whole
            rest = memoryview(line)
            # without a buffer, and in a loop: a nearly full disk writes a part, and fails at the next write
            while rest:
                rest = rest[file.write(rest) :]


def _of_environment(group: ScoredGroup) -> dict[str, Any]:
    """Return what the line of a group with an environment has besides: conversations, turns, tool calls, errors."""
    if not group.transcripts:
        return {}
    turns, tool_calls, tool_failures = group.counts.T.tolist()
    return {
        "messages": [[*prompt, *behind] for prompt, behind in map(group.transcript, range(group.num_completions))],
        "turns": turns,
        "tool_calls": tool_calls,
        "tool_failures": tool_failures,
        "turn_rewards": group.turn_rewards.tolist(),
        "info": [_plain_values(group.info(g)) for g in range(group.num_completions)],
        "failures": group.failures,
    }


def read_lines(path: Path) -> list[Line]:
    """Return the records of a .jsonl file, without a last line cut short by a crash."""
    return [line for _, line in _lines(path) if line is not None]


def lines_from_the_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line with line end) from the last line to the first; memory: a block and a line."""
    with path.open("rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        pieces: list[bytes] = []
        """Pieces of the line that starts before the current block, last piece first."""
        while start:
            size = min(BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            block = file.read(size)
            stop = size
            while (newline := block.rfind(b"\n", 0, stop)) >= 0:
                line = block[newline + 1 : stop] + b"".join(reversed(pieces))
                pieces.clear()
                if line:
                    end -= len(line)
                    yield end, line
                pieces.append(b"\n")
                stop = newline
            pieces.append(block[:stop])
        line = b"".join(reversed(pieces))
        if line:
            yield 0, line


def record_of(raw: bytes) -> Line | None:
    """Parse a line; return None if it is no JSON, for example cut short by a crash."""
    try:
        return json.loads(raw)  # type: ignore[no-any-return]
    except ValueError:
        return None


def _lines(path: Path) -> Iterator[tuple[bytes, Line | None]]:
    """Yield each line as bytes, with its record; None if it has none."""
    with path.open("rb") as file:
        for raw in file:
            yield raw, record_of(raw)


def replace(path: Path, text: str) -> None:
    """Replace a whole file, atomically."""
    staging = _staging(path)
    staging.write_text(text, encoding="utf-8")
    staging.replace(path)


def _staging(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _plain_values(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment's info as JSON can hold it."""
    return {name: _plain(value) if isinstance(value, float) else value for name, value in info.items()}


def _plain(value: float) -> float | None:
    """Return a number as JSON can hold it: None for NaN and infinity."""
    return value if math.isfinite(value) else None
