"""Configurations of TRL, with the values that TRL's and transformers' code derive from them."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.cli import main
from actors.imports.job import Import, Options
from actors.imports.keys import flat
from actors.imports.trl import read
from actors.imports.trl.versions import defaults
from schemas.config.load import check_tree, parse
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_each_key_once, check_only_missing, check_values, check_verdicts
from tests.howto.pages import page

COMPLETE = Options(world=1, rows=1000, data=Path("rows.jsonl"), reward="rewards.py:f")

RECIPE = """
model_name_or_path: deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: open-r1/OpenR1-Math-220k
dataset_prompt_column: problem
system_prompt: "Think, then answer."
bf16: true
use_vllm: true
do_eval: false
eval_strategy: "no"
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
hub_model_id: mine
learning_rate: 1.0e-06
log_completions: true
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
max_prompt_length: 512
max_completion_length: 2048
max_steps: -1
num_generations: 16
num_train_epochs: 1
output_dir: data/mine
overwrite_output_dir: true
per_device_train_batch_size: 16
push_to_hub: true
report_to:
- wandb
reward_funcs:
- accuracy
- format
reward_weights:
- 1.0
- 0.5
save_strategy: "epoch"
save_total_limit: 1
seed: 42
temperature: 0.7
warmup_ratio: 0.1
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 7
"""
SCRIPT = """
from functools import partial
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment, think_format_reward
from my_rewards import accuracy

MODEL = "Qwen/Qwen2.5-7B-Instruct"
RUN = MODEL.split("/")[-1].lower()
BATCH = 2 * 4


def short(completions, limit, **kwargs):
    return [float(len(c[0]["content"]) < limit) for c in completions]


def main():
    model = AutoModelForCausalLM.from_pretrained(
        MODEL,
        torch_dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )
    args = GRPOConfig(
        output_dir=f"outputs/{RUN}-grpo",
        per_device_train_batch_size=BATCH,
        num_generations=4,
        max_steps=200,
        beta=0.01,
        scale_rewards=False,
        loss_type="dr_grpo",
        optim="adamw_8bit",
        top_k=20,
        save_steps=0.25,
        report_to="none",
    )
    args.epsilon_high = 0.28
    trainer = GRPOTrainer(
        model,
        reward_funcs=[
            accuracy,
            think_format_reward,
            partial(short, limit=500),
            get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=128),
        ],
        args=args,
        train_dataset=load_dataset("openai/gsm8k", "main", split="train"),
        peft_config=LoraConfig(r=64, lora_alpha=16, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
"""
PARSER_SCRIPT = """
import torch
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
from trl import get_kbit_device_map, get_peft_config, get_quantization_config
from trl.rewards import accuracy_reward

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision,
        dtype=model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype),
    )
    quantization_config = get_quantization_config(model_args)
    if quantization_config is not None:
        training_args.model_init_kwargs["device_map"] = get_kbit_device_map()
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[accuracy_reward],
        train_dataset=script_args.dataset_name,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
"""
ENVIRONMENT_SCRIPT = '''
from trl import GRPOConfig, GRPOTrainer


class Wordle:
    def reset(self, **kwargs):
        return "Guess."

    def guess(self, word: str) -> str:
        """Guess a word."""
        return "no"


def solved(environments, **kwargs):
    return [env.reward for env in environments]


if __name__ == "__main__":
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-1.7B",
        train_dataset=[{"prompt": "Play."}] * 100,
        reward_funcs=solved,
        environment_factory=Wordle,
        args=GRPOConfig(
            max_steps=10,
            max_completion_length=1024,
            max_tool_calling_iterations=6,
            chat_template_kwargs={"enable_thinking": False},
            per_device_train_batch_size=8,
        ),
    )
    trainer.train()
'''
ASYNC_SCRIPT = """
import os
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


def good(completions, **kwargs):
    return [1.0 for _ in completions]


def main():
    config = AsyncGRPOConfig(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=int(os.environ.get("ACCUMULATION", "16")),
        num_generations=8,
        adam_beta2=0.95,
        max_staleness=5,
        max_steps=100,
        learning_rate=1e-6,
    )
    AsyncGRPOTrainer(model="Qwen/Qwen3-4B", reward_funcs=good, args=config, train_dataset=None).train()


if __name__ == "__main__":
    main()
"""


def imported(folder: Path, text: str, *words: str, options: Options = COMPLETE, **more: str) -> Import:
    """Import a text, of a script or of YAML, with further files and words of the command line."""
    name = "train.py" if "import GRPO" in text or "import Async" in text else "grpo.yaml"
    (folder / name).write_text(text)
    for other, content in more.items():
        (folder / f"{other}.yaml").write_text(content)
    return read([folder / name, *(folder / f"{other}.yaml" for other in more)], list(words), options)


def keys_of(text: str, prefix: str = "") -> dict[str, Any]:
    """Return the dotted keys of a YAML text."""
    return flat({prefix: parse(text)} if prefix else parse(text))


def test_a_recipe_of_open_r1_with_accelerate_has_the_values_of_its_code(tmp_path: Path) -> None:
    """16 · 7 · 4 = 448 completions = 28 groups of 16, in one update.

    An epoch is ⌈93733 · 16 ÷ 112 ÷ 4⌉ = 3348 updates; the warm-up is a tenth of them. open-r1 takes TRL 0.18: beta
    0.04, bnpo, no correction, vLLM as a server.
    """
    options = Options(rows=93733, data=Path("rows.jsonl"), reward="rewards.py")
    job = imported(tmp_path, RECIPE, options=options, accelerate=ACCELERATE)
    check_values(job, {
        "model.path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "model.dtype": "bfloat16",
        "model.attention": "flash", "model.gradient_checkpointing": True, "model.lora": None,
        "packer.groups_per_step": 28, "rollout.group_size": 16, "trainer.num_minibatches": 1,
        "packer.max_async_level": 0, "packer.sequence_len": 2560, "trainer.num_ranks": 7, "trainer.sharding": "fsdp",
        "trainer.max_steps": 3348, "trainer.warmup_ratio": 0.1, "trainer.learning_rate": 1e-6,
        "trainer.lr_schedule.unit": "update", "trainer.lr_schedule.first": 0,
        "environments.0.max_prompt_tokens": 512, "environments.0.long_prompts": "truncate_left",
        "trainer.lr_scheduler": "cosine", "trainer.min_lr_ratio": 0.1, "rollout.temperature": 0.7,
        "rollout.max_tokens": 2048, "environments.0.prompt_column": "problem",
        "environments.0.system_prompt": "Think, then answer.", "environments.0.path": "rows.jsonl",
        "reward.functions.0.path": "rewards.py:accuracy", "reward.functions.1.path": "rewards.py:format",
        "reward.functions.1.weight": 0.5, "reward.advantage.type": "zscore", "reward.advantage.eps": 1e-4,
        "reward.advantage.std": "unbiased", "trainer.loss.type": "bnpo", "trainer.loss.old_logprobs": "step_start",
        "trainer.correction": None, "trainer.reference.beta": 0.04, "trainer.checkpoint.interval": 3348,
        "trainer.checkpoint.keep_last": 1, "eval.num_prompts": 0,
        "output_dir": "data/mine", "seed": 42, "inference.engine.type": "vllm",
        "push_to_hub.hub_model_id": "mine", "push_to_hub.hub_strategy": "every_save", "callbacks": [],
        "up.colocate": False,
    })  # fmt: skip
    check_verdicts(job, {
        "model_name_or_path": "renamed", "torch_dtype": "converted", "max_prompt_length": "converted",
        "report_to": "converted", "push_to_hub": "converted", "hub_model_id": "taken", "seed": "taken",
        "warmup_ratio": "renamed",
        "save_total_limit": "renamed",
        "accelerate.num_processes": "converted", "accelerate.machine_rank": "irrelevant", "do_eval": "irrelevant",
        "lr_scheduler_kwargs.min_lr_rate": "converted", "gradient_checkpointing_kwargs.use_reentrant": "irrelevant",
    })  # fmt: skip
    check_each_key_once(job, keys_of(RECIPE) | keys_of(ACCELERATE, "accelerate"))
    assert job.report.origin == "TRL 0.18"
    assert any("dataset_prompt_column is a key of open-r1's recipes" in note for note in job.report.notes)
    newest = imported(tmp_path, RECIPE, options=replace(options, version="1.16"), accelerate=ACCELERATE)
    check_values(newest, {
        "trainer.max_steps": 3347, "trainer.loss.type": "dapo", "trainer.correction.high": 3.0,
        "trainer.correction.level": "sequence", "trainer.reference": None, "up.colocate": True, "up.inference": 7,
        "inference.engine.gpu_memory_utilization": 0.3,
    })  # fmt: skip


GIST = """
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def questions(split="train"):
    return load_dataset("openai/gsm8k", "main")[split].map(lambda row: {"prompt": row["question"]})


