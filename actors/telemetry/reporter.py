"""What a run leaves behind for people and programs: metrics.jsonl, samples.jsonl, summary.json (DESIGN §11).

All step values go through `Reporter.report_step`; trackers join there. A write that fails, as on a full disk, raises
WriteError and may be repeated: what it has left of a line is cut off before anything else is written.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from schemas.messages import ScoredGroup

StepSink = Callable[[int, Mapping[str, float]], None]
Line = dict[str, Any]


class WriteError(Exception):
    """A file can't be written now, and what should have been written counts as not written."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's error into one that names the file.

    Raises:
        WriteError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}") from error


class Reporter:
    """Writes under one output directory. `sinks` get every step's values too."""

    def __init__(self, output: Path, sinks: tuple[StepSink, ...] = ()) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._output, self._sinks = output, sinks
        self._whole: dict[str, int] = {}
        """Of files whose last write has failed: the length that their whole lines had."""

    def begin(self, recorded_step: int, evaluated: Collection[int], on_step: Callable[[Line], None]) -> None:
        """Bring the files to what the ledger says has been recorded.

        What a crash left beyond that is written again, and another run's lines are not this run's. A run under way has
        no summary. Files are read line by line, since those of a run of weeks do not fit into memory.

        Args:
            recorded_step: the last step that the ledger knows to be written here.
            evaluated: versions whose evaluation it knows to be written here.
            on_step: called with each step's line in order.
        """
        (self._output / "summary.json").unlink(missing_ok=True)
        versions = frozenset(evaluated)
        self._keep(
            "samples.jsonl",
            lambda line: line["step"] in versions if line["purpose"] == "eval" else line["step"] <= recorded_step,
        )
        self._keep("evals.jsonl", lambda line: line["version"] in versions)
        self._keep("metrics.jsonl", lambda line: line["step"] <= recorded_step, on_step)

    def report_eval(self, version: int, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """One evaluation as one line of evals.jsonl."""
        self._append("evals.jsonl", {"version": version, "environments": results})

    def report_step(self, step: int, values: Mapping[str, float], weights: str = "") -> Line:
        """One line of metrics.jsonl; returned as it will be read again.

        Args:
            step: its number.
            values: plain numbers by name.
            weights: digest of the version that the step made, where it is known.
        """
        line: Line = {"step": step} | {name: _plain(value) for name, value in values.items()}
        if weights:
            line["weights"] = weights
        self._append("metrics.jsonl", line)
        for sink in self._sinks:
            sink(step, values)
        return line

    def report_samples(self, step: int, group: ScoredGroup) -> None:
        """One group as one line of samples.jsonl."""
        rewards = {
            name: [_plain(value) for value in values]
            for name, values in zip(group.reward_names, group.rewards_FG.tolist(), strict=True)
        }
        self._append(
            "samples.jsonl",
            {
                "step": step,
                "ordinal": group.ordinal,
                "purpose": group.purpose,
                "environment": group.environment,
                "prompt": group.prompt,
                "columns": group.columns,
                "completions": group.completions,
                "finish_reasons": group.finish_reasons,
                "reward": [_plain(value) for value in group.rewards_G.tolist()],
                "rewards": rewards,
                "advantages": [round(value, 6) for value in group.advantages_G.tolist()],
                "versions": sorted({int(version) for version in group.segments[:, 2]}),
            },
        )

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json, atomically: whoever sees it sees all of it."""
        path = self._output / "summary.json"
        staging = _staging(path)
        with writing(path):
            staging.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            staging.replace(path)

    def _keep(self, name: str, good: Callable[[Line], bool], take: Callable[[Line], None] = lambda line: None) -> None:
        """Cut off the lines that are not good; a file that has none is not touched.

        They are at the end, and go without room on the disk, unless the file was written by something else.
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
        if scattered:
            _rewrite(path, good)
        elif not length:
            path.unlink()
        elif cut:
            os.truncate(path, length)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        path = self._output / name
        with writing(path), path.open("ab", buffering=0) as file:
            length = file.seek(0, os.SEEK_END)
            whole = min(self._whole.get(name, length), length)
            if whole < length:
                file.truncate(whole)
            self._whole[name] = whole
            rest = memoryview((json.dumps(record) + "\n").encode())
            while rest:  # a disk with little room takes a part, and refuses the next
                rest = rest[file.write(rest) :]
        del self._whole[name]


def read_lines(path: Path) -> list[Line]:
    """The records of a .jsonl file; a last line cut short by a crash is left out."""
    return [line for _, line in _lines(path) if line is not None]


def _lines(path: Path) -> Iterator[tuple[bytes, Line | None]]:
    """Each line as it stands, and its record where it has one."""
    with path.open("rb") as file:
        for raw in file:
            try:
                yield raw, json.loads(raw)
            except ValueError:
                yield raw, None


def _rewrite(path: Path, good: Callable[[Line], bool]) -> None:
    """Leave only the good lines, atomically."""
    staging = _staging(path)
    with staging.open("wb") as kept:
        kept.writelines(raw.rstrip(b"\n") + b"\n" for raw, line in _lines(path) if line is not None and good(line))
    staging.replace(path)


def _staging(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _plain(value: float) -> float | None:
    """A number that JSON has; None for NaN and infinity."""
    return value if math.isfinite(value) else None
