"""Configurations of ms-swift, with the values that its code and transformers' derive from them."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.imports.job import Import, Options
from actors.imports.ms_swift import read
from actors.imports.ms_swift.versions import DEFAULTS
from actors.imports.shell import UNKNOWN, commands
from schemas.config.load import check_tree, parse
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_each_key_once, check_only_missing, check_values, check_verdicts
from tests.howto.pages import page

COMPLETE = Options(world=1, rows=1000, data=Path("rows.jsonl"), reward="rewards.py:f")
BASE = "rlhf_type: grpo, model: Qwen/Qwen2.5-7B, dataset: [a/b], reward_funcs: [accuracy]"

DAPO = r"""#!/bin/bash
# eight GPUs: DAPO's clip, soft punishment, dynamic sampling
export NPROC_PER_NODE=8
MODEL="Qwen/Qwen2.5-32B"   # the base model
SYSTEM='Answer in \boxed{}; cost: $5 "exactly".'
OUT=output/$(date +%Y)

CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
WANDB_API_KEY=abc \
swift rlhf \
    --rlhf_type grpo \
    --model "$MODEL" \
    --train_type full \
    --torch_dtype bfloat16 \
    --dataset org/math#20000 \
    --system "$SYSTEM" \
    --reward_funcs accuracy soft_overlong repetition \
    --reward_weights 1.0 0.5 0.1 \
    --soft_cache_length 819 \
    --repetition_n_grams 4 \
    --max_length 1024 \
    --max_completion_length 4096 \
    --num_generations 16 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --steps_per_generation 16 \
    --num_iterations 1 \
    --learning_rate 1e-6 \
    --warmup_ratio 0.05 \
    --num_train_epochs 2 \
    --loss_type dapo \
    --epsilon 0.2 --epsilon_high=0.28 \
    --beta 0 \
    --dynamic_sample true \
    --max_resample_times 5 \
    --overlong_filter true \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_tensor_parallel_size 2 \
    --vllm_engine_kwargs '{"max_num_batched_tokens": 8192, "disable_log_stats": true}' \
    --vllm_max_num_seqs 64 \
    --sleep_level 1 \
    --deepspeed zero3_offload \
    --save_steps 0.1 \
    --save_total_limit 2 \
    --eval_steps 100 \
    --report_to tensorboard swanlab \
    --swanlab_project mine \
    --output_dir "$OUT" \
    --temperature 1.0 2>&1 | tee train.log
"""
SERVER = r"""
CUDA_VISIBLE_DEVICES=0 swift rollout --model Qwen/Qwen2.5-7B-Instruct --vllm_tensor_parallel_size 2 \
    --vllm_max_model_len 8192 &

NPROC_PER_NODE=6 NNODES=2 swift rlhf \
    --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset data.jsonl \
    --reward_funcs mine --external_plugins plugin.py \
    --use_vllm true --vllm_mode server --vllm_server_host 10.0.0.1 --vllm_server_port 8000 \
    --async_generate true --max_steps 100 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 \
    --advantage_estimator rloo --lora_rank 16 --target_modules q_proj v_proj \
    --rollout_importance_sampling_mode sequence_mask --quant_method bnb --quant_bits 4 \
    --off_policy_sequence_mask_delta 0.4 --system system.txt
"""
CHORD = """chord_sft_dataset: [sft.jsonl], chord_sft_per_device_train_batch_size: 2, chord_mu_warmup_steps: 10,
    chord_mu_decay_steps: 20, chord_mu_peak: 0.9, chord_mu_valley: 0.05, num_iterations: 2"""
PLUGIN = """
from swift.rewards import ORM, orms


class Mine(ORM):
    def __call__(self, completions, **kwargs):
        return [1.0 for _ in completions]


orms["mine"] = Mine
"""


def imported(folder: Path, text: str, *words: str, options: Options = COMPLETE) -> Import:
    """Import a text, of a shell script or of YAML."""
    name = "train.sh" if "swift " in text or "--rlhf_type" in text else "args.yaml"
    (folder / name).write_text(text)
    return read([folder / name], list(words), options)


def words_of(text: str) -> set[str]:
    """Return the options of a script's `swift rlhf`."""
    command = text[text.index("swift rlhf") :].partition("2>&1")[0]
    return {word[2:].partition("=")[0] for word in command.split() if word.startswith("--")}


