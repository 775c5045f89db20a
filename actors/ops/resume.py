"""Changes to a run between two starts: compare the configuration, rewind, restore the ledger."""

import contextlib
import json
import sqlite3
import time
from dataclasses import asdict
from pathlib import Path

import yaml

from actors.learner.checkpoints import CheckpointFolder, FolderTakenError, Writer
from actors.ledger import Changes, RewindOrder, Store
from actors.ledger.backup import chains_of, put_in_place
from actors.ledger.compacted_history import CompactedHistory
from actors.ledger.store import backup_paths, take_lock
from actors.ops.previous_run import changed_data, check_ledger_is_there, has_ledger, read_left
from schemas.config import RunConfig, load_config
from schemas.config.resolved import RESOLVED
from schemas.config.resume import differences, refusal
from schemas.errors import ConfigError


def compare(config: RunConfig, output_dir: Path) -> tuple[str, bool]:
    """Compare a configuration with the run in a directory.

    Returns:
        Text with the differences by class, and whether the run may continue without a fork.

    Raises:
        ConfigError: there is no run.
    """
    before = yaml.safe_load(resolved_config(output_dir).read_text(encoding="utf-8"))
    found = differences(before, config)
    run = load_config(resolved_config(output_dir), [])
    other_data, more_data = changed_data(config.model_copy(update={"output_dir": run.output_dir, "ledger": run.ledger}))
    lines = [f"{difference.key_class:<9} {difference}" for difference in sorted(found, key=lambda d: d.key_class)]
    lines += [f"free      {text}" for text in more_data] + [f"identity  {text}" for text in other_data]
    return "\n".join(lines) or "nothing differs", not (refusal(found) or other_data)


def rewind(output_dir: Path, step: int, *, same_groups: bool = False) -> str:
    """Make the next start of a run continue from a checkpoint. Return a text on what was done.

    The ledger is changed first, and alone decides. So after a crash at any point the next gang starts from this
    checkpoint or an older one.

    Args:
        output_dir: folder of the run.
        step: step of the checkpoint.
        same_groups: True to train the later steps again on the same groups. Otherwise the groups are dropped, and their
            examples are sampled again with the policy of the checkpoint.

    Raises:
        ConfigError: the run is going on, there is no ledger or no such checkpoint, the checkpoint is of another
            history, or its groups are gone.
    """
    config = load_config(resolved_config(output_dir), [])
    check_ledger_is_there(config)
    if not has_ledger(config):  # a new ledger would hide that the disk is not mounted
        raise ConfigError(f"ledger.path: there is no ledger at {config.ledger_path}; is its disk mounted?")
    # takes the ledger's lock, so fails while a packer runs
    store = Store(config.ledger_path, config.ledger.sync, output_dir=config.output)
    try:
        folder = CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint)
        _check_step(store, folder, step)
        incarnation = (store.value("gang") or {"incarnation": 0})["incarnation"]
        try:
            # a trainer may still run on another machine: it finds another writer named here, and stops writing
            folder.take(Writer(store.run, incarnation, "rewind"))
        except FolderTakenError as error:
            raise ConfigError(
                f"output_dir: {error}. The ledger {store.path} is an older copy than the one that these checkpoints "
                f"were written with; bring that one back, or give `actors restore {config.output}`"
            ) from error
        # before any checkpoint is moved: after a crash in between the next gang goes back all the same (decision 21)
        order = RewindOrder(at_most=step, sample_anew=not same_groups)
        store.commit(Changes(values={"going_back": asdict(order)}), {})
        later = folder.rewind(step)
        (config.output / "summary.json").unlink(missing_ok=True)  # the run is not done any more
        note_rewind(config, step)
    finally:
        store.close()
    return "\n".join(
        [
            *(f"moved step_{other} to checkpoints/dead" for other in later),
            f"the next `actors up` continues from step {step}, and "
            + ("trains the later steps again on the same groups" if same_groups else "samples the later steps again"),
        ]
    )


