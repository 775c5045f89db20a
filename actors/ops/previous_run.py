"""State of the run found in an output_dir: its configuration, data, checkpoints, and whether it is done."""

import json
from pathlib import Path
from typing import Any

import structlog
import yaml

from actors.datasets.identity import data_changes, data_files
from actors.learner.checkpoints import CheckpointFolder
from actors.ledger import LedgerReader
from actors.ledger.compacted_history import CompactedHistory
from actors.ledger.store import backup_paths
from schemas.config import RunConfig
from schemas.config.resolved import RESOLVED
from schemas.errors import ConfigError

log = structlog.get_logger("packer")


def check_ledger_is_there(config: RunConfig) -> None:
    """Refuse to start a new ledger next to existing checkpoints: the ledger's disk may not be mounted.

    Raises:
        ConfigError: there is no ledger, or only an empty file; the text names the path and the remedies.
    """
    path = config.ledger_path
    if has_ledger(config):
        return
    step = newest_checkpoint(config)
    # a run has trained here, so its ledger must be somewhere
    if step:
        backup = next((str(found) for found in backup_paths(path.resolve()) if found.is_file()), "")
        restore = f", or give `actors restore {config.output}` (there is the backup {backup})" if backup else ""
        raise ConfigError(
            f"ledger.path: there is no ledger at {path}, but {config.output} has a run with checkpoints up to step "
            f"{step}; is its disk mounted? Bring the ledger back{restore}. For a new run choose another output_dir "
            "(model.path may be one of the checkpoints)"
        )
    if config.ledger.path and not path.parent.is_dir():
        log.warning("the ledger's folder is not there and will be made; is its disk mounted?", path=str(path.parent))


def check_ledger_is_own(config: RunConfig) -> None:
    """Refuse a ledger at `ledger.path` that another run uses, with an output_dir of its own.

    A run whose output_dir was moved keeps its ledger: there is no run in the folder that the ledger names.

    Raises:
        ConfigError: the ledger belongs to another run; or it can't be read.
    """
    if not (config.ledger.path and has_ledger(config)):
        return
    ledger = LedgerReader.of(config.ledger_path)
    try:
        before = ledger.value("config") or {}
    finally:
        ledger.close()
    other = Path(before.get("output_dir", config.output)).absolute()
    if other.resolve() != config.output.resolve() and (other / RESOLVED).is_file():
        raise ConfigError(
            f"ledger.path: {config.ledger_path} is the ledger of the run in {other}; set another ledger.path, or leave "
            "it empty (then it is in output_dir)"
        )


def run_so_far(config: RunConfig) -> dict[str, Any]:
    """Return the configuration with which the run in the output_dir was last started; empty if there is no run."""
    resolved = config.output / RESOLVED
    if not (resolved.exists() and config.ledger_path.exists()):
        return {}
    return yaml.safe_load(resolved.read_text(encoding="utf-8")) or {}


def changed_data(config: RunConfig) -> tuple[list[str], list[str]]:
    """Compare the data with the data at the last start of the run.

    Returns:
        Changes that make it another run, and changes that do not, each as text. Both empty without a ledger.

    Raises:
        ConfigError: the ledger or a data file can't be read.
    """
    if not has_ledger(config):
        return [], []
    ledger = LedgerReader.of(config.ledger_path)
    try:
        before = ledger.value("data")
    finally:
        ledger.close()
    return data_changes(before, data_files(config)) if before else ([], [])


def done_at(config: RunConfig, *, deep: bool = True) -> int | None:
    """Return the step at which the run in the output_dir is done; None if it is not done.

    A run is done when its record is complete (summary.json) and the last step has a good checkpoint of the ledger's
    history (P27). A summary alone is not enough: it may be of a history given up by `actors rewind`.

    Args:
        config: configuration of the run, with the max_steps to reach.
        deep: True to compare the checkpoint's files with their checksums. False, for screens: all files must be there.

    Raises:
        ConfigError: the ledger can't be read.
    """
    summary = config.output / "summary.json"
    if not (summary.exists() and has_ledger(config)):
        return None
    step = int(json.loads(summary.read_text(encoding="utf-8"))["steps"])
    # max_steps has been raised since, so the run has steps to train
    if step < config.trainer.max_steps:
        return None
    ledger = LedgerReader.of(config.ledger_path)
    try:
        # with an order to go back the next start has steps to train, even if the rewind was killed before the summary
        # could be removed
        is_done = ledger.value("going_back") is None and _has_checkpoint(config, ledger, step, deep=deep)
    finally:
        ledger.close()
    return step if is_done else None


def lacks_checkpoint(config: RunConfig, ledger: LedgerReader, step: int) -> bool:
    """Return whether this process sees the folder of checkpoints, but no good checkpoint of a step.

    Checksums are compared only if the run was not over before (no summary), since a supervisor may start the packer of
    a finished run many times.
    """
    is_seen = _folder(config).is_there
    return is_seen and not _has_checkpoint(config, ledger, step, deep=not (config.output / "summary.json").exists())


def newest_checkpoint(config: RunConfig) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    return max(_folder(config).steps(), default=0)


def has_ledger(config: RunConfig) -> bool:
    """Return whether there is a ledger that is not empty. A packer killed early leaves an empty file."""
    path = config.ledger_path
    return path.exists() and path.stat().st_size > 0


def read_left(config: RunConfig, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in the output_dir; empty if there is no such file."""
    try:
        return dict(json.loads((config.output / name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _folder(config: RunConfig) -> CheckpointFolder:
    return CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint, writes=False)


def _has_checkpoint(config: RunConfig, ledger: LedgerReader, step: int, *, deep: bool) -> bool:
    """Return whether there is a good checkpoint of a step, with the same chain of witnesses as the ledger (P20)."""
    compacted = CompactedHistory.of(ledger.value("folded"))
    # steps up to the compacted one are no longer listed, but its chain is known
    chains = {compacted.step: compacted.chain} | {known.step: known.chain for known in ledger.steps()}
    run = ledger.value("run")
    return step in chains and run is not None and _folder(config).is_good(step, run, chains[step], deep=deep)
