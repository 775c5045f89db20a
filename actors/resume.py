"""What may happen to a run between two starts: compare its configuration, go back to an older checkpoint."""

from pathlib import Path

import yaml

from actors.ledger import Store
from actors.policy.checkpoints import CheckpointFolder
from schemas.config import RunConfig, load_config
from schemas.config.resolved import RESOLVED
from schemas.config.resume import differences, refusal
from schemas.errors import ConfigError


def compare(config: RunConfig, output_dir: Path) -> tuple[str, bool]:
    """(what differs from the run in this directory, by class, for people; whether it may go on without a fork).

    Raises:
        ConfigError: there is no run.
    """
    before = yaml.safe_load(resolved_config(output_dir).read_text(encoding="utf-8"))
    found = differences(before, config)
    if not found:
        return "nothing differs", True
    lines = [f"{difference.key_class:<9} {difference}" for difference in sorted(found, key=lambda d: d.key_class)]
    return "\n".join(lines), not refusal(found)


def rewind(output_dir: Path, step: int) -> str:
    """Have the run go on from this checkpoint; says what was moved.

    The steps after it are trained again from the same groups (a fork would sample new ones).

    Raises:
        ConfigError: the run is going on, there is no such checkpoint, or its groups are gone.
    """
    config = load_config(resolved_config(output_dir), [])
    store = Store(config.ledger_path, config.ledger.sync)  # which no packer holds now
    try:
        oldest = min((known.step for known in store.steps()), default=step + 1) - 1
        if step < oldest:
            raise ConfigError(
                f"--step {step}: the ledger has groups from step {oldest + 1} on only (ledger.keep_steps); to go on "
                f"from an older checkpoint begin a new run with model.path at it"
            )
        later = CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint).rewind(step)
        (config.output / "summary.json").unlink(missing_ok=True)  # the run is not done any more
    finally:
        store.close()
    moved = ", ".join(f"step_{other}" for other in later) or "nothing"
    return f"the run goes on from step {step}; moved to checkpoints/dead: {moved}"


def resolved_config(output_dir: Path) -> Path:
    """The configuration that a run was started with."""
    path = output_dir / RESOLVED
    if not path.is_file():
        raise ConfigError(f"{output_dir}: there is no run ({RESOLVED} is missing)")
    return path
