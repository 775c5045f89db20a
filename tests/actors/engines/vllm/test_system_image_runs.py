"""A whole run with images and a real vLLM on the CPU (`make test-system`): one server for all its environments."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from tests.actors.engines.vllm.runs import VLLM, Say
from tests.ring import test_images as rows
from tests.ring import test_turn_images as turns
from tests.ring.harness import check_promise, own_reward, processes, ring_config

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

STEPS = 5
SEQUENCE_LEN = 128
TIGHT = 1e-4
"""Largest gap between logprobs of vLLM and of the trainer, both in float32."""
UP_SECONDS = 1500.0
"""Limit of the whole run; only a hang reaches it, however busy the machine is."""


def config_of(folder: Path, model: Path) -> RunConfig:
    """A run at lag 0 whose steps have groups of rows with images and of an environment that shows images in turns."""
    options = {"folder": str(folder)}
    environments: list[dict[str, Any]] = [
        {"type": "jsonl", "name": "rows", "path": str(rows.write_rows(folder)), "weight": 1.0},
        {
            "type": "python",
            "name": "draws",
            "path": f"{turns.WORLDS}:Draws",
            "options": options,
            "max_turns": 3,
            # a policy this small samples the token of images, which vLLM takes for the place of an image
            "on_failure": "unscorable",
            "weight": 1.0,
        },
    ]
    return ring_config(
        folder,
        model={"path": str(model), "dtype": "float32", "device": "cpu", "chat_template": turns.TEMPLATE},
        environments=environments,
        # most turns end at a letter, which the name of no special token has
        rollout={"group_size": 4, "max_tokens": 6, "group_timeout": 300.0, "stop": list("cfhjklquw")},
        reward=own_reward("early_letters"),
        packer={"groups_per_step": 6, "sequence_len": SEQUENCE_LEN, "max_async_level": 0},
        trainer={"max_steps": STEPS, "learning_rate": 1e-2, "checkpoint": {"interval": 2}},
        inference={"engine": VLLM | {"max_model_len": 4096, "startup_timeout": 900.0}},
        eval={"num_prompts": 0},
        telemetry={"sample_groups_per_step": 6},
        ledger={"keep_steps": 100},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        bus={"control": "ipc"},
    )


def test_trainer_and_vllm_agree_at_each_step_of_a_run_with_images(
    seeing_model: Path, packages: str, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of mixed sizes in rows, and in later turns; each step is sampled by the weights of the step before it."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config = config_of(tmp_path, seeing_model)
    paths = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths}), processes(config, tmp_path) as started:
        assert started.up().wait(UP_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    steps = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [step["lag_max"] for step in steps] == [0] * STEPS
    largest = [step["mismatch_max"] for step in steps]
    say(f"largest difference of logprobs by step: {', '.join(f'{one:.1e}' for one in largest)}")
    assert max(largest) < TIGHT
    # the policy moves, so a server with old weights would show
    assert min(step["grad_norm"] for step in steps) > 0
    samples = read_lines(config.output / "samples.jsonl")
    assert {one["environment"] for one in samples} == {"rows", "draws"}
    shown = {digest for one in samples if one["environment"] == "rows" for digest in one.get("images", {})}
    assert len(shown) == len(rows.SIZES)
    # one in turn 2, one twice in turn 3, and one twice behind the last answer
    assert max(turns.turns_with_images(config)) == 5
    assert rows.replayed(config, STEPS).count("same bits") == 3
