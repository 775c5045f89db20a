"""Runs of a model with experts whose trainer takes the engine's choice (trainer.router_replay), as real processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.ops.recorded_steps import RecordedSteps
from schemas.routed import UNKNOWN
from tests.models import build
from tests.ring.harness import PATIENCE_SECONDS, check_promise, go_on, held_reward, processes, ring_config
from tests.ring.test_branches import TEMPLATE, WORLDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

KINDS: dict[str, dict[str, Any]] = {
    "single turns": {},
    "branches": {"environments": [{"type": "python", "name": "agent", "path": f"{WORLDS}:Agent"}]},
}


@pytest.mark.parametrize("kind", ["single turns", pytest.param("branches", marks=pytest.mark.long)])
def test_each_trained_token_has_the_experts_of_the_engine(tmp_path: Path, kind: str) -> None:
    """On their way through rewards, ledger and packer; a replayed step has the same bits."""
    build(tmp_path / "model", "qwen3_moe")
    config = ring_config(
        tmp_path,
        model={"path": str(tmp_path / "model"), "dtype": "float32", "device": "cpu", "chat_template": TEMPLATE},
        rollout={"stop": list("abcdefghijkl")},
        packer={"groups_per_step": 3, "sequence_len": 96, "max_async_level": 0},
        trainer={"max_steps": 4, "learning_rate": 1e-3, "router_replay": True, "checkpoint": {"interval": 2}},
        inference={"engine": {"type": "embedded", "max_sequence_len": 96}},
        eval={"num_prompts": 0},
        ledger={"keep_steps": 100},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        reward=held_reward(tmp_path, calls=1000),
        **KINDS[kind],
    )
    go_on(tmp_path)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    for batches in RecordedSteps(config).batches(0, 4):
        for batch in batches:
            num_samples = len(batch.prompt_lengths)
            experts = batch.experts_of(0, num_samples)
            assert len(experts) == num_samples
            for rows in experts:
                # of a sample, only the last token has not been computed
                assert (rows[:-1] != UNKNOWN).all()
                assert (rows[-1] == UNKNOWN).all()
                assert rows.shape[1:] == (2, 2)
            assert len(np.unique(np.concatenate(experts))) == 5
    command = [sys.executable, "-m", "actors", "replay", str(config.output), "--step", "4"]
    replayed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("same bits") == 3
