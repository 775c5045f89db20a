"""Figures of one run from its files, whether it is done, under way or dead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.ops.previous_run import read_left
from actors.ops.screens.disk import view_on_disk
from actors.ops.screens.limits import Stage, limits
from actors.ops.up.run_lock import is_held
from actors.telemetry.tail import Tail
from actors.telemetry.totals import StepTotals, is_number
from schemas.config import load_config
from schemas.config.resolved import RESOLVED
from schemas.config.resume import as_tree
from schemas.errors import ConfigError

MEASURES = {"exact_match": "exact match", "mean_reward": "mean reward"}
"""Measures of an evaluation with their words; the first that was measured is compared."""


@dataclass(frozen=True)
class Evaluated:
    """Results of an evaluation over the run.

    Args:
        measure: words on what was measured; the same for all versions.
        values: value by version, in the order of the evaluations.
    """

    measure: str
    values: Mapping[int, float]

    @property
    def final(self) -> float:
        """Value of the newest version."""
        return self.values[max(self.values)]

    @property
    def best(self) -> tuple[int, float]:
        """Version with the largest value, the first of several, and this value."""
        version = max(sorted(self.values), key=self.values.__getitem__)
        return version, self.values[version]


@dataclass(frozen=True)
class Figures:
    """Figures of a run. None: not known, or not measured.

    Args:
        name: `name` of the configuration; the folder's name without one.
        output: output_dir.
        outcome: state of the run in a word or two: `done`, `running`, `stopped`, `failed: …`.
        config: configuration as plain values; empty if the run has never started.
        steps: steps trained and recorded.
        rewards: mean reward of each step.
        evaluations: results by name of the evaluation.
        reward: mean reward of the last five steps.
        steps_per_second: rate without the time in which the run was stopped.
        tokens: trained tokens.
        wasted: share of the sampled tokens of training that were never trained; known at the end.
        idle: share of the time in which the trainer waited for samples.
        limit: stage that limited the newest steps.
    """

    name: str
    output: Path
    outcome: str
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    rewards: Mapping[int, float] = field(default_factory=dict)
    evaluations: Mapping[str, Evaluated] = field(default_factory=dict)
    reward: float | None = None
    steps_per_second: float | None = None
    tokens: int | None = None
    wasted: float | None = None
    idle: float | None = None
    limit: Stage = "unknown"


def figures_of(output: Path, outcome: str | None = None) -> Figures:
    """Return the figures of a run.

    Args:
        output: output_dir of the run; the folder need not be there.
        outcome: outcome where the caller knows more than the files; None: as the files tell.

    Raises:
        ConfigError: the run's files can't be read.
    """
    if not (output / RESOLVED).is_file():
        return Figures(output.name, output, outcome or "not started")
    config = load_config(output / RESOLVED)
    totals, rewards = StepTotals(), {}
    for line in Tail(output / "metrics.jsonl").new():
        totals.add(line)
        if is_number(line.get("reward_mean")):
            rewards[int(line["step"])] = float(line["reward_mean"])
    summary, progress = read_left(config, "summary.json"), read_left(config, "progress.json")
    seconds, goodput = summary.get("train_seconds"), summary.get("goodput")
    pace = totals.seconds_per_step
    rate = 1.0 / pace if pace else None
    return Figures(
        config.name,
        output,
        outcome or outcome_of(output),
        as_tree(config),
        steps=int(totals.newest.get("step", 0)),
        rewards=rewards,
        evaluations=evaluations_of(list(Tail(output / "evals.jsonl").new())),
        reward=totals.reward_last,
        # of the whole run if that is known, else of the newest steps
        steps_per_second=summary["steps"] / seconds if seconds else rate,
        tokens=int(totals["tokens"].sum) if totals.newest else None,
        wasted=None if goodput is None else max(0.0, 1.0 - goodput),
        idle=summary.get("trainer_idle_ratio", progress.get("idle")),
        limit=limit_of(progress),
    )


def evaluations_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Evaluated]:
    """Return the results of evals.jsonl by name of the evaluation; only evaluations with a measure."""
    found: dict[str, Evaluated] = {}
    for label in dict.fromkeys(label for line in lines for label in line["environments"]):
        for measure, words in MEASURES.items():
            results = {int(line["version"]): line["environments"].get(label, {}).get(measure) for line in lines}
            values = {version: float(value) for version, value in results.items() if is_number(value)}
            if values:
                found[label] = Evaluated(words, values)
                break
    return found


def limit_of(progress: Mapping[str, Any]) -> Stage:
    """Return the stage that limited the newest steps, also of a run that has ended since; `unknown` without any."""
    if not progress.get("queues"):
        return "unknown"
    # at the end nobody samples any more, which says nothing about the steps before
    return limits({**progress, "phase": "running", "missing": [], "eval_open": 0}).stage


def outcome_of(output: Path) -> str:
    """Return the state of a run in a word or two: `not started`, `running`, `done`, `stopped…`, `failed…` or `dead`.

    Raises:
        ConfigError: the run's files can't be read.
    """
    if not (output / RESOLVED).is_file():
        return "not started"
    if is_held(output):
        return "running"
    try:
        view = view_on_disk(load_config(output / RESOLVED))
    except ConfigError:  # nothing has run there
        return "not started"
    if view.ended_well:
        return "done"
    # the rest tells how to continue
    words = view.ended.partition("; the same command")[0]
    return words if words.startswith(("failed", "stopped")) else "dead"
