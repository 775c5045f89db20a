"""The configuration that a run runs with, defaults and overrides included, in its output_dir for whoever asks later."""

import os
from pathlib import Path

from schemas.config.load import dump_config
from schemas.config.run import RunConfig

RESOLVED = "config.resolved.yaml"


def write_resolved(config: RunConfig) -> Path:
    """Write it, atomically; returns where."""
    path = config.output / RESOLVED
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(f".{os.getpid()}.tmp")
    staging.write_text(dump_config(config), encoding="utf-8")
    staging.replace(path)
    return path
