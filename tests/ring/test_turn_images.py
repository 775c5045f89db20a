"""Whole runs of environments that show images in later turns."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig, dump_config
from schemas.config.environments import PythonConfig
from tests import models
from tests.marks import first_of
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    processes,
    ring_config,
    steps_recorded,
    wait_until,
)
from tests.ring.test_images import replayed

pytestmark = pytest.mark.slow

WORLDS = Path(__file__).with_name("worlds.py")
TEMPLATE = (
    "<bos>{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
)
STEPS = 4


def config_of(folder: Path, family: str = "qwen3_vl", hostile: bool = False, **environment: Any) -> RunConfig:
    """A run of a tiny model at level 0; most turns end at a letter, which the name of no special token has."""
    models.build(folder / "model", family)
    options = {"folder": str(folder), "hostile": hostile}
    one = {"type": "python", "name": "draws", "path": f"{WORLDS}:Draws", "options": options, "max_turns": 3}
    return ring_config(
        folder,
        model={"path": str(folder / "model"), "dtype": "float32", "device": "cpu", "chat_template": TEMPLATE},
        environments=[one | environment],
        rollout={"group_size": 4, "max_tokens": 6, "group_timeout": 300.0, "stop": list("cfhjklquw")},
        reward={"functions": []},
        packer={"groups_per_step": 3, "sequence_len": 128, "max_async_level": 0},
        trainer={"max_steps": STEPS, "learning_rate": 1e-2, "checkpoint": {"interval": 2}},
        inference={"engine": {"type": "embedded", "max_sequence_len": 128, "deterministic": True}},
        eval={"num_prompts": 0},
        ledger={"keep_steps": 100},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        bus={"control": "ipc", "lease": 3.0},
    )


def turns_with_images(config: RunConfig) -> list[int]:
    """The number of images that each trajectory has shown."""
    return [
        sum(part["type"] == "image" for one in messages if isinstance(one["content"], list) for part in one["content"])
        for record in read_lines(config.output / "samples.jsonl")
        for messages in record.get("messages", [])
    ]


def trajectories_replayed(config: RunConfig) -> str:
    """What `actors replay` says of the newest group."""
    (config.output / "config.resolved.yaml").write_text(dump_config(config), encoding="utf-8")
    newest = max(record["ordinal"] for record in read_lines(config.output / "samples.jsonl"))
    command = [sys.executable, "-m", "actors", "replay", str(config.output), "--trajectory", str(newest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "played again without a model" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("family", first_of(["qwen3_vl", "qwen2_5_vl"]))
def test_images_of_later_turns_are_trained_as_sampled_also_after_a_kill(tmp_path: Path, family: str) -> None:
    """Engine and trainer agree at each step, steps are replayed to the bit, and trajectories call by call."""
    config = config_of(tmp_path, family)
    with processes(config, tmp_path) as started:
        running = {
            name: started.run(name) for name in ("packer-0", "trainer-0", "inference-0", "reward-0", "rollout-0")
        }
        wait_until(lambda: steps_recorded(config) >= 1, "a step is recorded")
        running["rollout-0"].kill()
        running["rollout-0"].wait()
        started.run("rollout-0")
        assert running["packer-0"].wait(PATIENCE_SECONDS) == 0, started.text("packer-0")
    assert check_promise(config).dropped == {}
    steps = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    assert all(step["mismatch_max"] < 1e-4 for step in steps)
    # one in turn 2, one twice in turn 3, and one twice behind the last answer
    assert max(turns_with_images(config)) == 5
    assert replayed(config, 3).count("same bits") == 3
    assert "DIFFERENT" not in (told := trajectories_replayed(config)), told
    [one] = config.environments
    assert isinstance(one, PythonConfig)
    one.options["shade"] = 1
    assert "images: other ones than in the record, with the same tokens" in trajectories_replayed(config)


@pytest.mark.long
def test_images_that_an_agent_sends_are_trained_as_sampled(tmp_path: Path) -> None:
    """By OpenAI's chat API, in both calls; the second call has the first one's image again, and shows it once more."""
    agent = {"type": "agent", "name": "looks", "path": f"{WORLDS.with_name('agents.py')}:looks", "options": {}}
    config = config_of(tmp_path, **agent)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    steps = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [step["mismatch_max"] < 1e-4 for step in steps] == [True] * STEPS
    assert max(turns_with_images(config)) == 3
    assert max(step["samples_per_completion"] for step in steps) == 1.0
    assert replayed(config, 3).count("same bits") == 3
    assert "DIFFERENT" not in (told := trajectories_replayed(config)), told


def test_a_hostile_image_ends_its_trajectory_in_words_and_costs_no_other(tmp_path: Path) -> None:
    """With `on_failure: unscorable` the others of the group are trained; all steps come."""
    config = config_of(tmp_path, hostile=True, on_failure="unscorable")
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    assert steps_recorded(config) == STEPS
    records = read_lines(config.output / "samples.jsonl")
    pairs = [pair for one in records for pair in zip(one["stop_conditions"], one["failures"] or [""] * 4, strict=True)]
    failures = [failure for stop, failure in pairs if stop == "failed"]
    assert failures
    assert all("has an image that is no JPEG, PNG or WebP image" in failure for failure in failures)
    assert {"done"} <= {stop for stop, failure in pairs if not failure}
    assert max(turns_with_images(config)) > 0
