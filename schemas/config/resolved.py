"""Record of a run's complete configuration, defaults and overrides included: `output_dir/config.resolved.yaml`."""

import os
from pathlib import Path

import yaml

from schemas.config.run import RunConfig

RESOLVED = "config.resolved.yaml"


def dump_config(config: RunConfig) -> str:
    """Return the whole configuration as YAML, defaults included. Loading the text gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def write_resolved(config: RunConfig, folder: Path | None = None) -> Path:
    """Write the complete configuration to `config.resolved.yaml`, atomically, and return the path.

    Args:
        config: configuration of the run.
        folder: folder of the file; None: `output_dir`.
    """
    path = (config.output if folder is None else folder) / RESOLVED
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several actors may write at the same start: each its own file, and the last rename wins with equal content.
    staging = path.with_suffix(f".{os.getpid()}.tmp")
    staging.write_text(dump_config(config), encoding="utf-8")
    staging.replace(path)
    return path