def test_a_script_with_eight_processes_has_the_values_of_its_code(tmp_path: Path) -> None:
    """4 · 8 · 16 = 512 completions = 32 groups of 16; 16 ÷ 4 = 4 updates.

    Of 20000 rows an epoch is ⌊20000 ÷ 32⌋ · 16 ÷ 4 = 2500 updates; two are 5000, or 1250 steps. Warm-up and interval of
    checkpoints are shares of the run.
    """
    job = imported(tmp_path, DAPO, options=Options(data=Path("rows.jsonl")))
    assert {question.target for question in job.report.questions} == {"output_dir"}
    job.run.set("output_dir", "output")
    check_values(job, {
        "model.path": "Qwen/Qwen2.5-32B", "model.lora": None, "model.dtype": "bfloat16",
        "environments.0.system_prompt": 'Answer in \\boxed{}; cost: $5 "exactly".', "environments.0.chat": True,
        "packer.groups_per_step": 32, "rollout.group_size": 16, "trainer.num_minibatches": 4,
        "trainer.num_ranks": 8, "trainer.max_steps": 1250, "trainer.warmup_ratio": 0.05, "trainer.sharding": "fsdp",
        "trainer.lr_schedule.unit": "update", "environments.0.max_prompt_tokens": 1024,
        "environments.0.long_prompts": "truncate_left",
        "trainer.checkpoint.interval_share": 0.1, "trainer.checkpoint.keep_last": 2, "trainer.learning_rate": 1e-6,
        "trainer.lr_scheduler": "cosine", "trainer.optimizer.weight_decay": 0.1, "trainer.optimizer.beta2": 0.95,
        "trainer.loss.type": "dapo", "trainer.loss.epsilon_high": 0.28, "trainer.reference": None,
        "reward.advantage": {"type": "zscore", "std": "unbiased", "eps": 1e-4}, "reward.none_as_zero": True,
        "packer.dynamic_sampling": True, "packer.max_resample_times": 5, "reward.mask_truncated_completions": True,
        "packer.sequence_len": 5120, "rollout.max_tokens": 4096, "rollout.temperature": 1.0, "rollout.top_p": 0.9,
        "rollout.top_k": 50, "reward.functions.0.path": "accuracy_swift", "reward.functions.1.path": "overlong",
        "reward.functions.1.kwargs": {"max_tokens": 4096, "overlong_tokens": 819},
        "reward.functions.2.kwargs": {"repetition_n_grams": 4, "repetition_max_penalty": -1.0},
        "reward.functions.1.weight": 0.5, "inference.engine.type": "vllm", "up.inference": 4, "up.colocate": True,
        "inference.engine.tensor_parallel_size": 2, "inference.engine.gpu_memory_utilization": 0.9,
        "inference.engine.extra_args": [
            *("--max-num-seqs", "64", "--max-num-batched-tokens", "8192", "--disable-log-stats"),
        ],
        "eval.num_prompts": 0,
    })  # fmt: skip
    check_verdicts(job, {
        "train_type": "converted", "eval_steps": "irrelevant", "sleep_level": "refused", "report_to": "converted",
        "swanlab_project": "renamed", "max_length": "converted", "output_dir": "refused", "beta": "irrelevant",
        "NPROC_PER_NODE": "converted", "CUDA_VISIBLE_DEVICES": "irrelevant", "env.WANDB_API_KEY": "irrelevant",
    })  # fmt: skip
    environment = {"NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES", "env.WANDB_API_KEY"}
    check_each_key_once(job, words_of(DAPO) | environment)
    assert any("4 times smaller" in note for note in job.report.notes)


