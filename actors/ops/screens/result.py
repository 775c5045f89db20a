"""Result of a finished run, printed by `actors up` at the end."""

import json
from collections.abc import Mapping
from typing import Any

from actors.ops.previous_run import newest_checkpoint
from actors.process.durations import seconds_in_words
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
        texts = []
        for name, words in MEASURES.items():
            # an evaluation may be missing at one end (eval.at_start, eval.at_end)
            ends = [evaluation.get(label, {}).get(name) for evaluation in (before, after)]
            first_value, last_value = ("not measured" if value is None else f"{value:.3f}" for value in ends)
            if ends != [None, None]:
                texts.append(f"{words} {first_value} → {last_value}")
        lines.append(f"evaluation of {label}: {', '.join(texts) or 'nothing measured'}")
    return lines


def result_on_disk(config: RunConfig) -> list[str]:
    """Return the result from a run's summary.json, and the path of the newest checkpoint."""
    summary = json.loads((config.output / "summary.json").read_text(encoding="utf-8"))
    step = newest_checkpoint(config)
    where = [f"checkpoint: {config.output / 'checkpoints' / f'step_{step}'}"] if step else []
    return [*result(summary), *where]
