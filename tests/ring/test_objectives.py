"""What a step can minimise beside its policy loss, through a whole run of real processes with a tiny model."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.config import RunConfig
from tests.conftest import ModelFolder
from tests.marks import first_of
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    children,
    own_reward,
    processes,
    ring_config,
    steps_recorded,
    wait_until,
)

pytestmark = pytest.mark.slow

MAX_STEPS = 8


def objective_config(
    folder: Path,
    model: Path,
    lora: dict[str, Any] | None = None,
    max_steps: int = MAX_STEPS,
    sections: dict[str, dict[str, Any]] | None = None,
    **trainer: Any,
) -> RunConfig:
    """Some steps at level 0 with the deterministic engine, a checkpoint after every third."""
    return ring_config(
        folder,
        model={"path": str(model), "dtype": "float32", "device": "cpu", "lora": lora},
        packer={"groups_per_step": 3, "sequence_len": 64, "max_async_level": 0} | (sections or {}).get("packer", {}),
        reward=(sections or {}).get("reward", {}),
        trainer={"max_steps": max_steps, "learning_rate": 3e-3, "checkpoint": {"interval": 3}} | trainer,
        inference={"engine": {"type": "embedded", "max_sequence_len": 64, "deterministic": True}},
        eval={"num_prompts": 0},
        ledger={"keep_steps": 100},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        bus={"control": "ipc", "lease": 3.0},
    )


def steps_of(config: RunConfig) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def ran(config: RunConfig, folder: Path, kill_after: int | None = None) -> list[dict[str, Any]]:
    """The lines of a run that has ended well; its trainer is killed once after a step, where one is given."""
    with processes(config, folder) as started:
        up = started.up()
        if kill_after is not None:
            wait_until(lambda: steps_recorded(config) >= kill_after, f"step {kill_after}")
            os.kill(children(up.pid)["trainer-0"], signal.SIGKILL)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    return steps_of(config)


def check_replay(config: RunConfig, step: int) -> None:
    """`actors replay`, in one process, has the recorded loss, gradient norm and weights."""
    command = [sys.executable, "-m", "actors", "replay", str(config.output), "--step", str(step)]
    replayed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("same bits") == 3


@pytest.mark.long
def test_an_adaptive_entropy_coefficient_outlives_a_killed_trainer_and_is_replayed(
    tmp_path: Path, model_folder: ModelFolder
) -> None:
    """A quarter more after each step, over two ranks and a crash; replays begin at the model and at a checkpoint."""
    adaptive = {"entropy_coef": 0.5, "adaptive_entropy": {"target": 100.0, "delta": 0.25, "max_coef": 9.0}}
    config = objective_config(tmp_path, model_folder(), num_ranks=2, **adaptive)
    lines = ran(config, tmp_path, kill_after=4)
    assert [line["entropy_coef"] for line in lines] == [0.0, *(0.5 + 0.25 * step for step in range(1, MAX_STEPS))]
    for step in (3, 8):
        check_replay(config, step)
    saved = json.loads((config.output / "checkpoints" / "step_6" / "trainer" / "entropy_control.json").read_text())
    assert saved == {"coef": 2.0, "entropy": lines[5]["entropy_regularised"]}


@pytest.mark.parametrize(("num_ranks", "phi"), first_of([(1, False), (2, True)]))
def test_supervised_examples_are_learned_beside_the_policy_and_replayed(
    tmp_path: Path, model_folder: ModelFolder, num_ranks: int, phi: bool
) -> None:
    """The same four examples in each step, μ from 0 (where none is learned) to 0.5: their loss falls by a third."""
    path = tmp_path / "sft.jsonl"
    rows = [{"prompt": text, "completion": text[::-1]} for text in ("abcd", "efgh", "klm", "xyz")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {"path": str(path), "batch_size": 4, "mu_peak": 0.5, "mu_valley": 0.5}
    sft |= {"mu_warmup_steps": 2, "mu_decay_steps": 0, "phi": phi}
    weak = {"reward": {"advantage": {"type": "mean"}}}  # a policy gradient that leaves room for the examples
    loss = {"type": "surogate"}
    config = objective_config(tmp_path, model_folder(), sections=weak, num_ranks=num_ranks, sft=sft, loss=loss)
    first, *lines = ran(config, tmp_path)
    assert "sft_nll" not in first
    nll = [line["sft_nll"] for line in lines]
    assert nll[-1] < nll[0] * 2 / 3, nll
    check_replay(config, 8)


TEACHERS_TERM = {"loss": {"type": "surogate", "teacher_tau": 0.5}, "reference": {"beta": 0.1, "place": "reward"}}
DISTILLATION = {"loss": {"type": "ref_kl"}, "reference": {"beta": 0.1}}


@pytest.mark.parametrize("lora", first_of([None, {"rank": 4, "alpha": 8.0}]), ids=["full", "lora"])
@pytest.mark.parametrize("trainer", first_of([TEACHERS_TERM, DISTILLATION]), ids=["teacher's term", "distillation"])
def test_reference_and_teacher_stay_and_the_policy_moves(
    tmp_path: Path, model_folder: ModelFolder, trainer: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    """Four steps: the KL from the reference begins at 0 and grows, that from another model is there from the start."""
    teacher = {"path": str(model_folder("llama", seed=5)), "dtype": "float32"}
    config = objective_config(tmp_path, model_folder(), lora, max_steps=4, teacher=teacher, **trainer)
    lines = ran(config, tmp_path)
    for name in ("loss", "grad_norm", "reference_kl", "teacher_kl"):
        assert all(isinstance(line[name], float) and math.isfinite(line[name]) for line in lines), name
    reference = [line["reference_kl"] for line in lines]
    assert reference[0] == 0.0 < min(reference[2:])
    assert all(abs(line["teacher_kl"]) > 0.01 for line in lines)
    check_replay(config, 4)


OF_THE_STEP = {
    "advantages normalised over tokens": (
        {"reward": {"advantage": {"type": "norm"}, "adv_norm": {}, "mask_no_eos_with_zero": True}},
        {"loss": {"type": "dapo", "compat": {"loss_normalizer": "step_mean"}}, "num_minibatches": 2},
    ),
    "without zero advantages": ({"packer": {"filter_zero_advantages": True}}, {"loss": {"type": "dppo"}}),
    "normalised after the KL": (
        {"reward": {"advantage": {"type": "gae", "gae_lambda": 0.9, "reward_norm": "zscore"}, "adv_norm": {}}},
        {"loss": {"type": "decoupled"}, "reference": {"beta": 0.1, "place": "reward", "old_logprobs": "inference"}},
    ),
    "KL before the baseline": (
        {"reward": {"advantage": {"type": "reinforce_pp"}}},
        {
            "loss": {"type": "dapo"},
            "reference": {"beta": 0.1, "estimator": "k1", "place": "group_reward"},
            "distillation": {"type": "rlsd", "rlsd_lambda_warmup_steps": 2},
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", first_of(OF_THE_STEP))
def test_what_is_of_the_whole_step_is_the_same_on_two_ranks_and_in_a_replay(
    tmp_path: Path, model_folder: ModelFolder, case: str
) -> None:
    """Norms, denominators and KLs of a step are of both ranks' samples; one process has the bits that two had."""
    sections, trainer = OF_THE_STEP[case]
    if "distillation" in trainer:
        trainer = trainer | {"teacher": {"path": str(model_folder("llama", seed=5)), "dtype": "float32"}}
    sections = sections | {"reward": own_reward("checksum") | sections.get("reward", {})}
    config = objective_config(tmp_path, model_folder(), max_steps=4, sections=sections, num_ranks=2, **trainer)
    lines = ran(config, tmp_path)
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)
    if "adv_norm" in sections.get("reward", {}):
        assert max(line["advantage_std"] for line in lines) == pytest.approx(1.0, rel=0.05)
    check_replay(config, 4)
