"""prime-rl files with traps: keys of 2025, names that outlived their time, numbers as texts, three files."""

from pathlib import Path
from typing import Any

import pytest

from actors.imports.job import Import, Options
from actors.imports.prime_rl import read
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_values, check_verdicts


def imported(tmp_path: Path, *texts: str, options: Options | None = None) -> Import:
    """Return the import of files, in their order."""
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"part{number}.toml")
        files[-1].write_text(text)
    return read(files, [], options or Options())


SUMMER = (
    """
max_steps = 500
batch_size = 1024
micro_batch_size = 1
seq_len = 2048
rollouts_per_example = 16
advantage_type = "drgrpo"
outputs_dir = "out"
[model]
name = "Qwen/Qwen2.5-3B-Instruct"
[monitor.wandb]
project = "alphabet"
[environment]
id = "vf-alphabet-sort"
[environment.args]
max_turns = 2
[sampling]
max_tokens = 512
[eval]
interval = 50
environment_ids = ["vf-alphabet-sort"]
num_examples = [64]
rollouts_per_example = [4]
[eval.sampling]
temperature = 0.6
top_p = 0.9
top_k = -1
max_tokens = 4096
""",
    """
max_steps = 500
async_level = 2
recompute_logprobs = true
[model]
name = "Qwen/Qwen2.5-3B-Instruct"
[weights]
interval = 100
[optim]
lr = 1e-6
[loss]
type = "clip"
epsilon_low = 0.2
epsilon_high = 0.28
""",
)
"""Files of summer 2025 for orchestrator and trainer."""


def test_files_of_summer_2025_have_the_values_of_their_code(tmp_path: Path) -> None:
    """grpo_loss_clip: coef_1 = clamp(r, 0, 4), coef_2 = clamp(coef_1, 0.8, 1.28), max(−coef_1 A, −coef_2 A): dapo.

    The orchestrator fills rows of its own seq_len; 1024 ÷ 16 = 64 groups; an evaluation has 2047 tokens at most.
    """
    job = imported(tmp_path, *SUMMER, options=Options(world=2))
    assert job.report.origin == "prime-rl 2025-11"
    check_values(job, {
        "packer.groups_per_step": 64, "packer.sequence_len": 2048, "packer.max_async_level": 2,
        "packer.strict_async_level": True, "reward.advantage.type": "mean", "output_dir": "out",
        "trainer.loss.type": "dapo", "trainer.loss.epsilon": 0.2, "trainer.loss.epsilon_high": 0.28,
        "trainer.loss.delta": 4.0, "trainer.loss.old_logprobs": "step_start", "eval.num_prompts": 64,
        "eval.completions_per_prompt": 4, "eval.temperature": 0.6, "eval.top_p": 0.9, "eval.top_k": 0,
        "eval.max_tokens": 2047, "telemetry.trackers.0.project": "alphabet",
    })  # fmt: skip
    check_verdicts(job, {
        "orchestrator.advantage_type": "irrelevant", "trainer.weights.interval": "irrelevant",
        "trainer.loss.type": "converted", "trainer.recompute_logprobs": "converted",
        "orchestrator.eval.sampling.max_tokens": "converted", "orchestrator.micro_batch_size": "irrelevant",
    })  # fmt: skip


def test_the_loss_of_a_bounded_ratio_is_asked_for(tmp_path: Path) -> None:
    """The default loss of summer 2025 has no counterpart, and no other one takes its place."""
    text = SUMMER[1].replace('"clip"', '"ratio"').replace("epsilon_low = 0.2\nepsilon_high = 0.28", "clip_ratio = 8.0")
    job = imported(tmp_path, SUMMER[0], text, options=Options(world=2))
    assert "trainer.loss" in {question.target for question in job.report.questions}
    check_verdicts(job, {"trainer.loss.type": "refused", "trainer.loss.clip_ratio": "refused"})


AUTUMN = """
inference_gpu_ids = [0]
trainer_gpu_ids = [1]
max_steps = 500
[model]
name = "Qwen/Qwen3-4B-Instruct-2507"
[ckpt]
interval = 10
keep = 2
[trainer.loss]
mask_ratio_high = 10.0
mask_ratio_low = 0.1
kl_tau = 0.01
[trainer.model.experimental.lora]
rank = 8
[orchestrator]
batch_size = 512
rollouts_per_example = 16
seq_len = 4096
zero_truncated_completions = true
[orchestrator.sampling]
max_tokens = 512
[orchestrator.buffer]
type = "online-difficulty"
[orchestrator.advantage]
std_norm = false
leave_one_out = true
[[orchestrator.env]]
id = "wiki-search"
[inference]
"""