def correct(prompts, completions, answer, **kwargs):
    return [2.0 for _ in completions]


model_name = "Qwen/Qwen2.5-1.5B-Instruct"
if "Llama" in model_name:
    output_dir = "outputs/Llama-1B-GRPO"
else:
    output_dir = "outputs/Qwen-1.5B-GRPO"
training_args = GRPOConfig(
    output_dir=output_dir, learning_rate=5e-6, adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1,
    lr_scheduler_type="cosine", bf16=True, per_device_train_batch_size=1, gradient_accumulation_steps=4,
    num_generations=16, max_prompt_length=256, max_completion_length=786, num_train_epochs=1, save_steps=100,
    max_grad_norm=0.1, report_to="wandb", log_on_each_node=False,
)
model = AutoModelForCausalLM.from_pretrained(
    model_name, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2", device_map=None
).to("cuda")
trainer = GRPOTrainer(
    model=model, processing_class=AutoTokenizer.from_pretrained(model_name), reward_funcs=[correct],
    args=training_args, train_dataset=questions(),
)
if __name__ == "__main__":
    trainer.train()
"""
"""The best known script of early 2025, whose batch counts prompts."""
CODE = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
torch_dtype: bfloat16
dataset_name: open-r1/codeforces
dataset_prompt_column: prompt_c++17
callbacks: [push_to_hub_revision]
benchmarks: [lcb_v4]
beta: 0.0
loss_type: dr_grpo
scale_rewards: false
use_vllm: true
vllm_device: auto
gradient_accumulation_steps: 16
lr_scheduler_type: constant_with_warmup
max_grad_norm: 0.2
max_prompt_length: 2000
max_completion_length: 8192
num_generations: 16
num_train_epochs: 40
per_device_train_batch_size: 8
reward_funcs: [cf_code, code_format]
reward_weights: [1.0, 0.1]
save_strategy: steps
save_steps: 0.05
save_total_limit: 1
temperature: 0.7
warmup_ratio: 0.1
mask_truncated_completions: true
code_language: cpp
code_eval_test_batch_size: 20
"""
"""A recipe of open-r1 for code: shares, epochs, and arguments of rewards."""
SERVED = """
model_name_or_path: a/b
dataset_name: x/y
reward_funcs: [accuracy_reward]
use_sglang: true
sglang_device: cuda:1
sglang_gpu_memory_utilization: 0.8
checkpoint_path: /tmp/c
max_steps: 20
"""
MIDDLE = """
model_name_or_path: a/b
dataset_name: x/y
reward_funcs: [accuracy_reward]
max_prompt_length: 300
use_vllm: true
vllm_importance_sampling_mode: token_mask
max_steps: 5
"""


