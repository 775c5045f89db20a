"""ms-swift scripts with traps: quoted signs, secrets, old words, keys that a server makes void."""

from pathlib import Path
from typing import Any

import pytest

from actors.imports.command import import_files, run_yaml
from actors.imports.job import Import, Options
from actors.imports.ms_swift import read
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_values, check_verdicts

COMPLETE = Options(rows=1000, data=Path("rows.jsonl"), reward="rewards.py:f")
START = """swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset d.jsonl --reward_funcs accuracy \\
    --per_device_train_batch_size 8 --num_generations 8 --output_dir out """
SERVED = "--use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1"


def imported(tmp_path: Path, text: str, options: Options = COMPLETE) -> Import:
    """Return the import of a script."""
    file = tmp_path / "run.sh"
    file.write_text(text)
    return read([file], [], options)


@pytest.mark.parametrize(
    ("words", "stop"),
    [
        # bash: a quoted sign is a text, an unquoted one a redirection, with or without a space
        ("--stop_words '</answer>' '<|im_end|>'", ["</answer>", "<|im_end|>"]),
        ('--stop_words "<end>" > log.txt 2>&1', ["<end>"]),
        ("--stop_words '>>' >>log.txt", [">>"]),
        ("--stop_words \\<end\\> 2>/dev/null", ["<end>"]),
    ],
)
def test_a_quoted_sign_is_no_redirection(tmp_path: Path, words: str, stop: list[str]) -> None:
    """Texts with < and > like </answer> stay values, files of redirections do not become values."""
    job = imported(tmp_path, f"{START}--seed 7 {words}\n")
    check_values(job, {"rollout.stop": stop, "seed": 7, "output_dir": "out"})


def test_a_value_with_signs_in_a_variable_stays_a_value(tmp_path: Path) -> None:
    """Bash does not look for redirections in the value of a variable."""
    job = imported(tmp_path, f"STOP='<end>'\n{START}--stop_words $STOP\n")
    check_values(job, {"rollout.stop": ["<end>"]})


def test_secrets_of_the_environment_are_not_shown(tmp_path: Path) -> None:
    """Report and file name the variable and keep its value out, for it is copied into issues."""
    text = f"export WANDB_API_KEY=abc123xyz\nexport HF_TOKEN=hf_abc123xyz\nSWANLAB_API_KEY=abc123xyz {START}"
    file = tmp_path / "run.sh"
    file.write_text(f"{text}--swanlab_token abc123xyz --hub_token hf_abc123xyz --max_steps 5\n")
    job = import_files("ms-swift", [file], [], COMPLETE)
    shown = run_yaml(job, [file]) + "\n".join(job.report.lines())
    assert "abc123xyz" not in shown
    for key in ("env.WANDB_API_KEY", "env.HF_TOKEN", "env.SWANLAB_API_KEY", "swanlab_token", "hub_token"):
        assert f"{key}=(not shown)" in shown, key


# arguments of 3.12.6 and 4.0.0: top_p 0.9, top_k 50; 4.1.0 and 4.6.0: 1.0, −1, and no train_type
WORDS: list[tuple[str, str, dict[str, Any]]] = [
    ("--train_type lora", "ms-swift 3.12", {"rollout.top_p": 0.9, "rollout.top_k": 50, "model.lora.rank": 8}),
    ("--tuner_type lora", "ms-swift 4.6", {"rollout.top_p": 1.0, "rollout.top_k": 0, "model.lora.rank": 8}),
    ("--train_type full --top_p 1.0", "ms-swift 3.12", {"rollout.top_p": 1.0, "rollout.top_k": 50, "model.lora": None}),
    # rlhf_args.py of 3.5.3: tensor_parallel_size is set as vllm_tensor_parallel_size
    ("--use_vllm true --tensor_parallel_size 1", "ms-swift 3.5", {"rollout.top_k": 50, "up.colocate": True}),
    # a mode of 4.6 with the word of 3.x: neither release takes both
    ("--train_type lora --advantage_reweight rlsd", "ms-swift 4.6", {"rollout.top_k": 0}),
]


@pytest.mark.parametrize(("words", "origin", "values"), WORDS)
def test_the_release_is_told_by_its_words(tmp_path: Path, words: str, origin: str, values: dict[str, Any]) -> None:
    """A word that 4.1 no longer takes brings the sampling of its time."""
    options = Options(world=1, rows=1000, data=Path("rows.jsonl"), reward="rewards.py:f")
    job = imported(tmp_path, f"{START}{words} --split_dataset_ratio 0\n", options)
    assert job.report.origin == origin
    check_values(job, values)


