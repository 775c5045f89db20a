"""What a run leaves behind for people and programs: metrics.jsonl, samples.jsonl, summary.json (DESIGN §11).

All step values go through `Reporter.report_step`; trackers join there.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from schemas.messages import ScoredGroup

StepSink = Callable[[int, Mapping[str, float]], None]


class Reporter:
    """Writes under one output directory. `sinks` get every step's values too."""

    def __init__(self, output: Path, sinks: tuple[StepSink, ...] = ()) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._output, self._sinks = output, sinks

    def begin(self, recorded_step: int, evaluated: Collection[int]) -> list[dict[str, Any]]:
        """Bring the files to what the ledger says has been recorded; returns the step lines.

        What a crash left beyond that is written again, and another run's lines are not this run's. A run under way has
        no summary.

        Args:
            recorded_step: the last step that the ledger knows to be written here.
            evaluated: versions whose evaluation it knows to be written here.
        """
        (self._output / "summary.json").unlink(missing_ok=True)
        self._keep(
            "samples.jsonl",
            lambda line: line["step"] in evaluated if line["purpose"] == "eval" else line["step"] <= recorded_step,
        )
        self._keep("evals.jsonl", lambda line: line["version"] in evaluated)
        return self._keep("metrics.jsonl", lambda line: line["step"] <= recorded_step)

    def report_eval(self, version: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """One evaluation as one line of evals.jsonl."""
        self._append("evals.jsonl", {"version": version, "environments": results})

    def report_step(self, step: int, values: Mapping[str, float]) -> dict[str, Any]:
        """One line of metrics.jsonl; returned as it will be read again."""
        line = {"step": step} | {name: _plain(value) for name, value in values.items()}
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
        staging = self._output / ".summary.json"
        staging.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        staging.replace(self._output / "summary.json")

    def _keep(self, name: str, good: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        path = self._output / name
        lines = [line for line in read_lines(path) if good(line)] if path.exists() else []
        if lines:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
        return lines

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self._output / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _plain(value: float) -> float | None:
    """A number that JSON has; None for NaN and infinity."""
    return value if math.isfinite(value) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a last line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