@pytest.mark.parametrize(
    ("text", "options", "origin", "values", "verdicts"),
    [
        # vllm_device is of before 0.18, mask_truncated_completions of 0.18: 8 · 7 · 16 ÷ 16 = 56 groups;
        # ⌈10000 · 16 ÷ 56 ÷ 16⌉ = 179 updates an epoch, 40 of them; a share of 0.05 of all
        (CODE, Options(world=7, rows=10000, data=Path("rows.jsonl"), reward="rewards.py"), "TRL 0.17", {
            "packer.groups_per_step": 56, "trainer.max_steps": 7160, "trainer.loss.type": "dr_grpo",
            "reward.advantage.type": "mean", "trainer.reference": None, "trainer.max_grad_norm": 0.2,
            "trainer.checkpoint.interval_share": 0.05, "trainer.correction": None, "rollout.temperature": 0.7,
            "trainer.lr_scheduler": "constant_with_warmup", "trainer.warmup_ratio": 0.1, "packer.sequence_len": 10192,
            "reward.mask_truncated_completions": True, "reward.functions.0.path": "rewards.py:cf_code",
        }, {"code_language": "refused", "benchmarks": "irrelevant", "vllm_device": "irrelevant"}),
        # early 2025: 1 · 4 prompts of 16 completions, beta 0.04, temperature 0.9, a mean per completion
        (GIST, Options(world=1, rows=1000, data=Path("rows.jsonl"), version="0.14"), "TRL 0.14", {
            "packer.groups_per_step": 4, "rollout.group_size": 16, "trainer.reference.beta": 0.04,
            "rollout.temperature": 0.9, "trainer.loss.type": "grpo", "trainer.max_steps": 250,
            "trainer.optimizer.beta2": 0.99, "trainer.max_grad_norm": 0.1, "packer.sequence_len": 1042,
            "telemetry.trackers.0.type": "wandb", "telemetry.names": "trl",
            "output_dir": "outputs/Qwen-1.5B-GRPO", "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        }, {"report_to": "converted", "max_prompt_length": "converted"}),
        # a fork with SGLang beside the trainer
        (SERVED,
         COMPLETE, "TRL 1.16", {
            "inference.engine.type": "sglang", "inference.engine.mem_fraction_static": 0.8, "trainer.max_steps": 20,
            "weights.channel": "filesystem", "up.colocate": False,
        }, {"use_sglang": "converted", "sglang_device": "irrelevant", "checkpoint_path": "irrelevant"}),
        # a key of before 0.28 in a file with a key of 0.26: the defaults of 0.27
        (MIDDLE, COMPLETE, "TRL 0.27", {
            "rollout.max_tokens": 256, "trainer.correction.level": "token", "trainer.correction.high": 3.0,
            "trainer.reference": None, "trainer.loss.type": "dapo", "up.colocate": False,
        }, {}),
    ],
)  # fmt: skip
def test_files_of_several_years_have_the_values_of_their_code(
    tmp_path: Path, text: str, options: Options, origin: str, values: dict[str, Any], verdicts: dict[str, str]
) -> None:
    """The time is told by keys that TRL has removed, or that recipes have, unless the user says it."""
    job = imported(tmp_path, text, options=options)
    assert job.report.origin == origin
    check_values(job, values)
    check_verdicts(job, verdicts)
    if text is not GIST:
        check_each_key_once(job, keys_of(text))
    for entry in job.report.entries:
        assert entry.verdict != "refused" or "; " in entry.text, f"no way out: {entry}"


def test_a_batch_of_prompts_is_named_where_a_batch_of_completions_is_refused(tmp_path: Path) -> None:
    """Sixteen completions are no part of a batch of four."""
    with pytest.raises(ConfigError, match=r"before TRL 0\.15 per_device_train_batch_size counted prompts"):
        imported(tmp_path, GIST)


def test_the_defaults_of_an_older_release_are_used_where_they_are_asked_for(tmp_path: Path) -> None:
    """TRL 0.18: beta 0.04 without bias correction, bnpo, no correction of vLLM, 512 tokens of prompt, 256 of answer.

    vLLM is a server. Before 0.19 bf16 is off: float32. 8 per device · 2 ÷ 8 = 2 groups.
    """
    text = "{model_name_or_path: a/b, use_vllm: true, reward_funcs: [mine.f], max_steps: 40, bf16: false}"
    options = Options(world=2, data=Path("rows.jsonl"), version="0.18.1")
    job = imported(tmp_path, text, options=options)
    check_values(job, {
        "trainer.loss.type": "bnpo", "trainer.reference.beta": 0.04, "trainer.reference.bias_correction": False,
        "trainer.reference.estimator": "k3", "trainer.correction": None, "rollout.max_tokens": 256,
        "packer.sequence_len": 768, "rollout.temperature": 1.0, "model.gradient_checkpointing": False,
        "model.dtype": "float32", "packer.groups_per_step": 2, "reward.functions.0.path": "mine:f",
        "up.colocate": False, "trainer.checkpoint.interval": 500, "trainer.checkpoint.keep_last": None,
    })  # fmt: skip
    assert job.report.origin == "TRL 0.18"
    oldest = imported(tmp_path, text, options=Options(world=2, data=Path("r"), version="0.14"))
    # 0.14: prompts per device 1 · 2 processes · 8 accumulated; temperature 0.9, GRPO's own average. vLLM's parameters
    # are temperature and max_tokens there, so that all tokens count; with transformers the 50 most probable ones do
    check_values(oldest, {
        "packer.groups_per_step": 16, "rollout.temperature": 0.9, "rollout.top_k": 0, "trainer.loss.type": "grpo",
    })  # fmt: skip


def test_a_script_is_read_without_being_run(tmp_path: Path) -> None:
    """8 · 2 ÷ 4 = 4 groups; a quarter of 200 updates is 50; polynomial and linear schedules end at 0."""
    job = imported(tmp_path, SCRIPT, options=Options(world=2, data=Path("rows.jsonl")))
    check_values(job, {
        "model.path": "Qwen/Qwen2.5-7B-Instruct", "model.quantization": {"type": "nf4", "double_quant": True},
        "model.lora.rank": 64, "model.lora.alpha": 16.0, "model.lora.dropout": 0.0,
        "model.lora.target_modules": ["q_proj", "k_proj"],
        "output_dir": "outputs/qwen2.5-7b-instruct-grpo", "packer.groups_per_step": 4, "rollout.group_size": 4,
        "trainer.max_steps": 200, "trainer.reference.beta": 0.01, "trainer.reference.bias_correction": True,
        "trainer.loss.type": "dr_grpo", "trainer.loss.epsilon": 0.2, "trainer.loss.epsilon_high": 0.28,
        "reward.advantage": {"type": "mean"}, "trainer.optimizer.type": "adamw_8bit", "rollout.top_k": 20,
        "trainer.checkpoint.interval_share": 0.25, "trainer.checkpoint.keep_last": None,
        "reward.functions.0.path": "my_rewards:accuracy", "reward.functions.1.path": "think_format",
        "reward.functions.2.path": f"{tmp_path}/train.py:short", "reward.functions.2.kwargs": {"limit": 500},
        "reward.functions.3.path": "soft_overlong",
        "reward.functions.3.kwargs": {"max_tokens": 512, "overlong_tokens": 128},
        "inference.engine.type": "embedded", "trainer.lr_scheduler": "linear", "trainer.correction": None,
    })  # fmt: skip
    keys = [
        *("output_dir", "per_device_train_batch_size", "num_generations", "max_steps", "beta", "scale_rewards"),
        *("loss_type", "optim", "top_k", "save_steps", "report_to", "epsilon_high", "model", "reward_funcs"),
        *("train_dataset", "model_init_kwargs.torch_dtype"),
        *(f"peft_config.{name}" for name in ("r", "lora_alpha", "target_modules", "task_type")),
        *(f"quantization_config.{name}" for name in ("load_in_4bit", "bnb_4bit_quant_type")),
        *(f"quantization_config.bnb_4bit_{name}" for name in ("use_double_quant", "compute_dtype")),
    ]
    check_each_key_once(job, keys)
    assert not any("does work" in note for note in job.report.notes)


def test_a_script_with_a_parser_takes_the_words_of_its_command_line(tmp_path: Path) -> None:
    """8 · 4 · 8 = 256 completions = 32 groups, 8 ÷ 2 = 4 updates.

    An epoch is ⌊1000 ÷ 32⌋ · 8 ÷ 2 = 124 updates, three are 372; ⌈372 ÷ 4⌉ = 93 steps, ⌊500 ÷ 4⌋ = 125.
    """
    text = """--model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5 --dtype bfloat16 --use_peft
        --lora_target_modules q_proj, v_proj --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4
        --loss_type grpo --gradient_accumulation_steps 2 --steps_per_generation 8 --beta=0.0"""
    words = text.split()
    options = Options(world=4, rows=1000, data=Path("rows.jsonl"))
    job = imported(tmp_path, PARSER_SCRIPT, *words, options=options)
    check_values(job, {
        "model.path": "Qwen/Qwen3-0.6B", "packer.groups_per_step": 32, "trainer.num_minibatches": 4,
        "trainer.max_steps": 93, "trainer.checkpoint.interval": 125, "trainer.learning_rate": 1e-5,
        "trainer.loss.importance_sampling_level": "sequence", "trainer.loss.epsilon": 3e-4,
        "trainer.loss.epsilon_high": 4e-4, "trainer.loss.type": "grpo",
        "trainer.loss.compat.loss_normalizer": "minibatch",
        "model.lora.rank": 16, "model.lora.alpha": 32.0, "model.lora.dropout": 0.05,
        "model.lora.target_modules": ["q_proj,", "v_proj"],
        "reward.functions.0.path": "accuracy",
    })  # fmt: skip
    assert any("a comma is part of" in note for note in job.report.notes)
    # the same from a file, as `--config` would read it
    lines = "\n".join(["model_name_or_path: Qwen/Qwen3-0.6B", "learning_rate: 1e-5", "gradient_accumulation_steps: 2"])
    other = imported(tmp_path, PARSER_SCRIPT, "--steps_per_generation", "8", options=options, config=lines)
    check_values(other, {"trainer.num_minibatches": 4, "trainer.learning_rate": 1e-5, "model.lora": None})
    # dapo divides each update of a generation by its mean tokens
    check_values(other, {"trainer.loss.compat.loss_normalizer": "step_mean"})


def test_an_environment_of_the_script_becomes_one_of_the_run(tmp_path: Path) -> None:
    """Six calls of tools and an answer are seven turns."""
    job = imported(tmp_path, ENVIRONMENT_SCRIPT, options=Options(world=1, data=Path("rows.jsonl")))
    check_values(job, {
        "environments.0.type": "python", "environments.0.path": f"{tmp_path}/train.py:Wordle",
        "environments.0.rows": "rows.jsonl", "environments.0.max_turns": 7, "environments.0.max_total_tokens": 1024,
        "environments.0.chat_template_kwargs": {"enable_thinking": False}, "trainer.max_steps": 10,
        "reward.functions.0.path": f"{tmp_path}/train.py:solved",
    })  # fmt: skip
    check_verdicts(job, {
        "environment_factory": "converted", "max_tool_calling_iterations": "converted",
        "chat_template_kwargs.enable_thinking": "converted", "train_dataset": "converted",
    })  # fmt: skip


def test_tools_need_a_name_that_a_worker_can_import(tmp_path: Path) -> None:
    """A list inside the call has none; a list at the top level has."""
    text = ENVIRONMENT_SCRIPT.replace("environment_factory=Wordle", "tools=[solved]")
    job = imported(tmp_path, text, options=Options(world=1, data=Path("rows.jsonl")))
    assert {question.target for question in job.report.questions} == {"environments.0.path"}
    check_only_missing(job)
    named = text.replace("tools=[solved]", "tools=TOOLS").replace("if __name__", "TOOLS = [solved]\n\nif __name__")
    found = imported(tmp_path, named, options=Options(world=1, data=Path("rows.jsonl")))
    check_values(found, {"environments.0.path": f"{tmp_path}/train.py:TOOLS"})


def test_what_only_a_run_of_the_script_would_tell_is_asked_for(tmp_path: Path) -> None:
    """An environment variable decides the accumulation, and with it the groups."""
    job = imported(tmp_path, ASYNC_SCRIPT, options=Options(world=1, data=Path("rows.jsonl")))
    assert {question.target for question in job.report.questions} == {"packer.groups_per_step"}
    check_verdicts(job, {"gradient_accumulation_steps": "refused", "max_staleness": "converted"})
    check_only_missing(job)
    # 2 · 4 processes · 16 ÷ 8 = 16 groups; means over micro-batches of their token means
    complete = imported(
        tmp_path, ASYNC_SCRIPT, "--gradient_accumulation_steps", "16", options=Options(world=4, data=Path("rows.jsonl"))
    )
    check_values(complete, {
        "packer.groups_per_step": 16, "packer.max_async_level": 5, "packer.max_off_policy_steps": 5,
        "packer.order": "arrival", "trainer.max_steps": 100, "rollout.max_tokens": 2048,
        "trainer.loss.type": "bnpo", "trainer.loss.old_logprobs": "inference",
        "reward.advantage": {"type": "zscore", "std": "population", "eps": 1e-8}, "trainer.lr_scheduler": "constant",
        "trainer.optimizer.beta2": 0.95, "inference.request_timeout": 600.0, "weights.timeout": 1800.0,
        "inference.engine.type": "vllm",
    })  # fmt: skip


@pytest.mark.parametrize(("version", "scheduler"), [("1.8", "linear"), ("1.9", "constant"), (None, "constant")])
def test_the_asynchronous_trainer_kept_its_rate_since_a_release(
    tmp_path: Path, version: str | None, scheduler: str
) -> None:
    """Before, transformers' default."""
    text = "{model_name_or_path: a/b, reward_funcs: [mine.f], max_steps: 9, max_staleness: 2}"
    job = imported(tmp_path, text, options=replace(COMPLETE, version=version))
    check_values(job, {"trainer.lr_scheduler": scheduler, "packer.max_async_level": 2})


def test_rloo_takes_its_own_keys_and_defaults(tmp_path: Path) -> None:
    """RLOO: two completions, KL 0.05 in the reward before the baseline, rewards clipped to ±3."""
    text = """{model_name_or_path: a/b, normalize_advantages: true, reward_clip_range: [-3.0, 3.0],
        reward_funcs: think_format_reward, max_steps: 100, num_iterations: 2, warmup_steps: 10}"""
    job = imported(tmp_path, text)
    # two passes are two updates of a step: 100 ÷ 2; the warm-up counts updates
    check_values(job, {
        "rollout.group_size": 2, "packer.groups_per_step": 4, "trainer.loss.type": "rloo",
        "reward.advantage": {"type": "rloo", "scale": "batch", "std_of": "advantages", "std": "unbiased", "eps": 1e-4},
        "trainer.reference.beta": 0.05, "trainer.reference.estimator": "k1",
        "trainer.reference.place": "group_reward", "reward.shaping.clip": 3.0, "trainer.num_iterations": 2,
        "trainer.max_steps": 50, "trainer.warmup_steps": 10, "trainer.correction": None,
        "trainer.lr_schedule.unit": "update",
    })  # fmt: skip
    check_each_key_once(job, keys_of(text))


def test_a_generation_smaller_than_an_update_is_a_part_of_one_step(tmp_path: Path) -> None:
    """Updates of 4 · 16 = 64 completions of four generations: 8 groups of 8, one update.

    1000 rows are ⌊1000 ÷ 2⌋ generations of 2 prompts, each of 4 micro-batches: ⌈500 · 4 ÷ 16⌉ = 125 updates.
    """
    text = """{model_name_or_path: a/b, per_device_train_batch_size: 4, gradient_accumulation_steps: 16,
        steps_per_generation: 4, num_generations: 8, num_train_epochs: 2, reward_funcs: [m.f]}"""
    check_values(imported(tmp_path, text), {
        "packer.groups_per_step": 8, "trainer.num_minibatches": 1, "trainer.max_steps": 250,
    })  # fmt: skip


def test_the_page_has_what_an_import_of_its_script_gives(tmp_path: Path) -> None:
    """All keys that the script decides; the page moves the functions to a file of their own."""
    job = imported(tmp_path, page("trl").block("train_grpo.py"), options=Options(world=1, data=Path("train.jsonl")))
    written = check_tree(parse(page("trl").block("run.yaml")))
    tree = job.run.tree
    assert [one["weight"] for one in tree["reward"]["functions"]] == [1.0, 0.1]
    ours = check_tree(tree)
    for section in ("trainer", "rollout", "eval", "model", "name", "output_dir", "seed", "inference", "up"):
        assert getattr(ours, section) == getattr(written, section), section
    assert ours.packer.model_copy(update={"sequence_len": 0}) == written.packer.model_copy(update={"sequence_len": 0})
    assert any("does work (lines 22, 45)" in note for note in job.report.notes)


def test_an_evaluation_is_on_the_whole_split_and_sampled_as_in_training(tmp_path: Path) -> None:
    """By share: ⌈0.1 · 200⌉ = 20 updates."""
    text = """{model_name_or_path: a/b, eval_strategy: steps, eval_steps: 0.1, max_steps: 200, temperature: 0.8,
        num_generations_eval: 4, reward_funcs: [m.f], eval_on_start: true}"""
    job = imported(tmp_path, text)
    assert {question.target for question in job.report.questions} == {"environments.0.eval_path"}
    job.run.set("environments.0.eval_path", "held.jsonl")
    check_values(job, {
        "eval.every_steps": 20, "eval.completions_per_prompt": 4, "eval.temperature": 0.8, "eval.at_start": True,
        "eval.at_end": False, "eval.exact_match": None, "eval.num_prompts": 1_000_000,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("loss_type: cispo, epsilon_high: 4.0", {"trainer.loss.type": "cispo", "trainer.loss.epsilon_high": 4.0}),
        # without epsilon_high the cap is epsilon
        ("loss_type: cispo", {"trainer.loss.epsilon_high": 0.2}),
        ("loss_type: luspo", {"trainer.loss.importance_sampling_level": "token"}),
        ("loss_type: sapo, sapo_temperature_neg: 1.2", {"trainer.loss.temperature_neg": 1.2}),
        ("loss_type: vespo, vespo_k_pos: 1.5", {"trainer.loss.k_pos": 1.5, "trainer.loss.lambda_neg": 2.0}),
        # a single micro-batch: its tokens are those of the update
        ("loss_type: bnpo", {"trainer.loss.type": "dapo", "trainer.loss.compat.loss_normalizer": "minibatch"}),
        ("loss_type: bnpo, gradient_accumulation_steps: 2", {"trainer.loss.type": "bnpo"}),
        ("entropy_coef: 0.01", {"trainer.loss.compat.entropy_average": "step_tokens"}),
        ("entropy_coef: 0.01, gradient_accumulation_steps: 2",
         {"trainer.loss.compat.entropy_average": "micro_batch_tokens"}),
        ("delta: 4.0", {"trainer.loss.delta": 4.0}),
        ("scale_rewards: batch", {"reward.advantage.type": "batch_std", "reward.advantage.eps": 1e-4}),
        ("scale_rewards: none", {"reward.advantage.type": "mean"}),
        ("multi_objective_aggregation: normalize_then_sum", {"reward.advantage.eps": 1e-4}),
        ("use_vllm: true, vllm_importance_sampling_mode: token_truncate",
         {"trainer.correction.mode": "truncate", "trainer.correction.level": "token", "trainer.correction.high": 3.0}),
        ("use_vllm: true, vllm_importance_sampling_cap: 5.0", {"trainer.correction.high": 5.0}),
        ("use_vllm: true, vllm_importance_sampling_clip_max: null", {"trainer.correction.high": 1e9}),
        ("use_vllm: true, vllm_importance_sampling_correction: false", {"trainer.correction": None}),
        ("off_policy_mask_threshold: 0.5", {"trainer.off_policy_mask_threshold": 0.5}),
        ("use_adaptive_entropy: true, entropy_coef: 0.01",
         {"trainer.adaptive_entropy.target": 0.2, "trainer.entropy_coef": 0.01}),
        ("top_entropy_quantile: 0.2", {"trainer.top_entropy_quantile": 0.2}),
        ("top_k: -1", {"rollout.top_k": 0}),
        ("min_p: 0.05", {"rollout.min_p": 0.05}),
        # transformers' constant has no warm-up
        ("lr_scheduler_type: constant, warmup_steps: 10", {"trainer.warmup_steps": 0}),
        ("lr_scheduler_type: constant_with_warmup, warmup_steps: 10", {"trainer.warmup_steps": 10}),
        # a share of the updates, rounded up
        ("warmup_steps: 0.015", {"trainer.warmup_ratio": 0.015, "trainer.warmup_steps": 0}),
        ("lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-7}", {"trainer.min_lr_ratio": 0.1}),
        ("lr_scheduler_type: cosine_warmup_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.2}",
         {"trainer.lr_scheduler": "cosine", "trainer.min_lr_ratio": 0.2, "trainer.lr_schedule.first": 1}),
        ("lr_scheduler_type: polynomial",
         {"trainer.lr_scheduler": "polynomial", "trainer.min_lr_ratio": 0.1, "trainer.lr_schedule.power": 1.0}),
        ("lr_scheduler_type: polynomial, lr_scheduler_kwargs: {'power': 2.0}", {"trainer.lr_schedule.power": 2.0}),
        ("lr_scheduler_type: cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 3}",
         {"trainer.lr_scheduler": "cosine_with_restarts", "trainer.lr_schedule.num_cycles": 3}),
        ("lr_scheduler_type: inverse_sqrt, lr_scheduler_kwargs: {timescale: 50}, warmup_steps: 4",
         {"trainer.lr_scheduler": "inverse_sqrt", "trainer.lr_schedule.timescale": 50, "trainer.warmup_steps": 4}),
        ("lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 20}",
         {"trainer.lr_scheduler": "warmup_stable_decay", "trainer.lr_schedule.decay_steps": 20,
          "trainer.lr_schedule.decay_type": "cosine", "trainer.lr_schedule.unit": "update"}),
        ("lr_scheduler_type: constant", {"trainer.lr_schedule.unit": "step", "trainer.lr_schedule.first": 1}),
        ("save_strategy: 'no'", {"trainer.checkpoint.interval_share": 1.0}),
        ("save_steps: 0.05", {"trainer.checkpoint.interval_share": 0.05, "trainer.checkpoint.keep_last": None}),
        ("save_steps: 10, save_total_limit: 1", {"trainer.checkpoint.interval": 10, "trainer.checkpoint.keep_last": 1}),
        ("max_grad_norm: 0", {"trainer.max_grad_norm": None}),
        ("repetition_penalty: 1.1", {"rollout.repetition_penalty": 1.1}),
        ("use_vllm: true, generation_kwargs: {frequency_penalty: 0.5}", {"rollout.frequency_penalty": 0.5}),
        ("use_vllm: true, generation_kwargs: {stop: END}", {"rollout.stop": ["END"]}),
        ("generation_kwargs: {min_new_tokens: 4}", {"rollout.min_tokens": 4}),
        ("generation_kwargs: {stop_strings: ['</answer>']}", {"rollout.stop": ["</answer>"]}),
        ("chat_template_kwargs: {enable_thinking: false}",
         {"environments.0.chat_template_kwargs": {"enable_thinking": False}}),
        ("system_prompt: S, chat_template: '{{ messages }}'", {"model.chat_template": "{{ messages }}"}),
        ("max_prompt_length: 300",
         {"environments.0.max_prompt_tokens": 300, "environments.0.long_prompts": "truncate_left",
          "packer.sequence_len": 556, "rollout.max_tokens": 256}),
        ("bf16: false", {"model.dtype": "float32"}),
        ("cast_lm_head_to_fp32: true", {"model.head_dtype": "float32"}),
        ("cast_lm_head_to_fp32: false", {"model.head_dtype": "model"}),
        ("use_peft: true, model_name_or_path: Qwen/Qwen2-7B", {"model.lora.target_modules": ["q_proj", "v_proj"]}),
        ("use_peft: true, lora_target_modules: all-linear", {"model.lora.target_modules": "all-linear"}),
        ("use_peft: true, lora_target_modules: [q_proj], load_in_4bit: true",
         {"model.quantization": {"type": "nf4", "double_quant": False}}),
        ("use_peft: true, lora_target_modules: [q_proj], use_rslora: true",
         {"model.lora.alpha": 32.0, "model.lora.rslora": True}),
        ("use_peft: true, lora_target_modules: [q_proj], use_dora: true", {"model.lora.dora": True}),
        ("use_peft: true, lora_target_modules: [q_proj], lora_modules_to_save: [lm_head]",
         {"model.lora.modules_to_save": ["lm_head"]}),
        ("use_peft: true, lora_target_modules: [q_proj], use_dora: true, use_vllm: true", {"model.lora.dora": False}),
        ("use_peft: true, lora_target_modules: '.*(q|v)_proj'", {"model.lora.target_modules": ".*(q|v)_proj"}),
        ("generation_batch_size: 32", {"packer.groups_per_step": 4, "trainer.num_minibatches": 4}),
        ("reward_funcs: [get_soft_overlong_punishment]",
         {"reward.functions.0.kwargs": {"max_tokens": 1280, "overlong_tokens": 256}}),
        ("torch_dtype: float16", {"model.dtype": "bfloat16"}),
        ("optim: paged_adamw_8bit", {"trainer.optimizer.type": "adamw"}),
    ],
)  # fmt: skip
def test_a_key_has_the_value_of_the_origins_code(tmp_path: Path, keys: str, values: dict[str, Any]) -> None:
    """One process, eight completions of one group, 100 updates."""
    base = "max_steps: 100, model_name_or_path: a/b, reward_funcs: [m.f], "
    names = [part.split(":")[0].strip() for part in keys.split(", ")]
    base = "".join(part + ", " for part in base.split(", ")[:3] if part.split(":")[0] not in names)
    check_values(imported(tmp_path, "{" + base + keys + "}"), values)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("generation_batch_size: 32, steps_per_generation: 4", "generation_batch_size: TRL refuses it together"),
        ("num_generations: 3", "num_generations: 3 must divide"),
        ("num_generations: 1", "num_generations: 1 must divide"),
        ("gradient_accumulation_steps: 4, steps_per_generation: 6", "generation_batch_size: 48 must be a multiple"),
        ("per_device_train_batch_size: 3, generation_batch_size: 8", "is no multiple of per_device_train_batch_size"),
        ("per_device_train_batch_size: 0", "per_device_train_batch_size: must be 1 or more"),
        ("scale_rewards: mean", "scale_rewards: 'mean' must be one of group, batch, none"),
        ("loss_type: ppo", "loss_type: 'ppo' must be one of"),
        ("eval_strategy: no", 'YAML reads a bare no as false, so write "no"'),
        ("eval_strategy: steps, num_generations_eval: 3", "per_device_eval_batch_size: 8 completions"),
        ("use_vllm: true, loss_type: vespo", "which TRL refuses; take token_truncate"),
        ("reward_weights: [1.0, 2.0]", "reward_weights: 2 weights for 1 reward functions"),
        ("learning_rate: fast", "learning_rate: must be a number, got 'fast'"),
        ("num_generations: 8.5", "num_generations: must be an integer"),
        ("num_generations: null", "num_generations: is empty"),
        ("loss_type: [a, b]", "loss_type: takes one value"),
        ("use_vllm: maybe", "use_vllm: must be true or false"),
        ("num_train_epochs: 1, max_steps: -1, per_device_train_batch_size: 8008", "are fewer than the 1001 prompts"),
    ],
)
def test_what_the_origin_refuses_is_refused(tmp_path: Path, keys: str, problem: str) -> None:
    """With the key, and what to change."""
    base = "model_name_or_path: a/b, reward_funcs: [m.f]" + ("" if "max_steps" in keys else ", max_steps: 100")
    with pytest.raises(ConfigError) as error:
        imported(tmp_path, "{" + base + ", " + keys + "}")
    assert problem in str(error.value)


