"""One token from the viewer to the formula: a short run of the quickstart, and losses by hand from a page's values."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.system.quickstart import quickstart

STEPS, RECORDED_GROUPS = 3, 2
RUN_SECONDS = 900.0
"""Limit of the run on a busy machine; alone it takes half a minute."""


def short_quickstart(folder: Path) -> Path:
    """Run three steps of the quickstart with `telemetry.token_details`; return its output_dir."""
    path = quickstart(folder)
    tree = yaml.safe_load(path.read_text())
    tree["trainer"] |= {"max_steps": STEPS, "learning_rate": 0.01, "warmup_steps": 0}
    tree["telemetry"] = {"token_details": RECORDED_GROUPS}
    tree["eval"] = {"num_prompts": 0}
    path.write_text(yaml.safe_dump(tree))
    done = subprocess.run(
        [sys.executable, "-m", "actors", "up", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def loss_by_hand(shown: dict[str, float], keys: dict[str, Any]) -> float:
    """Return the quickstart's loss of a token before the average, of what a page shows of the token.

    −R·(adv_tau·A − kl_tau·(logp − q))·logp with R = exp(logp − q).

    Args:
        shown: `logp`, `q` and `advantage`.
        keys: `adv_tau`, `kl_tau`.
    """
    log_ratio = shown["logp"] - shown["q"]
    coefficient = float(keys["adv_tau"]) * shown["advantage"] - float(keys["kl_tau"]) * log_ratio
    return -math.exp(log_ratio) * coefficient * shown["logp"]
