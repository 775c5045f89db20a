"""How a run stands, from its files alone: no process of the run is asked, so a dead run is read as a living one.

The packer writes progress.json every FILE_SECONDS. A newer file is of a living run; an older one is of a run that has
ended or died, and `actors.ops.screens.disk` says how, as for `actors status`.
"""

import time
from collections.abc import Mapping
from typing import Any

from actors.ops.previous_run import read_left
from actors.ops.screens.diagnostics import dealt_with, diagnose
from actors.ops.screens.disk import view_on_disk
from actors.ops.screens.limits import limits
from actors.ops.screens.render import View, time_left
from actors.packer.progress import ALIVE_SECONDS
from actors.process.tasks import words_of
from actors.telemetry.reporter import read_lines
from actors.view.curves import Curves
from schemas.config import RunConfig
from schemas.errors import ConfigError

RECENT_STEPS = 20
"""Newest steps of which the figures are means."""
FIGURES = {
    "reward_mean": "reward",
    "entropy": "entropy, nats per token",
    "grad_norm": "gradient norm",
    "lag_mean": "lag, steps",
    "mismatch_kl": "KL of trainer and engine",
    "completion_tokens_mean": "tokens of a completion",
    "truncated_fraction": "share of cut off completions",
    "groups_without_variance": "share of groups that teach nothing",
    "seconds_publish": "seconds to publish weights",
    "seconds_wait_batch": "seconds the trainer waits in a step",
}
"""Columns whose newest mean is a figure of the overview, with their names for people."""
PROGRESS = ("queues", "actors_left_out", "tokens_per_second", "idle", "scale", "reissued", "failed_attempts")
"""Values of progress.json that the overview passes on."""


def overview(config: RunConfig, curves: Curves, counts: Mapping[tuple[str, str, str | None], int]) -> dict[str, Any]:
    """Return all that the page of a run says.

    Args:
        config: configuration of the run.
        curves: its columns, brought up to date.
        counts: number of groups by (purpose, state, reason), as the ledger has them.
    """
    view, alive, age = newest_view(config)
    progress = view.progress
    limit = limits(progress)
    queues = {name: list(value) for name, value in progress.get("queues", {}).items()} if alive else {}
    return (
        {
            "name": config.name,
            "output": str(config.output),
            "state": state_of(view, alive),
            "alive": alive,
            "age": age,
            "words": view.ended,
            "step": max(progress.get("step", 0), curves.last),
            "max_steps": progress.get("max_steps") or config.trainer.max_steps,
            "time_left": time_left(progress) if alive else "",
            "limit": {"stage": limit.stage, "because": limit.because, "change": limit.change},
            "trouble": diagnose(progress, 0.0) if progress else [],
            "notes": list(progress.get("notes", ())),
            "recovered": dealt_with(progress) if progress else [],
            "policy": {
                "trained": max(progress.get("step", 0), curves.last),
                "served": progress.get("served"),
                "durable": progress.get("durable"),
            },
            "figures": figures(curves),
            "figure_steps": min(RECENT_STEPS, curves.last),
            "evaluations": evaluations(config),
            "groups": groups(counts),
            "columns": curves.names,
        }
        | {name: progress.get(name) for name in PROGRESS}
        | {"queues": queues, "actors": [_with_words(actor) for actor in progress.get("actors", ())]}
    )


def _with_words(actor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of an actor, with the words of its long work if it has any."""
    return dict(actor) | ({"doing": words_of(actor["task"])} if "task" in actor else {})


def newest_view(config: RunConfig) -> tuple[View, bool, float | None]:
    """Return what is known of a run, whether it is alive, and the age of the newest progress in seconds."""
    progress = read_left(config, "progress.json")
    age = max(0.0, time.time() - progress["time"]) if "time" in progress else None
    is_over = progress.get("phase") in ("done", "failed") or (config.output / "summary.json").is_file()
    if age is not None and age < ALIVE_SECONDS and not is_over:
        return View(config.name, str(config.output), progress), True, age
    try:
        return view_on_disk(config), False, age
    except ConfigError as error:
        return View(config.name, str(config.output), {}, ended="; ".join(error.problems), ended_well=False), False, age


def state_of(view: View, alive: bool) -> str:
    """Return a word for the state of a run: its phase, or `dead` for a run that ended without a word."""
    phase = str(view.progress.get("phase", ""))
    if alive:
        return phase or "running"
    if view.ended_well and phase == "done":
        return "done"
    return "failed" if phase == "failed" else "stopped" if phase == "stopped" else "unknown"


def figures(curves: Curves) -> list[dict[str, Any]]:
    """Return the newest figures of a run: name, words, and the mean over the newest steps."""
    found = ((name, words, curves.newest(name, RECENT_STEPS)) for name, words in FIGURES.items())
    return [{"name": name, "words": words, "value": value} for name, words, value in found if value is not None]


def evaluations(config: RunConfig) -> list[dict[str, Any]]:
    """Return the evaluations of a run, a row per version and environment, with all values that were measured."""
    path = config.output / "evals.jsonl"
    lines = read_lines(path) if path.is_file() else []
    return [
        {"version": line["version"], "environment": label} | dict(values)
        for line in lines
        for label, values in line["environments"].items()
    ]


def groups(counts: Mapping[tuple[str, str, str | None], int]) -> dict[str, Any]:
    """Return the number of training groups by state, of dropped ones by reason, and the share that was dropped."""
    states: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for (purpose, state, reason), number in counts.items():
        if purpose == "train":
            states[state] = states.get(state, 0) + number
            if state == "dropped":
                reasons[str(reason)] = reasons.get(str(reason), 0) + number
    ended = sum(states.get(state, 0) for state in ("trained", "durable", "dropped"))
    waste = states.get("dropped", 0) / ended if ended else None
    return {"states": states, "dropped": reasons, "dropped_share": waste}
