"""Result of a finished run, printed by `actors up` at the end."""

import json
from collections.abc import Mapping
from typing import Any

from actors.ops.previous_run import newest_checkpoint
from actors.ops.view.diagnostics import seconds_in_words
from schemas.config import RunConfig

MEASURES = {"exact_match": "exact match", "mean_reward": "reward"}


def result(summary: Mapping[str, Any]) -> list[str]:
    """Return the result as lines: steps and time, reward in the first and last five steps, evaluations at both ends."""
    lines = [f"done: {summary['steps']} steps in {seconds_in_words(summary['wall_seconds'])}"]
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        lines[0] += f"; sampled reward {first:.3f} in the first 5 steps, {last:.3f} in the last 5"
    before, after = summary.get("eval_before") or {}, summary.get("eval_after") or {}
    for label in dict.fromkeys([*before, *after]):
        texts = [_change(name, before.get(label, {}), after.get(label, {})) for name in MEASURES]
        lines.append(f"evaluation of {label}: {', '.join(filter(None, texts)) or 'nothing measured'}")
    return lines


def result_on_disk(config: RunConfig) -> list[str]:
    """Return the result from a run's summary.json, and the path of the newest checkpoint."""
    summary = json.loads((config.output / "summary.json").read_text(encoding="utf-8"))
    step = newest_checkpoint(config)
    where = [f"checkpoint: {config.output / 'checkpoints' / f'step_{step}'}"] if step else []
    return [*result(summary), *where]


def _change(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    # an evaluation may be missing at one end (eval.at_start, eval.at_end)
    values = ["not measured" if (v := results.get(name)) is None else f"{v:.3f}" for results in (before, after)]
    return "" if values == ["not measured"] * 2 else f"{MEASURES[name]} {values[0]} → {values[1]}"