def test_a_script_with_a_server_of_its_own_command_is_one_run(tmp_path: Path) -> None:
    """2 · 12 · 2 = 48 completions = 6 groups; LoRA with rank 16 and ms-swift's alpha 32; lr 1e-4 of adapters."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "system.txt").write_text("Be brief.")
    (tmp_path / "data.jsonl").write_text((json.dumps({"messages": [], "solution": "4"}) + "\n") * 6)
    job = imported(tmp_path, SERVER, options=Options())
    check_values(job, {
        "trainer.num_ranks": 12, "packer.groups_per_step": 6, "packer.max_async_level": 1, "trainer.max_steps": 100,
        "model.lora.rank": 16, "model.lora.alpha": 32.0, "model.lora.dropout": 0.05,
        "model.lora.target_modules": ["q_proj", "v_proj"],
        "model.quantization": {"type": "nf4", "double_quant": True}, "trainer.learning_rate": 1e-4,
        "reward.functions.0.path": f"{tmp_path}/plugin.py:Mine", "environments.0.system_prompt": "Be brief.",
        "environments.0.path": f"{tmp_path}/data.jsonl", "environments.0.prompt_column": "messages",
        "reward.advantage": {"type": "rloo", "scale": "none", "std": "unbiased", "eps": 1e-4, "std_of": "rewards"},
        "trainer.reference.estimator": "k1", "trainer.reference.place": "group_reward",
        "trainer.reference.beta": 0.04, "trainer.correction.mode": "mask", "trainer.correction.level": "sequence",
        "trainer.correction.sequence_ratio": "geometric_mean", "trainer.correction.sequence_weight": "token",
        "trainer.correction.high": 2.0, "trainer.off_policy_mask_threshold": 0.4,
        "trainer.loss.compat.off_policy_tokens": "leave", "inference.engine.tensor_parallel_size": 2,
        "inference.engine.max_model_len": 8192, "up.colocate": False, "rollout.temperature": 0.9,
        "output_dir": "output/Qwen2.5-7B-Instruct",
    })  # fmt: skip
    check_verdicts(job, {
        "vllm_server_host": "refused", "rollout.vllm_tensor_parallel_size": "renamed", "dataset": "converted",
        "rollout.model": "irrelevant", "system": "converted", "async_generate": "converted",
    })  # fmt: skip
    server = {"rollout.model", "rollout.vllm_tensor_parallel_size", "rollout.vllm_max_model_len"}
    environment = {"NPROC_PER_NODE", "NNODES"}
    check_each_key_once(job, words_of(SERVER) | server | environment)


def test_the_page_has_what_an_import_of_its_script_gives(tmp_path: Path) -> None:
    """All keys that the command decides; the page writes the rewards as functions."""
    (tmp_path / "gsm8k_plugin.py").write_text(page("ms-swift").block("gsm8k_plugin.py"))
    options = Options(rows=7473, data=Path("train.jsonl"))
    job = imported(tmp_path, page("ms-swift").block("gsm8k.sh"), options=options)
    written = check_tree(parse(page("ms-swift").block("run.yaml")))
    ours = check_tree(job.run.tree)
    for section in ("trainer", "rollout", "eval", "model", "output_dir", "seed", "inference"):
        assert getattr(ours, section) == getattr(written, section), section
    for key in ("groups_per_step", "max_async_level", "dynamic_sampling", "max_resample_times"):
        assert getattr(ours.packer, key) == getattr(written.packer, key), key
    assert [one.weight for one in ours.reward.functions] == [1.0, 0.2]
    assert ours.reward.advantage == written.reward.advantage
    assert ours.environments[0].system_prompt == written.environments[0].system_prompt


def test_what_has_no_counterpart_in_adapters_and_epochs_is_refused(tmp_path: Path) -> None:
    """Names of module groups, adapters that vLLM does not serve, and an end before that of the schedule."""
    text = (
        "{"
        + BASE
        + ", per_device_train_batch_size: 8, modules_to_save: [all-norm], max_epochs: 2, init_weights: pissa}"
    )
    job = imported(tmp_path, text)
    check_verdicts(job, {"modules_to_save": "refused", "max_epochs": "refused", "init_weights": "refused"})
    text = "{" + BASE + ", per_device_train_batch_size: 8, use_vllm: true, vllm_mode: colocate, use_dora: true}"
    check_verdicts(imported(tmp_path, text), {"use_dora": "refused"})
    text = text.replace("use_dora: true", "freeze_vit: false, freeze_aligner: true, freeze_llm: true")
    check_verdicts(
        imported(tmp_path, text), {"freeze_vit": "refused", "freeze_aligner": "irrelevant", "freeze_llm": "refused"}
    )


def test_without_rows_the_length_is_in_epochs(tmp_path: Path) -> None:
    """The end after a later epoch changes nothing."""
    text = "{" + BASE + ", per_device_train_batch_size: 8, num_train_epochs: 2, max_epochs: 3, save_strategy: epoch}"
    job = imported(tmp_path, text, options=Options(world=1, data=Path("rows.jsonl")))
    check_values(job, {"trainer.max_epochs": 2.0, "trainer.checkpoint.interval_epochs": 1.0})
    check_verdicts(job, {"max_epochs": "irrelevant"})


def test_an_older_release_has_its_own_defaults(tmp_path: Path) -> None:
    """3.5: top_p 0.9, top_k 50, a hundredth of the rows held out, 16 completions of an update, vLLM colocated.

    ⌈16 ÷ 8 ÷ 1⌉ = 2 accumulated: 2 groups. Of 1000 rows 10 are held out by the number behind #.
    """
    text = "{" + BASE.replace("[a/b]", "['a/b#1000']") + ", per_device_train_batch_size: 8, use_vllm: true}"
    text = text.replace("use_vllm", "per_device_eval_batch_size: 8, use_vllm")
    job = imported(tmp_path, text, options=Options(world=1, data=Path("rows.jsonl"), version="3.5"))
    assert {question.target for question in job.report.questions} == {"environments.0.eval_path"}
    job.run.set("environments.0.eval_path", "held.jsonl")
    # ⌊990 ÷ 2⌋ = 495 updates an epoch
    check_values(job, {
        "rollout.top_p": 0.9, "rollout.top_k": 50, "packer.groups_per_step": 2, "trainer.max_steps": 1485,
        "eval.every_steps": 500, "eval.temperature": 0.9, "eval.completions_per_prompt": 8, "up.colocate": True,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("advantage_estimator: reinforce_plus_plus, beta: 0",
         {"reward.advantage": {"type": "reinforce_pp", "scale": "batch", "std": "unbiased", "eps": 1e-4}}),
        ("scale_rewards: gdpo", {"reward.advantage": {"type": "gdpo", "std": "unbiased", "eps": 1e-8}}),
        ("scale_rewards: false", {"reward.advantage": {"type": "mean"}}),
        ("advantage_estimator: rloo, scale_rewards: batch, kl_in_reward: false",
         {"reward.advantage.scale": "batch", "trainer.reference.place": "loss", "trainer.reference.max_kl": 10.0}),
        ("importance_sampling_level: sequence_token", {"trainer.loss.importance_sampling_level": "sequence_token"}),
        ("loss_type: cispo, epsilon_high: 5", {"trainer.loss.type": "cispo", "trainer.loss.epsilon_high": 5.0}),
        ("loss_type: sapo, tau_neg: 1.2", {"trainer.loss.temperature_neg": 1.2}),
        ("tuner_type: full", {"trainer.learning_rate": 1e-5, "model.lora": None}),
        ("lora_alpha: 64", {"trainer.learning_rate": 1e-4, "model.lora.alpha": 64.0, "model.lora.rank": 8}),
        ("generation_batch_size: 32, steps_per_generation: 4",
         {"packer.groups_per_step": 4, "trainer.num_minibatches": 4}),
        ("lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: '{\"min_lr\": 1e-5}'",
         {"trainer.min_lr_ratio": 0.1}),
        ("max_new_tokens: 256", {"rollout.max_tokens": 256}),
        ("repetition_penalty: 1.05, stop_words: ['</answer>']",
         {"rollout.repetition_penalty": 1.05, "rollout.stop": ["</answer>"]}),
        ("enable_thinking: false", {"environments.0.chat_template_kwargs": {"enable_thinking": False}}),
        ("max_length: 100, truncation_strategy: delete",
         {"environments.0.max_prompt_tokens": 100, "environments.0.long_prompts": "drop"}),
        ("use_rslora: true, lora_rank: 16", {"model.lora.rslora": True, "model.lora.alpha": 32.0}),
        ("use_dora: true, modules_to_save: [lm_head]",
         {"model.lora.dora": True, "model.lora.modules_to_save": ["lm_head"]}),
        ("target_regex: '.*(q|v)_proj'", {"model.lora.target_modules": ".*(q|v)_proj"}),
        ("freeze_vit: false, freeze_aligner: true", {"model.train_vision_tower": True, "model.train_projector": False}),
        ("freeze_aligner: false", {"model.train_projector": True}),
        ("init_weights: gaussian", {"model.lora.init": "gaussian"}),
        ("init_weights: 'true'", {"model.lora.init": "kaiming"}),
        ("max_grad_norm: 0, warmup_steps: 7", {"trainer.max_grad_norm": None, "trainer.warmup_steps": 7}),
        ("save_strategy: 'no', num_train_epochs: 2", {"trainer.checkpoint.interval_share": 1.0}),
        ("use_vllm: true, vllm_mode: colocate, vllm_max_model_len: 512", {"inference.engine.max_model_len": None}),
        ("fsdp: fsdp2", {"trainer.sharding": "none"}),
        ("reward_funcs: [cosine], cosine_min_len_value_wrong: -1",
         {"reward.functions.0.kwargs": {
             "cosine_max_len": 512, "cosine_min_len_value_wrong": -1.0, "cosine_max_len_value_wrong": 0.0,
             "cosine_min_len_value_correct": 1.0, "cosine_max_len_value_correct": 0.5}}),
        # 2 per device · 1 process · 1 accumulated, in each of 1 · 2 updates of a step
        (CHORD,
         {"trainer.sft.batch_size": 4, "trainer.sft.mu_warmup_steps": 5, "trainer.sft.mu_decay_steps": 10,
          "trainer.sft.mu_peak": 0.9, "trainer.max_steps": 50}),
    ],
)  # fmt: skip
def test_a_key_has_the_value_of_the_origins_code(tmp_path: Path, keys: str, values: dict[str, Any]) -> None:
    """One process, eight completions of one group, 100 updates."""
    base = BASE if "reward_funcs" not in keys else BASE.rpartition(", ")[0]
    sizes = ", per_device_train_batch_size: 8, max_steps: 100, "
    check_values(imported(tmp_path, "{" + base + sizes + keys + "}"), values)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("num_generations: 3", "num_generations: 3 must divide"),
        ("generation_batch_size: 32, steps_per_generation: 2", "contradicts steps_per_generation"),
        ("vllm_mode: colocate", "ms-swift refuses it without use_vllm"),
        ("use_vllm: true, vllm_mode: server", "vllm_server_host: is missing"),
        ("warmup_ratio: 0.1, warmup_steps: 5", "ms-swift refuses it together with warmup_steps"),
        ("advantage_estimator: ppo", "advantage_estimator: 'ppo' must be"),
        ("reward_weights: [1, 2]", "2 weights for 1 rewards"),
        ("split_dataset_ratio: 0.1", "per_device_eval_batch_size: 1 completions"),
        ("max_steps: many", "max_steps: must be a number"),
        ("truncation_strategy: right", "truncation_strategy: 'right' must be left or delete"),
        ("train_type: full, tuner_type: lora", "means tuner_type, which is given too"),
    ],
)
def test_what_the_origin_refuses_is_refused(tmp_path: Path, keys: str, problem: str) -> None:
    """With the key, and what to change."""
    with pytest.raises(ConfigError) as error:
        imported(tmp_path, "{" + BASE + ", per_device_train_batch_size: 8, " + keys + "}")
    assert problem in str(error.value)


OLD = r"""
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=7 \
swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --reward_funcs accuracy format \
    --use_vllm true \
    --vllm_device auto \
    --vllm_gpu_memory_utilization 0.7 \
    --vllm_max_model_len 8192 \
    --train_type full \
    --torch_dtype bfloat16 \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --max_completion_length 2048 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --learning_rate 1e-6 \
    --eval_steps 200 \
    --save_steps 200 \
    --max_length 4096 \
    --warmup_ratio 0.05 \
    --num_generations 7 \
    --system 'Think first.' \
    --deepspeed zero2
