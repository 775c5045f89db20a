"""A tracker in memory, which can fail at any point of a step, and a run's files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.trackers.protocol import Entry, TrackedRun


class Service:
    """What survives the death of the process that sends: runs by id, each with the steps it has."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Entry]] = {}
        self.finished: dict[str, Mapping[str, Any]] = {}
        self.fail_before: set[int] = set()
        self.fail_after: set[int] = set()
        """Steps at which the connection breaks once: before or after the step has arrived."""
        self.error: BaseException = ConnectionError("away")
        """Error of `fail_before`."""


class MemoryTracker:
    """Tracker of a `Service`."""

    def __init__(
        self, service: Service, goes_back: bool = False, can_tell: bool = True, keeps_first: bool = False
    ) -> None:
        self.service, self.goes_back, self.can_tell = service, goes_back, can_tell
        self.keeps_first = keeps_first
        """True: all steps are asked for at each start, and of a step that comes again the first values stay."""
        self.run = ""

    def open(self, run: TrackedRun) -> int | None:
        """Open the run; one that can't tell forgets the later steps, as TensorBoard does."""
        self.run = run.id
        held = self.service.runs.setdefault(run.id, [])
        if self.keeps_first:
            return -1
        if self.can_tell:
            return max((entry.step for entry in held), default=-1)
        held[:] = [entry for entry in held if entry.step < run.next_step]
        return None

    def log(self, entry: Entry) -> None:
        """Take a step."""
        if entry.step in self.service.fail_before:
            self.service.fail_before.remove(entry.step)
            raise self.service.error
        held = self.service.runs[self.run]
        if not (self.keeps_first and entry.step in [one.step for one in held]):
            held.append(entry)
        if entry.step in self.service.fail_after:
            self.service.fail_after.remove(entry.step)
            raise ConnectionError("gone")

    def flush(self) -> None:
        """Nothing waits."""

    def go_back(self, step: int) -> None:
        """Forget later steps."""
        held = self.service.runs[self.run]
        held[:] = [entry for entry in held if entry.step < step]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary."""
        self.service.finished[self.run] = summary

    def close(self) -> None:
        """Nothing is open."""


def step_line(step: int, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {"step": step, "reward_mean": step / 10, "reward/mine": 0.5, "kl": None, "seconds_gather": 0.1} | {
        "time": 1000.0 + step,
        "weights": f"digest{step}",
        **values,
    }


def sample_line(step: int, **values: Any) -> dict[str, Any]:
    """A line of samples.jsonl with two completions."""
    return {"step": step, "purpose": "train", "environment": "sums", "prompt": "1+1", "completions": ["2", "3"]} | {
        "reward": [1.0, 0.0],
        "rewards": {"mine": [1.0, 0.0]},
        "advantages": [0.7, -0.7],
        **values,
    }


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a .jsonl file as a whole."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
