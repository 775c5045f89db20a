"""Runs that are done, with real checkpoints, for tests of uploads; and the process that uploads them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from actors.learner.checkpoints import CheckpointFolder
from actors.learner.snapshots import Snapshot
from schemas.config import RunConfig, dump_config
from schemas.config.trainer import CheckpointConfig
from tests.model_hub import TOKEN, ModelHub
from tests.ring.harness import ring_config

RUN = "0123456789abcdef"
PATIENCE_SECONDS = 150.0


def saved(output: Path, *steps: int, keep_last: int | None = None, history: str = "a", run: str = RUN) -> None:
    """Save checkpoints as a trainer does: a model of one tensor, a file for people, and the trainer's state."""
    folder = CheckpointFolder(output / "checkpoints", CheckpointConfig(keep_last=keep_last))
    for step in steps:
        snapshot = Snapshot(
            {"model.safetensors": {"weight": torch.full((4,), float(step))}},
            {"config.json": b"{}", "trainer/state.json": b'{"step": %d}' % step},
        )
        folder.save(step, f"chain-{history}-{step}".ljust(64, "0"), 0, [], run, snapshot)


def run_config(folder: Path, **keys: Any) -> RunConfig:
    """Configuration of a run that pushes to org/model, with short pauses."""
    pushed = {"hub_model_id": "org/model", "retry_pause": 0.1} | keys
    return ring_config(folder, bus={"lease": 0.5, "beat_interval": 0.1}, push_to_hub=pushed)


def done(folder: Path, *steps: int, **keys: Any) -> RunConfig:
    """A run that is done, with checkpoints of these steps."""
    config = run_config(folder, **keys)
    saved(config.output, *steps)
    (config.output / ".grpo-actors.json").write_text("{}")
    (config.output / "summary.json").write_text("{}")
    return config


def start(config: RunConfig, hub: ModelHub, token: str = TOKEN) -> "subprocess.Popen[str]":
    """The process that uploads; there is no packer."""
    folder = config.output.parent
    (folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "actors", "run", "uploader", "--config", str(folder / "run.yaml")]
    return subprocess.Popen(
        [*command, "--name", "uploader-0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | hub.variables(token) | {"MY_TOKEN": TOKEN},
    )


def uploaded(config: RunConfig, hub: ModelHub, token: str = TOKEN) -> tuple[int, str]:
    """Exit code and log of such a process at its end."""
    process = start(config, hub, token)
    log, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, log


def record(config: RunConfig) -> dict[str, Any]:
    """uploads.json."""
    return json.loads((config.output / "uploads.json").read_text())  # type: ignore[no-any-return]