"""
"""One of eight GPUs is vLLM's: early 2025."""
SHARED = r"""
NNODES=1 torchrun --nproc_per_node=8 --nnodes=1 swift/cli/rlhf.py --rlhf_type grpo --model Qwen/Qwen2.5-7B \
    --train_type full --dataset AI-MO/NuminaMath-TIR#10000 --torch_dtype bfloat16 --num_train_epochs 1 \
    --max_length 1024 --per_device_train_batch_size 6 --per_device_eval_batch_size 6 --max_completion_length 2048 \
    --reward_funcs accuracy format --num_generations 48 --use_vllm true --vllm_gpu_memory_utilization 0.3 \
    --sleep_level 1 --deepspeed zero3_offload --num_infer_workers 8 --tensor_parallel_size 4 --top_p 0.85
"""
"""As many engines' workers as processes: they share GPUs."""
GSPO = r"""
NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset AI-MO/NuminaMath-TIR#10000 \
    --beta 0.0 --epsilon 3e-4 --epsilon_high 4e-4 --steps_per_generation 4 --importance_sampling_level sequence \
    --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_generations 16 \
    --train_type full --reward_funcs accuracy --use_vllm true --vllm_mode colocate --vllm_max_model_len 16384 \
    --max_completion_length 8192 --offload_model true --save_steps 1000 --learning_rate 1e-6 --warmup_ratio 0.05 \
    --deepspeed zero3 \

"""
"""Two generations of 4 steps in an update of 8."""
BESIDE = r"""
CUDA_VISIBLE_DEVICES=0,1 swift rollout --model Qwen/Qwen2.5-32B-Instruct --tensor_parallel_size 2

CUDA_VISIBLE_DEVICES=2,3,4,5 NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-32B-Instruct \
    --reward_funcs accuracy --use_vllm true --vllm_mode colocate --vllm_server_host 10.0.0.1 --vllm_server_port 8000 \
    --train_type full --dataset AI-MO/NuminaMath-TIR#1000 --max_completion_length 2048 --num_train_epochs 3 \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --num_generations 8 --top_p 0.9 --top_k 50 \
    --num_iterations 3 --save_steps 500 --loss_type fipo --fipo_decay_rate 32 --sequence_parallel_size 2 --max_turns 3
"""
"""A server beside a mode that says otherwise."""