def note_rewind(config: RunConfig, step: int) -> None:
    """Update progress.json and up.log for screens: the run stands at this step, and later figures are gone."""
    progress = read_left(config, "progress.json")
    if progress:
        # screens leave out a figure that is None
        gone = {
            "failure": "",
            "last_failure": "",
            "reward": None,
            "loss": None,
            "mismatch_kl": None,
            "lag": None,
            "served": None,
        }
        now = {"phase": "stopped", "step": step, "durable": step, "time": time.time()}
        (config.output / "progress.json").write_text(json.dumps(progress | gone | now) + "\n", encoding="utf-8")
    log = config.output / "logs" / "up.log"
    if log.is_file():
        with log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"event": "rewound", "step": step, "time": time.time()}) + "\n")


def _check_step(store: Store, folder: CheckpointFolder, step: int) -> None:
    """Check that a gang can start from a step. Otherwise the order to go back would make every start fail.

    Raises:
        ConfigError: the step can't be used; the text says why.
    """
    # a restored ledger may have compacted steps only
    compacted = CompactedHistory.of(store.value("folded"))
    if step < compacted.step:
        raise ConfigError(
            f"--step {step}: the ledger has groups from step {compacted.step + 1} on only (ledger.keep_steps; after "
            "`actors restore`, those of the backup); to go on from an older checkpoint start a new run with model.path "
            "at it"
        )
    folder.check(step)
    chains = {compacted.step: compacted.chain} | {known.step: known.chain for known in store.steps()}
    witness = folder.witness(step)
    if (witness["run"], witness["chain"]) != (store.run, chains.get(step)):
        raise ConfigError(
            f"--step {step}: {folder.path(step)} is of another history than the ledger; choose another checkpoint, or "
            "start a new run with model.path at it"
        )


def restore(output_dir: Path) -> str:
    """Replace the ledger by the newest usable backup. Return a text on what was moved and where the run continues.

    Checkpoints unknown to the backup are moved to checkpoints/dead, as by a rewind. The old ledger is kept under
    another name.

    Raises:
        ConfigError: the run is going on, or no backup fits any good checkpoint.
    """
    return restore_ledger(load_config(resolved_config(output_dir), []))


def restore_ledger(config: RunConfig) -> str:
    """Replace the ledger of a run by its newest usable backup, as `restore`."""
    path = config.ledger_path.resolve()
    checkpoints = CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint)
    with contextlib.closing(take_lock(path)):
        problems = []
        # the newer backup first: the run loses fewer steps with it
        for backup in backup_paths(path):
            try:
                run, chains = chains_of(backup)
            except sqlite3.Error as error:
                problems.append(f"{backup}: {error}")
                continue
            steps = [found.step for found in checkpoints.good(run) if chains.get(found.step) == found.chain]
            if not steps:
                problems.append(f"{backup}: no good checkpoint from its step {min(chains)} on is left")
                continue
            incarnation = checkpoints.last_incarnation(run)
            # as in `rewind`: a trainer that still runs somewhere stops writing
            checkpoints.take(Writer(run, incarnation, "restore"))
            aside = put_in_place(backup, path, incarnation)
            later = checkpoints.rewind(steps[-1])
            (config.output / "summary.json").unlink(missing_ok=True)  # the run is not done any more
            moved = ", ".join(f"step_{other}" for other in later) or "nothing"
            return (
                f"the run goes on from step {steps[-1]}, with the ledger of {backup}; the one before is {aside}; "
                f"moved to checkpoints/dead: {moved}"
            )
    raise ConfigError(
        f"ledger.path: no backup of {path} can be used ({'; '.join(problems)}). Start a new run: another output_dir, "
        "with model.path at this run's newest checkpoint"
    )


def resolved_config(output_dir: Path) -> Path:
    """Return the path of the configuration with which a run was started.

    Raises:
        ConfigError: there is no run.
    """
    path = output_dir / RESOLVED
    if not path.is_file():
        raise ConfigError(f"{output_dir}: there is no run ({RESOLVED} is missing)")
    return path