def test_the_number_of_processes_is_asked_for_and_never_taken_as_one(tmp_path: Path) -> None:
    """With all that follows from it."""
    text = "{model_name_or_path: a/b, reward_funcs: [m.f], generation_batch_size: 64}"
    job = imported(tmp_path, text, options=Options(rows=100, data=Path("rows.jsonl")))
    asked = {question.target for question in job.report.questions}
    assert asked >= {"trainer.num_ranks", "packer.groups_per_step", "trainer.num_minibatches"}
    assert job.run.get("trainer.max_epochs") == 3.0
    check_only_missing(job)
    without_rows = imported(tmp_path, "{model_name_or_path: a/b, warmup_ratio: 0.1}", options=Options(world=1))
    assert {question.target for question in without_rows.report.questions} == {
        *("environments.0.path", "reward.functions.0.path"),
    }
    check_only_missing(without_rows)


def test_without_the_number_of_rows_lengths_are_epochs_and_shares(tmp_path: Path) -> None:
    """An epoch leaves out the rows that fill no generation, as there."""
    text = (
        "{model_name_or_path: a/b, reward_funcs: [m.f], num_train_epochs: 2, save_strategy: epoch, warmup_ratio: 0.1}"
    )
    job = imported(tmp_path, text, options=Options(world=1, data=Path("rows.jsonl")))
    check_values(job, {
        "trainer.max_epochs": 2.0, "trainer.max_steps": 0, "trainer.checkpoint.interval_epochs": 1.0,
        "trainer.checkpoint.keep_last": None, "trainer.warmup_ratio": 0.1,
    })  # fmt: skip
    counted = imported(tmp_path, text)
    check_values(counted, {"trainer.max_epochs": None, "trainer.max_steps": 2000, "trainer.checkpoint.interval": 1000})