@pytest.mark.parametrize(
    ("text", "origin", "values", "verdicts"),
    [
        # 1 · 7 · 2 = 14 completions = 2 groups of 7; a hundredth is held out: ⌊4950 ÷ 2⌋ = 2475 updates
        (OLD + " --per_device_eval_batch_size 1", "ms-swift 3.4", {
            "packer.groups_per_step": 2, "trainer.max_steps": 2475, "rollout.top_p": 0.9, "rollout.top_k": 50,
            "up.colocate": False, "up.inference": 1, "trainer.num_ranks": 7, "eval.every_steps": 200,
            "trainer.reference.beta": 0.04, "packer.sequence_len": 6144, "trainer.sharding": "fsdp",
            "model.lora": None, "trainer.warmup_ratio": 0.05, "trainer.loss.type": "grpo",
        }, {"vllm_device": "converted", "train_type": "converted", "eval_steps": "converted"}),
        # 6 · 8 = 48 completions = 1 group; ⌊9900 ÷ 1⌋ updates
        (SHARED, "ms-swift 3.4", {
            "packer.groups_per_step": 1, "trainer.max_steps": 9900, "up.colocate": True, "up.inference": 2,
            "inference.engine.tensor_parallel_size": 4, "rollout.top_k": 50, "rollout.top_p": 0.85,
        }, {"num_infer_workers": "irrelevant", "tensor_parallel_size": "renamed", "sleep_level": "refused"}),
        # 2 · 8 · 8 = 128 completions of two generations = 8 groups in one update; ⌊10000 ÷ 4⌋ · 4 ÷ 8 = 1250
        (GSPO, "ms-swift 3.12", {
            "packer.groups_per_step": 8, "trainer.num_minibatches": 1, "trainer.max_steps": 1250,
            "trainer.loss.epsilon": 3e-4, "trainer.loss.epsilon_high": 4e-4, "rollout.top_p": 0.9,
            "trainer.loss.importance_sampling_level": "sequence", "trainer.reference": None, "rollout.top_k": 50,
            "trainer.checkpoint.interval": 1000, "up.colocate": True, "up.inference": 8,
        }, {"steps_per_generation": "converted", "offload_model": "refused"}),
        # 4 · 4 = 16 completions = 2 groups; three iterations are three updates of a step: 3 · 500 · 3 ÷ 3, 500 ÷ 3
        (BESIDE, "ms-swift 4.6", {
            "packer.groups_per_step": 2, "trainer.num_iterations": 3, "trainer.max_steps": 1500,
            "trainer.checkpoint.interval": 166, "up.colocate": False, "trainer.loss.type": "grpo",
            "inference.engine.tensor_parallel_size": 2, "rollout.top_p": 0.9, "rollout.top_k": 50,
        }, {"vllm_mode": "irrelevant", "vllm_server_host": "refused", "fipo_decay_rate": "refused",
            "loss_type": "refused", "sequence_parallel_size": "refused", "max_turns": "refused"}),
    ],
)  # fmt: skip
def test_scripts_of_several_years_have_the_values_of_their_code(
    tmp_path: Path, text: str, origin: str, values: dict[str, Any], verdicts: dict[str, str]
) -> None:
    """The time is told by words that later releases do not take; each option has one entry."""
    job = imported(tmp_path, text.replace("zero2\n --", "zero2 --"), options=Options(data=Path("rows.jsonl")))
    assert job.report.origin == origin
    for question in list(job.report.questions):
        assert question.target == "environments.0.eval_path"
        job.answer(question.target, "held.jsonl", "")
    check_values(job, values)
    check_verdicts(job, verdicts)
    keys = {entry.key for entry in job.report.entries}
    words = text[text.index("--rlhf_type") :].split()
    assert {word[2:] for word in words if word.startswith("--")} <= keys
    for entry in job.report.entries:
        assert entry.verdict != "refused" or "; " in entry.text, f"no way out: {entry}"


