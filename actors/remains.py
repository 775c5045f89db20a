"""What lies in an output_dir from before: whose run, how far it has come, and whether there is anything left to do."""

import json
from typing import Any

import yaml

from schemas.config import RunConfig
from schemas.config.resolved import RESOLVED


def run_so_far(config: RunConfig) -> dict[str, Any]:
    """The configuration that the run in this output_dir was last started with; empty where there is none."""
    resolved = config.output / RESOLVED
    if not (resolved.exists() and config.ledger_path.exists()):
        return {}
    return yaml.safe_load(resolved.read_text(encoding="utf-8")) or {}


def is_done(config: RunConfig) -> bool:
    """Whether a run that has reached this max_steps lies here: the packer of one that goes on removes the summary."""
    summary = config.output / "summary.json"
    if not (summary.exists() and config.ledger_path.exists()):
        return False
    return bool(json.loads(summary.read_text(encoding="utf-8"))["steps"] == config.trainer.max_steps)


def newest_checkpoint(config: RunConfig) -> int:
    """The step of it, 0 where there is none."""
    steps = [path.name.removeprefix("step_") for path in (config.output / "checkpoints").glob("step_*")]
    return max((int(step) for step in steps if step.isdigit()), default=0)
