"""The output_dir: names of a run's files there, and a check whether a folder may become an output_dir.

A run creates, appends to, replaces and removes files under the names below. A folder with something under these names
that is not a run of grpo-actors is refused, and the error lists the names. All other files are left alone.
"""

import json
import os
import re
import secrets
from pathlib import Path

from actors.process.ledger_file import is_ledger
from schemas.config import RunConfig
from schemas.config.resolved import RESOLVED
from schemas.errors import ConfigError

MARKER = ".grpo-actors.json"
LINES = ("metrics.jsonl", "samples.jsonl", "samples.older.jsonl", "evals.jsonl")
REPLACED = (
    *(*LINES, "summary.json", "progress.json", "metrics_targets.json"),
    *("callbacks.json", "stop.json", "uploads.json", "starting.json"),
)
"""Files replaced as a whole: each is first written as `.NAME`."""
FOLDERS = ("checkpoints", "events", "logs", "nodes", "uploads", "tokens", "trackers", "sample_images")
LOG = re.compile(
    r"up\.log|(node|slurm)-\d+\.log|(packer|trainer|inference|inference-pool|reward|rollout|callbacks|uploader|tracker)-\S+\.log"
)
LOCKS = (".up.lock", ".actors.lock")
WRITTEN = (RESOLVED, *FOLDERS, *REPLACED, *(f".{name}" for name in REPLACED))
"""Names that belong to a run alone. `ranks` and `weights` are not listed: files there carry the run's own name."""


def problem_of(config: RunConfig) -> str:
    """Return the reason why this run can't write to its output_dir; empty if it can."""
    found = _conflicts(config.output)
    # the order matters: another actor of this run may have created the folder since the look at the conflicts
    if not found or _is_run(config):
        return ""
    return (
        f"output_dir: {config.output} has {', '.join(found)} of something else, which this run would overwrite; set "
        "another output_dir, or move them away"
    )


def take(config: RunConfig) -> None:
    """Create the output_dir and mark the folder as a run's. Every actor that writes there calls this when it starts.

    Raises:
        ConfigError: the folder can't be created, or has files of something else.
    """
    marker = config.output / MARKER
    try:
        if problem := problem_of(config):
            raise ConfigError(problem)
        config.output.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            # a name of its own, since several actors may start at the same time; the last one wins, all write the same
            staging = marker.with_name(f"{MARKER}.{secrets.token_hex(4)}")
            staging.write_text(json.dumps({"run": config.name}) + "\n", encoding="utf-8")
            staging.replace(marker)
    except OSError as error:
        raise ConfigError(
            f"output_dir: {config.output} can't be written to: {error.strerror}; set a folder that can be"
        ) from error


def _conflicts(output: Path) -> list[str]:
    """Return the conflicting names in a folder. An empty folder is no conflict: users may create one for a run."""
    found = []
    for name in WRITTEN:
        path = output / name
        is_empty = path.is_dir() and not any(path.iterdir())
        # logs without a marker were left by older versions; runs append to logs, and overwrite none
        is_of_logs = name == "logs" and path.is_dir() and all(LOG.fullmatch(entry.name) for entry in path.iterdir())
        if os.path.lexists(path) and not is_empty and not is_of_logs:
            found.append(name)
    for name in LOCKS:
        path = output / name
        # locks carry no mark of a run, so a file that could be a lock is no conflict: it has at most a pid
        could_be_lock = path.is_file() and re.fullmatch(rb"\d{0,20}", path.read_bytes()[:21])
        if os.path.lexists(path) and not could_be_lock:
            found.append(name)
    return found


def _is_run(config: RunConfig) -> bool:
    """Return whether the output_dir holds a run of grpo-actors, also a run of versions without a marker."""
    output = config.output
    return (
        (output / MARKER).is_file()
        or ((output / RESOLVED).is_file() and config.ledger_path.is_file())
        or is_ledger(config.ledger_path)
        or any((output / "checkpoints").glob("step_*/witness.json"))
    )