def test_vllm_without_a_mode_is_of_an_early_release_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    """Releases from 3.11 on refuse it."""
    text = "{" + BASE + ", per_device_train_batch_size: 8, use_vllm: true}"
    job = imported(tmp_path, text)
    assert job.report.origin == "ms-swift 3.10"
    check_values(job, {"up.colocate": True, "rollout.top_p": 0.9, "eval.num_prompts": 0})
    served = imported(tmp_path, text.replace("use_vllm: true", "use_vllm: true, vllm_server_host: a"))
    check_values(served, {"up.colocate": False})
    with pytest.raises(ConfigError, match="with use_vllm ms-swift wants colocate or server"):
        imported(tmp_path, text, options=Options(world=1, rows=1000, data=Path("rows.jsonl"), version="4.6"))


def test_soft_overlong_needs_its_length(tmp_path: Path) -> None:
    """As ms-swift asserts."""
    with pytest.raises(ConfigError, match="soft_cache_length: is missing"):
        imported(tmp_path, "{" + BASE.replace("accuracy", "soft_overlong") + ", per_device_train_batch_size: 8}")


def test_other_commands_than_grpo_are_refused(tmp_path: Path) -> None:
    """Two commands of training too."""
    with pytest.raises(ConfigError, match="rlhf_type: dpo is no reinforcement learning"):
        imported(tmp_path, "swift rlhf --rlhf_type dpo --model a/b")
    with pytest.raises(ConfigError, match="has 2 commands"):
        imported(tmp_path, "swift rlhf --rlhf_type grpo\nswift rlhf --rlhf_type grpo")
    with pytest.raises(ConfigError, match="has no command"):
        imported(tmp_path, "swift infer --model a/b")


