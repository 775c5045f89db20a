"""TRL files with traps: old names, flags, defaults that moved, keys that are given twice."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.imports.command import sort_words
from actors.imports.job import Import, Options
from actors.imports.trl import read
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_each_key_once, check_values, check_verdicts

COMPLETE = Options(world=1, rows=1000, data=Path("rows.jsonl"), reward="rewards.py:f")
BASE = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
num_generations: 8
max_steps: 10
"""
KEYS = {"model_name_or_path", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations",
        "max_steps"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One file."""

    text: str
    values: dict[str, Any]
    verdicts: dict[str, str] = field(default_factory=dict)
    origin: str = "TRL 1.16"
    options: Options = COMPLETE


def imported(tmp_path: Path, text: str, options: Options = COMPLETE, words: str = "") -> Import:
    """Return the import of a YAML file of TRL's command line, with further words."""
    file = tmp_path / "trl.yaml"
    file.write_text(text)
    files, arguments = sort_words([str(file), *words.split()])
    return read(files, arguments, options)


CASES = {
    # GRPOTrainer up to 0.27 tokenises prompts with max_length=max_prompt_length, truncation, from the left; the data
    # set is one of the hub by name.
    "a limit of prompts on a data set of the hub": Case(
        f"{BASE}dataset_name: trl-lib/tldr\nmax_prompt_length: 256\nmax_completion_length: 64\n",
        {
            "environments.0.path": "trl-lib/tldr",
            "environments.0.max_prompt_tokens": 256,
            "environments.0.long_prompts": "truncate_left",
            "packer.sequence_len": 320,
        },
        {"max_prompt_length": "converted"},
        "TRL 0.27",
        Options(world=1, rows=1000, reward="rewards.py:f"),
    ),
    # mask_truncated_completions, disable_dropout and loss_type came with 0.17, vllm_device went with 0.18: it is 0.17,
    # which samples with temperature 0.9 and top_k 50; loss_type bnpo of one micro-batch per update is dapo.
    "two keys that one release has": Case(
        f"{BASE}use_vllm: true\nvllm_device: auto\nmask_truncated_completions: true\n",
        {
            "rollout.temperature": 0.9,
            "rollout.top_k": 50,
            "reward.mask_truncated_completions": True,
            "trainer.reference.beta": 0.04,
        },
        {"vllm_device": "irrelevant"},
        "TRL 0.17",
    ),
    # grpo_config.py of 0.15: ref_model_mixup_alpha 0.9, ref_model_sync_steps 64; from 0.16 on 0.6 and 512. vLLM's
    # SamplingParams of 0.15 had temperature and max_tokens alone, so all tokens; transformers' default is top_k 50.
    "the reference of early 2025": Case(
        f"{BASE}sync_ref_model: true\nuse_vllm: true\n",
        {
            "trainer.reference.sync.alpha": 0.9,
            "trainer.reference.sync.every_steps": 64,
            "rollout.top_k": 0,
            "rollout.temperature": 0.9,
            "trainer.loss.type": "grpo",
        },
        {"sync_ref_model": "converted"},
        "TRL 0.15",
        Options(world=1, rows=1000, data=Path("rows.jsonl"), reward="rewards.py:f", version="0.15"),
    ),
    "transformers samples with its default": Case(
        f"{BASE}sync_ref_model: false\n",
        {"rollout.top_k": 50, "rollout.top_p": 1.0},
        {"sync_ref_model": "irrelevant"},
        "TRL 0.15",
        Options(world=1, rows=1000, data=Path("rows.jsonl"), reward="rewards.py:f", version="0.15"),
    ),
    # rloo_config.py of 0.24, __post_init__: each old key sets the new one; total_episodes // GA = max_steps.
    # 64 per device × 1 ÷ 4 = 16 groups; 2 passes: ⌈5000 ÷ 2⌉ = 2500 steps of 2 updates.
    "the words of the first RLOOTrainer": Case(
        """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
rloo_k: 4
cliprange: 0.1
kl_coef: 0.03
normalize_reward: true
num_ppo_epochs: 2
response_length: 53
total_episodes: 10000
missing_eos_penalty: 1.0
per_device_train_batch_size: 32
gradient_accumulation_steps: 2
learning_rate: 3e-6
""",
        {
            "rollout.group_size": 4,
            "packer.groups_per_step": 16,
            "trainer.loss.epsilon": 0.1,
            "trainer.reference.beta": 0.03,
            "reward.advantage.scale": "batch",
            "trainer.num_iterations": 2,
            "rollout.max_tokens": 53,
            "trainer.max_steps": 2500,
            "environments.0.max_prompt_tokens": 512,
        },
        {
            "rloo_k": "renamed",
            "cliprange": "renamed",
            "kl_coef": "renamed",
            "normalize_reward": "converted",
            "num_ppo_epochs": "renamed",
            "response_length": "renamed",
            "total_episodes": "converted",
            "missing_eos_penalty": "irrelevant",
        },
        "TRL 0.24",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_values_of_the_code_of_its_time(tmp_path: Path, name: str) -> None:
    """Values of run.yaml against the values of the origin's code, and each key once."""
    case = CASES[name]
    job = imported(tmp_path, case.text, case.options)
    assert job.report.origin == case.origin
    check_values(job, case.values)
    check_verdicts(job, case.verdicts)
    check_each_key_once(job, [line.partition(":")[0] for line in case.text.strip().splitlines()])


def test_a_flag_that_starts_with_no_switches_its_key_off(tmp_path: Path) -> None:
    """HfArgumentParser has `--no_KEY` for each key whose default is true; a misspelt one is none."""
    words = "--no_gradient_checkpointing --no-shuffle_dataset --no_such_key"
    job = imported(tmp_path, f"{BASE}shuffle_dataset: true\n", words=words)
    check_values(job, {"model.gradient_checkpointing": False})
    check_verdicts(job, {"gradient_checkpointing": "taken", "shuffle_dataset": "refused", "no_such_key": "refused"})
    check_each_key_once(job, {*KEYS, "gradient_checkpointing", "shuffle_dataset", "no_such_key"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # grpo_config.py of 1.16, __post_init__
        (
            "use_vllm: true\nvllm_importance_sampling_mode: token_truncate\nvllm_importance_sampling_clip_max: null",
            "vllm_importance_sampling_clip_max: token_truncate needs a bound",
        ),
        (
            "use_vllm: true\nvllm_importance_sampling_clip_min: 3.5",
            "vllm_importance_sampling_clip_min: 3.5 must be below vllm_importance_sampling_clip_max 3",
        ),
        ("generation_batch_size: 32\nsteps_per_generation: 4", "generation_batch_size: TRL refuses it together"),
        ("save_strategy: no", "save_strategy: False is no strategy"),
    ],
)  # fmt: skip
def test_what_trl_refuses_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """Values with which TRL itself ends."""
    with pytest.raises(ConfigError, match=problem):
        imported(tmp_path, f"{BASE}{text}\n")


def test_both_names_of_a_key_are_refused(tmp_path: Path) -> None:
    """The older name would win silently in TRL."""
    with pytest.raises(ConfigError, match="normalize_reward: sets normalize_advantages, which is given too"):
        imported(tmp_path, f"{BASE}normalize_reward: true\nnormalize_advantages: false\nrloo_k: 8\n")


def test_a_misspelt_number_of_processes_is_named(tmp_path: Path) -> None:
    """The hint has the key of the launcher too."""
    job = imported(tmp_path, f"{BASE}num_process: 8\n")
    entry = next(entry for entry in job.report.entries if entry.key == "num_process")
    assert "did you mean num_processes?" in entry.text
