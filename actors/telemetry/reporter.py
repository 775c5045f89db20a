"""What a run leaves behind for people and programs: metrics.jsonl, samples.jsonl, summary.json (DESIGN §11).

All step values go through `Reporter.report_step`; trackers join there.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from schemas.messages import ScoredGroup

FILES = ("metrics.jsonl", "samples.jsonl", "evals.jsonl", "summary.json")
StepSink = Callable[[int, Mapping[str, float]], None]


class Reporter:
    """Writes under one output directory. `sinks` get every step's values too."""

    def __init__(self, output: Path, sinks: tuple[StepSink, ...] = ()) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._output, self._sinks = output, sinks

    def begin(self, recorded_step: int) -> list[dict[str, Any]]:
        """The step lines up to `recorded_step`; what a crash left beyond it goes, and so do another run's files."""
        path = self._output / "metrics.jsonl"
        if recorded_step == 0:
            for name in FILES:
                (self._output / name).unlink(missing_ok=True)
            return []
        lines = [line for line in read_lines(path) if line["step"] <= recorded_step]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return lines

    def report_eval(self, version: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """One evaluation as one line of evals.jsonl."""
        self._append("evals.jsonl", {"version": version, "environments": results})

    def report_step(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics.jsonl."""
        self._append("metrics.jsonl", {"step": step} | {name: _plain(value) for name, value in values.items()})
        for sink in self._sinks:
            sink(step, values)

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
        staging = self._output / ".summary.json"
        staging.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        staging.replace(self._output / "summary.json")

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self._output / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _plain(value: float) -> float | None:
    """A number that JSON has; None for NaN."""
    return None if math.isnan(value) else round(value, 8)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a last line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