def test_a_number_of_processes_that_only_a_shell_knows_is_asked_for(tmp_path: Path) -> None:
    """And taken as one, with a note, where swift itself starts one."""
    text = "NPROC_PER_NODE=$GPUS swift rlhf --rlhf_type grpo --model a/b --dataset x --reward_funcs accuracy"
    job = imported(tmp_path, text + " --per_device_train_batch_size 8", options=Options(rows=10, data=Path("r")))
    assert {question.target for question in job.report.questions} == {
        *("trainer.num_ranks", "packer.groups_per_step"),
    }
    assert job.run.get("trainer.max_epochs") == 3.0
    check_only_missing(job)
    one = imported(tmp_path, text.partition(" ")[2] + " --per_device_train_batch_size 8", options=Options(rows=10))
    assert one.run.get("trainer.num_ranks") == 1
    assert any("no NPROC_PER_NODE" in note for note in one.report.notes)
    torchrun = text.replace("NPROC_PER_NODE=$GPUS swift", "torchrun --nproc_per_node=4 --nnodes 2 swift/cli/rlhf.py #")
    torchrun = torchrun.replace("# rlhf", "")
    many = imported(tmp_path, torchrun + " --per_device_train_batch_size 8 # swift ", options=Options(rows=10))
    assert many.run.get("trainer.num_ranks") == 8


def test_a_shell_is_read_as_bash_would() -> None:
    """Quotes, comments, continued lines, defaults, here documents, redirections, conditions."""
    text = r"""
A=one; B="two $A"
if [ -d x ]; then
  export C=three
fi
cat <<'END' > file
swift rlhf --no
END
X=1 run --a "$B" '$B' ${D:-four} ${A}s \
    --b=$(date "+%s") a/b#10 # a comment with 'one quote
nohup run2 --c "#no comment" "\$A" > log.txt 2>&1 &
"""
    found = {command.words[0]: command for command in commands(text, Path("x.sh"))}
    assert found["run"].words == ["run", "--a", "two one", "$B", "four", "ones", f"--b={UNKNOWN}", "a/b#10"]
    assert found["run"].environment == {"C": "three", "X": "1"}
    assert found["run2"].words == ["run2", "--c", "#no comment", "$A"]
    assert "swift" not in found
    with pytest.raises(ConfigError, match="No closing quotation"):
        list(commands("run --a 'open", Path("x.sh")))


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    """A command substitution stays a text."""
    victim = tmp_path / "victim"
    victim.write_text("")
    text = f"swift rlhf --rlhf_type grpo --model $(rm {victim}) --dataset `rm {victim}` --reward_funcs accuracy"
    job = imported(tmp_path, text + " --per_device_train_batch_size 8")
    assert victim.exists()
    check_verdicts(job, {"model": "refused", "dataset": "refused"})


