"""A run on text with a model that sees images: trained, served, saved and replayed as any other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from schemas.config import RunConfig
from tests.marks import first_of
from tests.models import build
from tests.ring.harness import PATIENCE_SECONDS, check_promise, processes, ring_config

pytestmark = pytest.mark.slow


def vision_config(folder: Path, family: str, lora: Any) -> RunConfig:
    """Four steps at level 0 with the deterministic engine."""
    build(folder / "model", family)
    return ring_config(
        folder,
        model={"path": str(folder / "model"), "dtype": "float32", "device": "cpu", "lora": lora},
        packer={"groups_per_step": 3, "sequence_len": 64, "max_async_level": 0},
        trainer={"max_steps": 4, "learning_rate": 1e-2, "checkpoint": {"interval": 2}},
        inference={"engine": {"type": "embedded", "max_sequence_len": 64, "deterministic": True}},
        eval={"num_prompts": 0},
        ledger={"keep_steps": 100},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        bus={"control": "ipc"},
    )


@pytest.mark.parametrize(
    ("family", "lora"),
    first_of([("qwen3_vl", None), ("qwen3_vl", {"rank": 4, "alpha": 8.0}), ("qwen2_5_vl", None)]),
    ids=["qwen3", "qwen3 lora", "qwen2.5"],
)
def test_a_model_that_sees_images_is_trained_on_text_and_replayed_to_the_bit(
    tmp_path: Path, family: str, lora: Any
) -> None:
    """Trainer and engine agree at every step, the language layers move, and the tower keeps the bits of its file."""
    config = vision_config(tmp_path, family, lora)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    steps = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [step["mismatch_max"] < 1e-5 for step in steps] == [True] * 4
    command = [sys.executable, "-m", "actors", "replay", str(config.output), "--step", "3"]
    replayed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("same bits") == 3
    if lora is None:
        trained = load_file(config.output / "checkpoints" / "step_4" / "model.safetensors")
        given = load_file(tmp_path / "model" / "model.safetensors")
        same = {name for name, value in given.items() if torch.equal(trained[name], value)}
        assert same == {name for name in given if "visual." in name}