def test_a_file_of_autumn_2025_has_the_values_of_its_code(tmp_path: Path) -> None:
    """CHANGELOG of prime-rl: ckpt.keep is keep_last, mask_ratio_* are token_mask_*, both of December 2025.

    Before that, orchestrator.seq_len was the length of rows, there was no geometric mask, and strict_async_level was
    true (OrchestratorConfig of November).
    """
    job = imported(tmp_path, AUTUMN)
    assert job.report.origin == "prime-rl 2025-11"
    check_values(job, {
        "packer.sequence_len": 4096, "packer.groups_per_step": 32, "packer.online_difficulty_filtering": True,
        "packer.strict_async_level": True, "packer.max_async_level": 1, "reward.advantage.type": "rloo",
        "trainer.loss.type": "surogate", "trainer.loss.token_mask_low": 0.1, "trainer.loss.token_mask_high": 10.0,
        "trainer.loss.geo_mask_low": 0.0, "trainer.loss.geo_mask_high": 1e9, "trainer.loss.kl_tau": 0.01,
        "trainer.checkpoint.interval": 10, "trainer.checkpoint.keep_last": 2, "model.lora.rank": 8,
    })  # fmt: skip
    check_verdicts(job, {
        "orchestrator.zero_truncated_completions": "refused", "orchestrator.buffer.type": "converted",
        "trainer.loss.mask_ratio_high": "renamed", "ckpt.keep": "renamed",
        "orchestrator.advantage.std_norm": "irrelevant",
    })  # fmt: skip


FILTERED = """
[orchestrator]
rollouts_per_example = 8
max_inflight_rollouts = 512
[[orchestrator.train.env]]
id = "m"
[[orchestrator.post_batch_filters]]
type = "zero_advantage"
action = "drop"
"""
MASKED = """
max_async_level = 2
[trainer.loss]
ipo_mask_low = 0.1
[[orchestrator.env]]
id = "m"
"""
GEOMETRIC = """
[trainer.model.experimental.lora]
rank = 4
[trainer.loss]
geo_mask_low = 0.5
[[orchestrator.env]]
id = "m"
"""
TIMES: list[tuple[str, str, dict[str, Any]]] = [
    # orchestrator.train.env and filters with an action are of April 2026: the loss is dppo with its kl_tau
    (FILTERED, "prime-rl 2026-05", {"trainer.loss.type": "dppo", "trainer.loss.kl_tau": 1e-3,
                                    "packer.filter_zero_advantages": True}),
    # ipo masks came with March 2026, max_async_level stayed: kl_tau is 0.001, not the 0 of February
    (MASKED, "prime-rl 2026-03", {"trainer.loss.type": "ipo", "trainer.loss.kl_tau": 1e-3,
                                  "packer.max_async_level": 2}),
    # masks by the geometric mean came with December 2025, so it is no file of autumn
    (GEOMETRIC, "prime-rl 2026-02", {"trainer.loss.type": "surogate", "trainer.loss.geo_mask_low": 0.5,
                                     "trainer.loss.geo_mask_high": 10.0}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "origin", "values"), TIMES)
def test_the_time_is_that_of_the_newest_key(tmp_path: Path, text: str, origin: str, values: dict[str, Any]) -> None:
    """Defaults of a time before a key came would be another run."""
    job = imported(tmp_path, f"max_steps = 3\n{text}[inference]\n")
    assert job.report.origin == origin
    check_values(job, values)


def test_texts_become_the_numbers_of_their_keys(tmp_path: Path) -> None:
    """Pydantic reads a text as a number or a switch; one that is none is refused with its key."""
    text = "max_steps = '3'\n[trainer.optim]\nlr = '1e-6'\n[trainer.model]\ntrust_remote_code = 'true'\n[inference]\n"
    source = "[[orchestrator.train.source]]\nid = 'm'\n"
    job = imported(tmp_path, f"{text}{source}")
    check_values(job, {"trainer.max_steps": 3, "trainer.learning_rate": 1e-6, "model.trust_remote_code": True})
    with pytest.raises(ConfigError, match=r"trainer\.optim\.lr: must be a number, got 'fast'"):
        imported(tmp_path, text.replace("1e-6", "fast"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[orchestrator]\nbatch_size = 100\nrollouts_per_example = 16\n", "rollouts_per_example 16"),
        ("[orchestrator.eval]\nenvironment_ids = ['a', 'b']\nnum_examples = [1]\n", "must have a number for each of"),
        ("max_steps = 3\nmax_steps = 4\n", "is not TOML"),
    ],
)
def test_what_prime_rl_refuses_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """Faults of a file, each in words."""
    with pytest.raises(ConfigError, match=problem):
        imported(tmp_path, text)


@pytest.mark.parametrize(
    ("ac", "value"),
    [('ac = "None"', False), ("ac = {}", True), ('ac = {mode = "selective"}', "selective")],
    ids=["none", "full", "selective"],
)
def test_selective_recomputation_stays_selective(tmp_path: Path, ac: str, value: object) -> None:
    """A section without a mode recomputes whole layers."""
    source = "[[orchestrator.train.source]]\nid = 'm'\n"
    job = imported(tmp_path, f"max_steps = 3\n[trainer.model]\n{ac}\n[inference]\n{source}")
    check_values(job, {"model.gradient_checkpointing": value})