_VALUES: dict[type, Any] = {
    bool: st.booleans(),
    int: st.sampled_from([0, 1, 2, 8, "4"]),
    float: st.sampled_from([0.0, 0.1, 1.0, 3.0, "1e-5"]),
    str: st.sampled_from(["none", "dapo", "steps", "full", "x"]),
}


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Random subsets of known keys, with values of their type or the default."""
    keys = draw(st.lists(st.sampled_from(sorted(set(DEFAULTS) - {"rlhf_type"})), unique=True, max_size=25))
    others = st.sampled_from([None, 1, "x", ["x"], "a.jsonl"])
    return {key: draw(st.just(DEFAULTS[key]) | _VALUES.get(type(DEFAULTS[key]), others)) for key in keys}


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=configurations(), options=st.sampled_from([COMPLETE, Options(), Options(version="3.5", world=2)]))
def test_any_known_keys_are_reported_once_or_refused_in_words(
    tmp_path: Path, values: dict[str, Any], options: Options
) -> None:
    """No exception but a refusal of the origin's."""
    values = {"rlhf_type": "grpo", "per_device_train_batch_size": 8} | values
    (tmp_path / "any.yaml").write_text(yaml.safe_dump(values))
    with contextlib.suppress(ConfigError):
        check_each_key_once(read([tmp_path / "any.yaml"], [], options), values)


@pytest.mark.parametrize(
    ("keys", "verdict", "sync"),
    [
        ("beta: 0.04, tuner_type: full", "converted", {"every_steps": 128, "alpha": 0.6}),
        ("beta: 0.04, tuner_type: full, ref_model_sync_steps: 8", "converted", {"every_steps": 2, "alpha": 0.6}),
        ("beta: 0, tuner_type: full", "irrelevant", None),
        ("beta: 0.04, tuner_type: lora", "refused", None),
    ],
)
def test_the_reference_follows_the_policy_as_in_ms_swift(tmp_path: Path, keys: str, verdict: str, sync: Any) -> None:
    """A step has four updates: 512 ÷ 4 = 128."""
    text = f"""{{rlhf_type: grpo, model: m, sync_ref_model: true, {keys}, max_steps: 100, num_generations: 8,
        per_device_train_batch_size: 8, gradient_accumulation_steps: 1, steps_per_generation: 4, output_dir: out,
        dataset: rows.jsonl, reward_funcs: [accuracy]}}"""
    job = imported(tmp_path, text)
    check_verdicts(job, {"sync_ref_model": verdict})
    every, alpha = (job.run.get(f"trainer.reference.sync.{key}") for key in ("every_steps", "alpha"))
    assert ({"every_steps": every, "alpha": alpha} if every else None) == sync


@pytest.mark.parametrize(
    ("keys", "verdicts", "values"),
    [
        ("push_to_hub: true, use_hf: true, hub_model_id: me/x, hub_private_repo: true",
         {"push_to_hub": "converted", "hub_model_id": "taken", "hub_private_repo": "taken"},
         {"push_to_hub.hub_model_id": "me/x", "push_to_hub.hub_private_repo": True}),
        ("push_to_hub: true, hub_model_id: me/x", {"push_to_hub": "refused", "hub_model_id": "irrelevant"},
         {"push_to_hub": None}),
        ("push_to_hub: false", {"push_to_hub": "irrelevant"}, {"push_to_hub": None}),
        ("hub_token: hf_abcdefgh", {"hub_token": "refused"}, {"push_to_hub": None}),
        ("early_stop_interval: 3, per_device_eval_batch_size: 8, val_dataset: [a/c], metric_for_best_model: reward",
         {"early_stop_interval": "converted", "metric_for_best_model": "taken"},
         {"callbacks.0.path": "transformers:EarlyStoppingCallback",
          "callbacks.0.kwargs": {"early_stopping_patience": 3}, "eval.metric_for_best_model": "reward"}),
        ("early_stop_interval: 3", {"early_stop_interval": "refused"}, {"callbacks": []}),
        ("callbacks: [early_stop]", {"callbacks": "irrelevant"}, {"callbacks": []}),
        ("callbacks: [perf_log, graceful_exit]", {"callbacks": "irrelevant"}, {"callbacks": []}),
        ("callbacks: [lisa]", {"callbacks": "refused"}, {"callbacks": []}),
        ("callbacks: [my_own]", {"callbacks": "refused"}, {"callbacks": []}),
        ("callbacks: []", {"callbacks": "irrelevant"}, {"callbacks": []}),
    ],
)  # fmt: skip
def test_uploads_and_callbacks(tmp_path: Path, keys: str, verdicts: dict[str, str], values: dict[str, Any]) -> None:
    """Uploads go to ModelScope unless use_hf; of callbacks by name, early stopping has a counterpart."""
    job = imported(tmp_path, f"{{{BASE}, per_device_train_batch_size: 8, max_steps: 40, {keys}}}")
    check_verdicts(job, verdicts)
    job.run.remove("environments.0.eval_path")
    check_values(job, values)
    assert "hf_abcdefgh" not in "".join(job.report.lines())