@pytest.mark.parametrize(
    ("keys", "verdict", "key"),
    [
        ("lr_scheduler_type: warmup_stable_decay", "refused", "lr_scheduler_type"),
        ("lr_scheduler_type: cosine_with_min_lr", "refused", "lr_scheduler_type"),
        ("lr_scheduler_type: reduce_lr_on_plateau", "refused", "lr_scheduler_type"),
        ("generation_kwargs: {frequency_penalty: 0.5}", "refused", "generation_kwargs.frequency_penalty"),
        ("use_vllm: true, generation_kwargs: {temperature: 0.5}", "refused", "generation_kwargs.temperature"),
        ("use_vllm: true, generation_kwargs: {seed: 3}", "irrelevant", "generation_kwargs.seed"),
        ("chat_template_path: other/model", "refused", "chat_template_path"),
        ("chat_template_path: mine.jinja", "renamed", "chat_template_path"),
        ("use_peft: true, lora_target_modules: [q_proj], use_dora: true, use_vllm: true", "refused", "use_dora"),
    ],
)
def test_a_key_is_refused_where_the_run_would_differ(tmp_path: Path, keys: str, verdict: str, key: str) -> None:
    """Penalties of vLLM mean nothing to transformers, which samples without use_vllm."""
    job = imported(tmp_path, "{model_name_or_path: a/b, reward_funcs: [m.f], max_steps: 100, " + keys + "}")
    check_verdicts(job, {key: verdict})


