"""Whole runs over prompts with images: nothing is lost when actors are killed, and steps are replayed to the bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.config import RunConfig
from tests import models
from tests.actors.datasets.web import serving
from tests.images import png
from tests.marks import first_of
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    held_by,
    processes,
    ring_config,
    steps_recorded,
    wait_until,
)

pytestmark = pytest.mark.slow

SIZES = [(8, 8), (16, 40), (64, 50), (24, 24), (8, 72)]
"""Height and width in pixels: 1 to 12 tokens."""
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}="
)
ANSWERED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}={% endif %}"
    + TEMPLATE.removeprefix("{% for message in messages %}").removesuffix("=")
    + "{% if add_generation_prompt %}={% endif %}"
)
"""The template for rows with answers."""


def write_rows(folder: Path) -> Path:
    """Rows with no image, one, two of unlike sizes, and one twice; files of images lie next to the rows."""
    for number, (height, width) in enumerate(SIZES):
        (folder / f"{number}.png").write_bytes(png(height, width, seed=number))
    shown = [[], [0], [1], [2, 3], [4, 4], [3, 0, 1]]
    rows = [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        *({"type": "image", "path": f"{image}.png"} for image in images),
                        {"type": "text", "text": "abcdef"[: 1 + number]},
                    ],
                }
            ],
            "answer": "abc",
        }
        for number, images in enumerate(shown)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_of(folder: Path, family: str = "qwen3_vl", steps: int = 4, **sections: Any) -> RunConfig:
    """A run of a tiny model at level 0 with the deterministic engine."""
    models.build(folder / "model", family)
    keys: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu", "chat_template": TEMPLATE},
        "environments": [{"type": "jsonl", "path": str(write_rows(folder))}],
        "rollout": {"group_size": 4, "max_tokens": 8},
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "packer": {"groups_per_step": 4, "sequence_len": 96, "max_async_level": 0},
        "trainer": {"max_steps": steps, "learning_rate": 1e-2, "checkpoint": {"interval": 2}},
        "inference": {"engine": {"type": "embedded", "max_sequence_len": 96, "deterministic": True}},
        "eval": {"num_prompts": 0},
        "ledger": {"keep_steps": 100},
        "up": {"torch_threads": {"trainer": 1, "inference": 1}},
        "bus": {"control": "ipc"},
    }
    return ring_config(
        folder,
        **keys | {name: keys[name] | value if isinstance(value, dict) else value for name, value in sections.items()},
    )


def replayed(config: RunConfig, step: int) -> str:
    """What `actors replay` says of a step."""
    command = [sys.executable, "-m", "actors", "replay", str(config.output), "--step", str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("family", "sections"),
    first_of(
        [
            ("qwen3_vl", {}),
            ("qwen2_5_vl", {}),
            ("qwen3_vl", {"trainer": {"reference": {"beta": 0.1}}}),
            ("qwen3_vl", {"trainer": {"num_ranks": 2, "sharding": "fsdp"}}),
            ("qwen3_vl", {"model": {"train_vision_tower": True, "train_projector": True}}),
            ("qwen3_vl", {"model": {"train_vision_tower": True, "train_projector": True, "lora": {"rank": 4}}}),
        ]
    ),
    ids=["qwen3", "qwen2.5", "reference", "sharded", "tower", "tower lora"],
)
def test_a_run_with_images_agrees_with_its_engine_and_is_replayed_to_the_bit(
    tmp_path: Path, family: str, sections: Any
) -> None:
    """Trainer and engine see the same pixels at the same places, at every step; samples show where images were."""
    config = config_of(tmp_path, family, **sections)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    steps = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [step["mismatch_max"] < 1e-4 for step in steps] == [True] * 4
    told = replayed(config, 3)
    # one process sums in another order than two ranks with shards
    assert told.count("same bits") == 3 or config.trainer.num_ranks > 1
    samples = [json.loads(line) for line in (config.output / "samples.jsonl").read_text().splitlines()]
    prompts = [line["prompt"] for line in samples]
    shown = {part["digest"] for prompt in prompts for part in prompt[0]["content"] if part["type"] == "image"}
    assert {digest for line in samples for digest in line.get("images", {})} == shown
    assert {path.name for path in (config.output / "sample_images").iterdir()} == shown
    kinds = {part["type"] for prompt in prompts for part in prompt[0]["content"]}
    assert kinds == {"image", "text"}


def test_nothing_is_lost_when_actors_of_a_run_with_images_are_killed(tmp_path: Path) -> None:
    """SIGKILL of each kind in turn, in the middle of work; each group is trained once."""
    config = config_of(tmp_path, steps=12)
    with processes(config, tmp_path) as started:
        running = {
            name: started.run(name) for name in ("packer-0", "trainer-0", "inference-0", "reward-0", "rollout-0")
        }
        wait_until(lambda: held_by(config, "rollout-0"), "rollout-0 holds tickets")
        for number, name in enumerate(("rollout-0", "reward-0", "packer-0", "inference-0", "trainer-0"), start=1):
            wait_until(lambda number=number: steps_recorded(config) >= number, f"step {number} is recorded")
            running[name].kill()
            running[name].wait()
            running[name] = started.run(name)
        assert running["packer-0"].wait(PATIENCE_SECONDS) == 0, started.text("packer-0")
    check_promise(config)


def test_a_run_with_images_at_urls_goes_on_without_their_server(tmp_path: Path) -> None:
    """Packer, rollout actors and trainer have the files of one download; their keys agree, so no group is dropped."""
    rows = [json.loads(line) for line in write_rows(tmp_path).read_text().splitlines()]
    supervised = [row | {"completion": "abc"} for row in rows]
    with serving() as web:
        web.pages = {f"/{number}.png": (tmp_path / f"{number}.png").read_bytes() for number in range(len(SIZES))}
        for name, written in (("urls", rows), ("sft", supervised)):
            text = "".join(json.dumps(row) + "\n" for row in written)
            (tmp_path / f"{name}.jsonl").write_text(text.replace('"path": "', f'"url": "{web.origin}/'))
        images = {"origins": [web.origin]}
        sft = {"path": str(tmp_path / "sft.jsonl"), "batch_size": 2, "images": images}
        sft |= {"mu_peak": 0.5, "mu_valley": 0.5, "mu_warmup_steps": 0, "mu_decay_steps": 0}
        sections: dict[str, Any] = {
            "environments": [{"type": "jsonl", "path": str(tmp_path / "urls.jsonl"), "images": images}],
            "trainer": {"sft": sft},
            "model": {"chat_template": ANSWERED},
        }
        config = config_of(tmp_path, steps=2, **sections)
        with processes(config, tmp_path) as started:
            assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert sorted(web.asked) == sorted(web.pages)
    config = config.with_steps(4)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    assert steps_recorded(config) == 4
    assert replayed(config, 3).count("same bits") == 3