def test_keys_of_the_trainer_are_void_where_a_server_samples(tmp_path: Path) -> None:
    """rlhf_args.py: vllm_max_model_len is ignored for an external server; the server's own counts."""
    own = f"{START}{SERVED} --max_completion_length 2048 --vllm_max_model_len 3000\n"
    check_values(imported(tmp_path, own), {"packer.sequence_len": 4096})
    server = "swift rollout --model Qwen/Qwen2.5-7B-Instruct --vllm_max_model_len 6000 &\n"
    job = imported(tmp_path, server + own)
    check_values(job, {"packer.sequence_len": 6000, "inference.engine.max_model_len": 6000})
    check_verdicts(job, {"vllm_max_model_len": "irrelevant", "rollout.vllm_max_model_len": "renamed"})


@pytest.mark.parametrize(
    ("version", "groups", "is_noted"),
    # 8 · 1 · 4 ÷ 8 = 4 groups, 1 group where sleep_level sets gradient_accumulation_steps to 1 (rlhf_args.py of 3.3.1)
    [("3.3", 1, True), ("3.4", 4, False), ("3.2", 1, True)],
)
def test_sleep_set_the_accumulation_up_to_3_3(tmp_path: Path, version: str, groups: int, is_noted: bool) -> None:
    """The key of the script is not read there."""
    options = Options(world=1, rows=1000, data=Path("r.jsonl"), reward="r.py:f", version=version)
    words = "--use_vllm true --sleep_level 1 --gradient_accumulation_steps 4 --split_dataset_ratio 0"
    job = imported(tmp_path, f"{START}{words}\n", options)
    check_values(job, {"packer.groups_per_step": groups})
    assert any("sleep_level" in note for note in job.report.notes) == is_noted


def test_warm_up_by_steps_and_share_is_refused_by_later_releases_alone(tmp_path: Path) -> None:
    """Transformers before 5 let the steps count; ms-swift 4.6 ends."""
    words = "--warmup_steps 10 --warmup_ratio 0.05 --max_steps 100"
    with pytest.raises(ConfigError, match="warmup_ratio: ms-swift refuses it together with warmup_steps"):
        imported(tmp_path, f"{START}{words}\n")
    check_values(imported(tmp_path, f"{START}--train_type full {words}\n"), {"trainer.warmup_steps": 10})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        # rlhf_args.py of 3.5 and later
        ("--use_vllm true --vllm_mode colocate --async_generate true", "async_generate: ms-swift needs vllm_mode"),
        ("--truncation_strategy split --max_length 100", "truncation_strategy: 'split' must be left or delete"),
        # argparse: nargs="+"
        ("--stop_words --seed 1", "stop_words: takes one value or more"),
        ("--max_steps five", "max_steps: must be a number"),
    ],
)  # fmt: skip
def test_what_ms_swift_refuses_is_refused(tmp_path: Path, words: str, problem: str) -> None:
    """Values with which ms-swift itself ends."""
    with pytest.raises(ConfigError, match=problem):
        imported(tmp_path, f"{START}{words}\n")


def test_a_flag_that_starts_with_no_switches_its_key_off(tmp_path: Path) -> None:
    """HfArgumentParser has `--no_KEY` for each key whose default is true."""
    job = imported(tmp_path, f"{START}--no_gradient_checkpointing --max_steps 5\n")
    check_values(job, {"model.gradient_checkpointing": False})


def test_rows_of_an_environment_that_answers_are_taken(tmp_path: Path) -> None:
    """The data set of a script with turns is the environment's rows, and is reported so."""
    options = Options(rows=10, reward="rewards.py:f")
    job = imported(tmp_path, f"{START}--multi_turn_scheduler math_tip_trick --max_turns 3 --max_steps 5\n", options)
    check_verdicts(job, {"dataset": "converted", "multi_turn_scheduler": "refused"})
    assert job.run.get("environments.0.rows") == str(tmp_path / "d.jsonl")


def test_a_mean_over_micro_batches_is_said(tmp_path: Path) -> None:
    """bnpo averages over the micro-batches of a device, which are rows of tokens here."""
    job = imported(tmp_path, f"{START}--loss_type bnpo --max_steps 5\n")
    assert any("micro-batches" in note for note in job.report.notes)