def test_adapters_of_a_script_have_the_forms_of_peft(tmp_path: Path) -> None:
    """Without vLLM the transformers engine samples, which takes all of them."""
    config = 'peft_config=LoraConfig(r=64, lora_alpha=16, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")'
    assert config in SCRIPT
    forms = 'use_rslora=True, use_dora=True, init_lora_weights="gaussian"'
    other = f'peft_config=LoraConfig(target_modules=r".*_proj", {forms})'
    start, end = SCRIPT.index("        quantization_config="), SCRIPT.index("    )\n    args = ")
    text = (SCRIPT[:start] + SCRIPT[end:]).replace(config, other)
    check_values(imported(tmp_path, text), {
        "model.lora.target_modules": ".*_proj", "model.lora.rslora": True, "model.lora.dora": True,
        "model.lora.init": "gaussian", "model.lora.rank": 8, "model.lora.alpha": 8.0,
    })  # fmt: skip


def test_the_command_takes_words_of_the_origins_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among options of its own; run.yaml on stdout, the report on stderr."""
    (tmp_path / "grpo.yaml").write_text("{model_name_or_path: a/b, reward_funcs: [m.f], learning_rate: 1e-6}")
    words = ["--learning_rate", "3e-6", "--world", "2", "--max_steps=7", "--data", "rows.jsonl", "--use_vllm"]
    assert main(["import", "trl", str(tmp_path / "grpo.yaml"), *words]) == 0
    out, err = capsys.readouterr()
    config = check_tree(parse(out))
    assert (config.trainer.learning_rate, config.trainer.max_steps, config.trainer.num_ranks) == (3e-6, 7, 2)
    assert config.inference.engine.type == "vllm"
    assert "taken      learning_rate=3e-06" in err
    assert main(["import", "trl", str(tmp_path / "grpo.yaml"), "--", "--max_steps", "many"]) == 2
    assert "max_steps: must be a number" in capsys.readouterr().err


_VALUES: dict[type, Any] = {
    bool: st.booleans(),
    int: st.sampled_from([0, 1, 2, 8, 16, "4"]),
    float: st.sampled_from([0.0, 0.1, 1.0, 3.0, "1e-5"]),
    str: st.sampled_from(["none", "dapo", "steps", "x"]),
}


@st.composite
def configurations(draw: st.DrawFn, trainer: str = "grpo") -> dict[str, Any]:
    """Random subsets of known keys, with values of their type or the default."""
    known = defaults(trainer, (1, 16))
    keys = draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=25))
    return {
        key: draw(st.just(known[key]) | _VALUES.get(type(known[key]), st.sampled_from([None, 1, "x"]))) for key in keys
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=configurations(), options=st.sampled_from([COMPLETE, Options()]))
def test_any_known_keys_are_reported_once_or_refused_in_words(
    tmp_path: Path, values: dict[str, Any], options: Options
) -> None:
    """No exception but a refusal of the origin's."""
    (tmp_path / "any.yaml").write_text(yaml.safe_dump({"seed": 1} | values))
    with contextlib.suppress(ConfigError):
        check_each_key_once(read([tmp_path / "any.yaml"], [], options), {"seed": 1} | values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.yaml", "a: [1, 2", "line 1: is not YAML"),
        ("a.yaml", "- 1\n- 2", "must be a map of keys"),
        ("a.yaml", "", "must be a map of keys"),
        ("a.yaml", b"\xff\xfe\x00\x01", "is not UTF-8 text"),
        ("a.yaml", "a: " + "[" * 2000, "is not YAML"),
        ("a.yaml", "#" * 5_000_000, "has more than 4000000 bytes"),
        ("a.py", "def f(:\n  pass", "line 1: is not Python"),
        ("a.py", "x = 1", "calls none of GRPOTrainer"),
        ("a.py", "(" * 3000 + ")" * 3000, "is not Python"),
        ("b.py", "from trl import GRPOTrainer\nGRPOTrainer(model=" + "-" * 3000 + "1)", "b.py"),
    ],
)
def test_files_that_are_no_configuration_are_refused_in_words(
    tmp_path: Path, name: str, content: str | bytes, problem: str
) -> None:
    """With the name of the file."""
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        read([tmp_path / name], [], COMPLETE)
    assert problem in str(error.value)
    assert str(tmp_path / name) in str(error.value) or name in str(error.value)


