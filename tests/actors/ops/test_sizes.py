"""Estimated bytes against those of a run, and of messages as they are sent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.algorithms.batches import build_batches
from actors.cli import main
from actors.ops.sizes import Size, batch_bytes, group_bytes, sizes, steps_in_ledger
from benchmarks.peers import lone_packer
from benchmarks.soak import config
from bus import codec
from schemas.config import RunConfig, dump_config
from schemas.messages import ImagePlace, Message, StepBatch
from tests.actors.algorithms.test_batches import HEADER, a_group

PROMPT = 64
"""Tokens of the prompt of the benchmark's groups."""
TOLERANCE = 0.15


def by_name(configuration: RunConfig) -> dict[str, Size]:
    """Return the estimates by name."""
    return {size.name: size for size in sizes(configuration)}


def num_bytes(message: Message) -> int:
    """Return the bytes of a message on the wire."""
    return codec.num_bytes([bytes(frame) for frame in codec.encode(message)])


def shaped(folder: Path, group: int, tokens: int, groups: int, level: int = 0, **sections: Any) -> RunConfig:
    """Return the configuration of 20 steps with checkpoints every four."""
    return config(
        folder,
        20,
        rollout={"group_size": group, "max_tokens": tokens},
        packer={"groups_per_step": groups, "sequence_len": PROMPT + tokens, "max_async_level": level},
        trainer={"checkpoint": {"interval": 4, "keep_last": 2}},
        eval={"num_prompts": 0, "every_steps": 0},
        **sections,
    )


@pytest.mark.parametrize(
    ("group", "tokens", "groups"), [(4, 64, 8), (16, 256, 4), (2, 4096, 6), (64, 128, 3), (8, 1500, 16)]
)
def test_estimates_are_those_of_a_run(tmp_path: Path, group: int, tokens: int, groups: int) -> None:
    """Group, batch and ledger within 15 %, with four bytes of text per token."""
    configuration = shaped(tmp_path, group, tokens, groups)
    estimates, batches, most = by_name(configuration), [], 0
    with lone_packer(configuration) as ring:
        text = "abcd" * tokens
        ring._template = ring._template.model_copy(update={"completions": [text] * group, "prompt": "abcd" * PROMPT})
        send = ring.trainer.try_send

        def sent(batch: StepBatch) -> bool:
            batches.append(num_bytes(batch))
            return send(batch)

        ring.trainer.try_send = sent  # type: ignore[method-assign]
        while not ring.over:
            ring.turn()
            query = "SELECT SUM(LENGTH(frames)) FROM payloads WHERE ordinal NOT IN (SELECT ordinal FROM unswept)"
            most = max(most, ring.packer.store.database.execute(query).fetchone()[0] or 0)
        measured = {
            "group": num_bytes(ring._template),
            "groups of a step": groups * num_bytes(ring._template),
            "batch of a rank": max(batches),
            "ledger on disk": most,
        }
    for name, found in measured.items():
        assert estimates[name].num_bytes == pytest.approx(found, rel=TOLERANCE), name


@pytest.mark.parametrize(
    ("group", "prompt", "tokens", "functions", "versions"),
    [(8, 64, 512, 1, 1), (8, 8192, 256, 1, 1), (16, 8, 4, 1, 1), (16, 8, 4, 10, 1), (8, 64, 512, 3, 64)],
)
def test_messages_of_other_shapes_have_the_bytes_of_the_estimate(
    group: int, prompt: int, tokens: int, functions: int, versions: int
) -> None:
    """Short completions, long prompts, many reward functions, weights that change many times in a completion."""
    starts = np.linspace(0, group * tokens, group * versions, endpoint=False).astype(np.int64)
    template = a_group(0, [tokens] * group, prompt=prompt)
    segments = np.zeros((starts.size, template.segments.shape[1]), np.int64)
    segments[:, 0] = starts
    message = template.model_copy(
        update={
            "prompt": "abcd" * prompt,
            "completions": ["abcd" * tokens] * group,
            "segments": segments,
            "segment_temperatures": np.ones(starts.size, np.float32),
            "reward_names": [f"function_{number}" for number in range(functions)],
            "rewards_FG": np.zeros((functions, group)),
        }
    )
    estimated = group_bytes(group, prompt, tokens, functions=functions, versions=versions)
    assert estimated == pytest.approx(num_bytes(message), rel=TOLERANCE)
    (batch,) = build_batches([message], 1, prompt + tokens, 1, **HEADER | {"digests": ["d"]})
    assert batch_bytes(group, prompt + tokens) == pytest.approx(num_bytes(batch), rel=TOLERANCE)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_images_travel_once_with_their_group_and_once_with_each_rank(num_ranks: int) -> None:
    """As many bytes as their files have."""
    images = [b"a" * 30_000, b"b" * 20_000]
    places = [{"image": 0, "start": 1, "length": 4}, {"image": 1, "start": 8, "length": 4}]
    groups = [
        a_group(number, [64] * 4, prompt=PROMPT).model_copy(
            update={
                "images": [bytes([number]) + image for image in images],
                "image_places": [ImagePlace(**place) for place in places],
            }
        )
        for number in range(3)
    ]
    each = sum(map(len, groups[0].images))
    without = groups[0].model_copy(update={"images": [], "image_places": []})
    assert num_bytes(groups[0]) - num_bytes(without) == pytest.approx(each, abs=200)
    batches = build_batches(groups, num_ranks, PROMPT + 64, 1, **HEADER | {"digests": ["d"] * 3})
    for batch in batches:
        shown = {group.ordinal for group in groups for image in group.images if image in batch.images}
        assert num_bytes(batch) == pytest.approx(
            batch_bytes(12 // num_ranks, PROMPT + 64) + len(shown) * each, rel=0.15
        )


def test_steps_of_the_ledger_follow_the_keys(tmp_path: Path) -> None:
    """From the oldest checkpoint to resume from, or as far back as replays are wanted."""
    assert steps_in_ledger(shaped(tmp_path, 4, 64, 8)) == 2 * 4
    assert steps_in_ledger(shaped(tmp_path, 4, 64, 8, level=3)) == 2 * 4 + 3
    assert steps_in_ledger(shaped(tmp_path, 4, 64, 8, ledger={"keep_steps": 100})) == 100


def test_check_names_the_keys_of_what_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A group of 64 answers of 32 768 tokens travels, and a step of 256; a batch holds fewer than 512 such groups."""
    path = tmp_path / "run.yaml"
    for groups, refused in ((256, False), (512, True)):
        path.write_text(dump_config(shaped(tmp_path, 64, 32_768, groups)))
        main(["check", str(path), "--sizes"])
        lines = {line[:34].strip(): line for line in capsys.readouterr().out.splitlines()}
        assert "LIMIT" not in lines["group"]
        assert ("MORE THAN THE LIMIT of 16 GiB" in lines["batch of a rank"]) == refused
    assert "packer.groups_per_step, packer.sequence_len" in lines["batch of a rank"]
