"""samples.jsonl for people: `actors samples RUN`."""

import json
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import read_lines


def show_samples(path: Path, step: int | None, num_completions: int) -> str:
    """The groups of one step (the last one by default), each with some of its completions and their rewards."""
    records = read_lines(path)
    chosen = max((record["step"] for record in records), default=0) if step is None else step
    found = [record for record in records if record["step"] == chosen]
    if not found:
        steps = sorted({record["step"] for record in records})
        return (
            f"no samples of step {chosen}; there are some of {len(steps)} steps, from {steps[0]} to {steps[-1]}"
            if steps
            else "none"
        )
    return "\n\n".join(_group(record, num_completions) for record in found)


def _group(record: dict[str, Any], num_completions: int) -> str:
    prompt = record["prompt"] if isinstance(record["prompt"], str) else json.dumps(record["prompt"], ensure_ascii=False)
    lines = [
        (
            f"step {record['step']}  {record['purpose']} ordinal {record['ordinal']}  {record['environment']}  "
            f"versions {record['versions']}"
        ),
        f"  prompt      {prompt!r}",
    ]
    rows = zip(record["completions"], record["reward"], record["advantages"], record["finish_reasons"], strict=True)
    for text, reward, advantage, reason in list(rows)[:num_completions]:
        shown = "  none" if reward is None else f"{reward:6.3f}"
        lines.append(f"  reward {shown}  advantage {advantage:7.3f}  {reason:6}  {text!r}")
    return "\n".join(lines)