@pytest.mark.slow
def test_a_script_that_calls_itself_without_end_is_read_to_the_end(tmp_path: Path) -> None:
    """Calls are followed to a depth, loops once."""
    text = """
from trl import GRPOConfig, GRPOTrainer

def again(n):
    for _ in range(10**9):
        again(n + 1)
        again(n + 1)
    return again(n) + again(n)

again(0)
STEPS = 10 ** 10 ** 10
NAME = "x" * 10**9
GRPOTrainer(model="a/b", reward_funcs=lambda completions, **k: [1.0], args=GRPOConfig(max_steps=STEPS, run_name=NAME))
"""
    job = imported(tmp_path, text)
    check_verdicts(job, {"max_steps": "refused", "run_name": "refused", "model": "renamed"})
    (tmp_path / "side.txt").write_text("")
    evil = "import os\nos.remove('side.txt')\n" + text
    imported(tmp_path, evil)
    assert (tmp_path / "side.txt").exists()


def test_unknown_and_misspelt_keys_are_named(tmp_path: Path) -> None:
    """With the name that was meant."""
    text = "{model_name_or_path: a/b, num_generation: 4, made_up: 1, max_steps: 3}"
    job = imported(tmp_path, text)
    entries = {entry.key: entry.text for entry in job.report.entries}
    assert "did you mean num_generations?" in entries["num_generation"]
    assert "no key of TRL 1.16" in entries["made_up"]


@pytest.mark.parametrize(
    ("words", "verdict", "sync"),
    [
        ("--beta 0.04 --sync_ref_model true", "converted", {"every_steps": 128, "alpha": 0.6}),
        ("--beta 0.04 --sync_ref_model true --ref_model_sync_steps 64 --ref_model_mixup_alpha 0.9", "converted",
         {"every_steps": 16, "alpha": 0.9}),
        ("--sync_ref_model true", "irrelevant", None),
        ("--beta 0.04 --sync_ref_model false --ref_model_sync_steps 64", "irrelevant", None),
        ("--beta 0.04 --sync_ref_model true --use_peft true", "refused", None),
    ],
)  # fmt: skip
def test_the_reference_follows_the_policy_as_in_trl(tmp_path: Path, words: str, verdict: str, sync: Any) -> None:
    """Steps of TRL are updates, of which a step has four here: 512 ÷ 4 = 128."""
    text = """{model_name_or_path: Qwen/Qwen3-0.6B, max_steps: 100, output_dir: out, num_generations: 8,
        per_device_train_batch_size: 8, gradient_accumulation_steps: 1, steps_per_generation: 4}"""
    job = imported(tmp_path, text, *words.split())
    check_verdicts(job, {"sync_ref_model": verdict})
    config = check_tree(job.run.tree)
    reference = config.trainer.reference
    found = reference.sync.model_dump() if reference is not None and reference.sync is not None else None
    assert found == sync


@pytest.mark.parametrize(
    ("keys", "verdicts", "values"),
    [
        ("push_to_hub: true", {"push_to_hub": "converted"}, {"push_to_hub.hub_strategy": "every_save"}),
        (
            "push_to_hub: true, hub_strategy: all_checkpoints, hub_model_id: me/x, hub_revision: trial",
            {"hub_strategy": "converted", "hub_model_id": "taken", "hub_revision": "taken"},
            {
                "push_to_hub.hub_strategy": "all_checkpoints", "push_to_hub.hub_model_id": "me/x",
                "push_to_hub.hub_revision": "trial",
            },
        ),
        ("push_to_hub: true, hub_private_repo: true, hub_always_push: true",
         {"hub_private_repo": "taken", "hub_always_push": "taken"},
         {"push_to_hub.hub_private_repo": True, "push_to_hub.hub_always_push": True}),
        ("push_to_hub: false, hub_model_id: me/x", {"push_to_hub": "irrelevant", "hub_model_id": "irrelevant"},
         {"push_to_hub": None}),
        ("hub_model_id: me/x, hub_strategy: end", {"hub_model_id": "irrelevant", "hub_strategy": "irrelevant"},
         {"push_to_hub": None}),
        ("push_to_hub: true, hub_token: hf_abcdefgh", {"hub_token": "refused"}, {"push_to_hub.token_env": ""}),
        ("hub_token: null", {"hub_token": "irrelevant"}, {}),
        ("metric_for_best_model: eval_loss", {"metric_for_best_model": "taken"},
         {"eval.metric_for_best_model": "eval_loss", "eval.greater_is_better": False}),
        ("metric_for_best_model: reward, greater_is_better: true", {"greater_is_better": "taken"},
         {"eval.metric_for_best_model": "reward", "eval.greater_is_better": True}),
        ("greater_is_better: true", {"greater_is_better": "irrelevant"}, {"eval.metric_for_best_model": "eval_reward"}),
        ("load_best_model_at_end: true", {"load_best_model_at_end": "refused"}, {}),
    ],
)  # fmt: skip
def test_uploads_and_the_best_metric(
    tmp_path: Path, keys: str, verdicts: dict[str, str], values: dict[str, Any]
) -> None:
    """The same names in sections of their own; a token is refused, and is not in the report."""
    job = imported(tmp_path, f"{{model_name_or_path: a/b, reward_funcs: [mine.f], max_steps: 40, {keys}}}")
    check_verdicts(job, verdicts)
    check_values(job, values)
    assert "hf_abcdefgh" not in "".join(job.report.lines())


