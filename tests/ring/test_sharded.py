"""A gang whose ranks share out weights or rows, as real processes: it loses a rank in a step, and goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.config import RunConfig
from tests.marks import first_of
from tests.models import build
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    children,
    go_on,
    held_reward,
    processes,
    ring_config,
    steps_recorded,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


WAYS = {
    "weights": {"sharding": "fsdp"},
    "rows": {"context_parallel": 2},
    "heads": {"sharding": "fsdp", "tensor_parallel": 2},
    "experts": {"sharding": "fsdp", "expert_parallel": 2},
}
"""What the two ranks share out."""
SAID = {
    "weights": "weights were spread over ranks, so weights are not compared",
    "rows": "rows were divided among ranks, so weights are not compared",
    "heads": "weights were spread over ranks and rows were divided among ranks, so weights are not compared",
    "experts": "weights were spread over ranks, so weights are not compared",
}


@pytest.fixture(params=[pytest.param(way, marks=[pytest.mark.long] * (way in ("heads", "experts"))) for way in WAYS])
def shared_out(request: pytest.FixtureRequest) -> str:
    """One of the ways."""
    way: str = request.param
    return way


@pytest.fixture
def config(tmp_path: Path, shared_out: str) -> RunConfig:
    """Eight steps of two ranks on a tiny model; four of them when told to go on."""
    build(tmp_path / "model", "qwen3_moe" if shared_out == "experts" else "qwen3")
    return ring_config(
        tmp_path,
        model={"path": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
        trainer={
            "max_steps": 8,
            "learning_rate": 1e-3,
            "num_ranks": 2,
            "optimizer": {"eps": 1e-4},
            "checkpoint": {"interval": 3},
        }
        | WAYS[shared_out],
        inference={"engine": {"type": "embedded", "max_sequence_len": 64}},
        reward=held_reward(tmp_path, calls=15),
        eval={"num_prompts": 0},
        ledger={"keep_steps": 100},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        bus={"control": "ipc", "lease": 3.0},
    )


def test_two_ranks_train_save_and_are_replayed_within_the_tolerance(
    tmp_path: Path, config: RunConfig, shared_out: str
) -> None:
    """The run ends as any other, and one process that has all of it comes to the same loss and gradient norm."""
    go_on(tmp_path)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    command = [sys.executable, "-m", "actors", "replay", str(config.output), "--step", "8"]
    replayed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("within 0.0001") == 2
    assert SAID[shared_out] in replayed.stdout


def test_each_group_of_ranks_gets_its_rows(tmp_path: Path) -> None:
    """Four ranks, two for each row: every completion is trained once."""
    trainer = {"max_steps": 5, "num_ranks": 4, "context_parallel": 2}
    config = ring_config(tmp_path, trainer=trainer, eval={"num_prompts": 0})
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    # three groups of two completions, of twelve tokens at most: each rank's copy counted, it would be twice that
    assert all(0 < line["tokens"] <= 3 * 2 * 12 for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "place", "fault"),
    first_of(
        [
            ("trainer-0", "trainer.gradients", "SIGKILL"),
            ("trainer-1", "trainer.batch", "SIGKILL"),
            ("trainer-1", "trainer.batch", "SIGSTOP"),
        ]
    ),
)
def test_a_rank_that_is_lost_in_the_middle_of_a_step_costs_time_alone(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, victim: str, place: str, fault: str
) -> None:
    """The other one stands in a collective: it hears that the gang exits, both start anew, nothing is trained twice."""
    faults, other = tmp_path / "faults", "trainer-0" if victim == "trainer-1" else "trainer-1"
    faults.mkdir()
    monkeypatch.setenv("GRPO_FAULTS", str(faults))
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 4, "step 4")
        old = children(up.pid)
        (faults / f"{victim}@{place}").write_text(fault)
        go_on(tmp_path)
        wait_until((faults / f"{victim}@{place}.hit").exists, "the fault")
        wait_until(lambda: children(up.pid).get(other, old[other]) != old[other], f"{other} starts anew")
        if fault == "SIGSTOP":
            os.kill(old[victim], signal.SIGCONT)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    log = (config.output / "logs" / "up.log").read_text()
    assert f"{other} ended" not in log or "exit code 1" not in log
