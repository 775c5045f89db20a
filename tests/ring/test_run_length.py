"""Runs whose length is given in epochs."""

import json
from collections import Counter
from pathlib import Path

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from tests.ring.harness import ALL, PATIENCE_SECONDS, check_promise, processes, ring, ring_config


def two_epochs(folder: Path, **trainer: object) -> RunConfig:
    """Six rows in steps of three groups."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"word {i}", "answer": "ab"}) + "\n" for i in range(6)))
    return ring_config(
        folder,
        environments=[{"type": "jsonl", "path": str(path)}],
        reward={"functions": [{"path": "exact_match"}]},
        trainer={"max_steps": 0, "max_epochs": 2} | trainer,
        eval={"num_prompts": 0},
        telemetry={"sample_groups_per_step": 3},
    )


@pytest.mark.slow
def test_actors_without_the_data_are_told_the_number_of_steps(tmp_path: Path) -> None:
    """Started one by one, without `actors up`: the packer counts; each example is trained twice."""
    config = two_epochs(tmp_path)
    with ring(config) as run:
        run.start(*ALL).wait()
    check_promise(config.with_steps(4))
    samples = read_lines(config.output / "samples.jsonl")
    assert Counter(sample["prompt"] for sample in samples) == {f"word {i}": 2 for i in range(6)}


@pytest.mark.slow
def test_a_run_is_continued_for_more_epochs(tmp_path: Path) -> None:
    """`actors up` tells the number of steps; the same command says that the run is done; a third epoch trains on."""
    config = two_epochs(tmp_path)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert "trainer.max_epochs: 2 epochs are 4 steps\n" in started.text("up")
        assert started.up().wait(PATIENCE_SECONDS) == 0
        assert "nothing to do: done at step 4 (trainer.max_epochs 2)" in started.text("up").splitlines()[-1]
        assert started.up("trainer.max_epochs=3").wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config.with_steps(6))