CALLBACKS = """
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, LogCompletionsCallback
from my.calls import Mine

class Own(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        pass

def made():
    class Inner(TrainerCallback):
        pass
    return Inner

trainer = GRPOTrainer(
    model="a/b",
    reward_funcs="mine.f",
    args=GRPOConfig(output_dir="out", max_steps=10),
    train_dataset=rows,
    callbacks={callbacks},
)
"""


@pytest.mark.parametrize(
    ("callbacks", "found"),
    [
        ("[EarlyStoppingCallback(early_stopping_patience=2)]",
         [{"path": "transformers:EarlyStoppingCallback", "kwargs": {"early_stopping_patience": 2}}]),
        ("[Own, Mine()]", [{"path": "{folder}/train.py:Own", "kwargs": {}}, {"path": "my.calls:Mine", "kwargs": {}}]),
        ("[]", []),
        ("None", []),
        ("[EarlyStoppingCallback(2)]", "EarlyStoppingCallback(2) has arguments without names"),
        ("[Mine(path=open('x'))]", "the arguments of Mine(path=open('x')) can't be read"),
        ("[PrinterCallback]", "PrinterCallback is for the origin's own loop"),
        ("[LogCompletionsCallback(trainer=1)]", "LogCompletionsCallback reads the trainer's model"),
        ("[made()]", "can't be imported by another process"),
        ("[lambda: 1]", "can't be imported by another process"),
        ("others()", "the list can't be read"),
    ],
)  # fmt: skip
def test_callbacks_of_a_script_that_another_process_can_import(
    tmp_path: Path, callbacks: str, found: list[dict[str, Any]] | str
) -> None:
    """With constant arguments; each other one is refused with the reason, and with it the key."""
    job = imported(tmp_path, CALLBACKS.replace("{callbacks}", callbacks))
    if isinstance(found, str):
        [entry] = [entry for entry in job.report.entries if entry.key == "callbacks"]
        assert (str(entry.verdict), found in entry.text) == ("refused", True), entry.text
        return
    expected = [one | {"path": one["path"].replace("{folder}", str(tmp_path))} for one in found]
    config = check_tree(job.run.tree)
    assert [one.model_dump(exclude={"required"}) for one in config.callbacks] == expected


def test_a_callback_that_is_added_later_is_told(tmp_path: Path) -> None:
    """It is no key of the input, and would be forgotten otherwise."""
    job = imported(tmp_path, CALLBACKS.replace("{callbacks}", "None") + "trainer.add_callback(Own())\n")
    assert any("trainer.add_callback(Own()) in line" in note for note in job.report.notes)


ROWS = """
from datasets import load_dataset, load_from_disk
from mine import f
from trl import GRPOConfig, GRPOTrainer

rows = {rows}
held = {held}
args = GRPOConfig(output_dir="out", max_steps=10, eval_strategy="steps", eval_steps=5)
GRPOTrainer(model="a/b", reward_funcs=f, args=args, train_dataset=rows, eval_dataset=held)
"""
GSM8K = 'load_dataset("openai/gsm8k", "main", split="train")'


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (GSM8K, {"path": "openai/gsm8k", "config": "main", "split": "train"}),
        ('load_dataset("o/n", name="c", revision="v1", num_proc=8)["train"]',
         {"path": "o/n", "config": "c", "split": "train", "revision": "v1"}),
        (f'{GSM8K}.shuffle(seed=3).rename_column("question", "prompt")', {"columns": {"prompt": "question"}}),
        (f'{GSM8K}.rename_column("question", "x").rename_column("x", "prompt")', {"columns": {"prompt": "question"}}),
        (f"{GSM8K}.select(range(100))", {"limit": 100}),
        ('load_dataset("json", data_files="a.jsonl", split="train[:9]")', {"path": "a.jsonl", "split": "train[:9]"}),
        ('load_dataset("parquet", data_files={"train": "d/*.parquet", "test": "t.parquet"}, split="test")',
         {"path": "t.parquet", "split": "train"}),
        ('load_from_disk("mine")["train"]', {"path": "mine", "split": "train"}),
        (f"{GSM8K}.map(to_chat)", None),
        (f"{GSM8K}.filter(lambda row: True)", None),
        (f"{GSM8K}.shuffle(seed=3).select(range(100))", None),
        (f"{GSM8K}.select(range(5, 100))", None),
        ('load_dataset("o/n")', None),
        ('load_dataset("o/n", split="train", data_dir="part")', None),
        ('load_dataset("json", data_files="https://host/a.jsonl", split="train")', None),
        ('load_dataset("json", data_files=["a.jsonl", "b.jsonl"], split="train")', None),
        ('load_dataset(name_of_today(), split="train")', None),
    ],
)  # fmt: skip
def test_a_data_set_that_a_script_takes_as_it_is_needs_no_export(
    tmp_path: Path, rows: str, keys: dict[str, Any] | None
) -> None:
    """Renamed columns, a shuffle and a limit have counterparts; rows of a script's own code are asked for."""
    script = ROWS.replace("{rows}", rows).replace("{held}", "None")
    job = imported(tmp_path, script.replace('eval_strategy="steps", eval_steps=5', ""), options=Options(world=1))
    if keys is None:
        assert [question.target for question in job.report.questions] == ["environments.0.path"]
        check_verdicts(job, {"train_dataset": "refused"})
        return
    check_values(job, {"environments.0.type": "dataset"} | {f"environments.0.{key}": keys[key] for key in keys})
    check_verdicts(job, {"train_dataset": "converted"})


@pytest.mark.parametrize(
    ("held", "keys"),
    [
        ('load_dataset("openai/gsm8k", "main", split="test")', {"eval_path": None, "eval_split": "test"}),
        ('load_dataset("openai/gsm8k", "socratic", split="test")', None),
        (f"{GSM8K}.select(range(9))", None),
    ],
)
def test_held_out_rows_stand_beside_the_rows_of_training(
    tmp_path: Path, held: str, keys: dict[str, Any] | None
) -> None:
    """Where one environment can have both; else they are asked for."""
    job = imported(tmp_path, ROWS.replace("{rows}", GSM8K).replace("{held}", held), options=Options(world=1))
    if keys is None:
        assert [question.target for question in job.report.questions] == ["environments.0.eval_path"]
    else:
        check_values(job, {f"environments.0.{key}": keys[key] for key in keys})


def test_a_data_set_of_the_command_line_needs_no_export(tmp_path: Path) -> None:
    """`trl grpo` takes a split of it as it is; open-r1 names the column of the prompt."""
    keys = "model_name_or_path: a/b, reward_funcs: [mine.f], max_steps: 9, eval_strategy: steps, eval_steps: 3"
    text = f"{{{keys}, dataset_name: o/n, dataset_config: c, dataset_train_split: big}}"
    job = imported(tmp_path, text, options=Options(world=1))
    at = "environments.0"
    values = {"type": "dataset", "path": "o/n", "config": "c", "split": "big", "eval_split": "test", "columns": {}}
    check_values(job, {f"{at}.{key}": value for key, value in values.items()})
    names = ("dataset_name", "dataset_config", "dataset_train_split")
    check_verdicts(job, dict.fromkeys(names, "converted"))
    recipe = imported(tmp_path, RECIPE, options=Options(world=7, reward="rewards.py:f"))
    values = {"path": "open-r1/OpenR1-Math-220k", "columns": {"prompt": "problem"}, "split": "train"}
    found = check_tree(recipe.run.tree | {"reward": {"functions": [{"path": "accuracy"}]}}).environments[0]
    assert {key: getattr(found, key) for key in values} == values
