"""Configurations of prime-rl from autumn 2025 to August 2026, with the values that its code derives from them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.imports.command import sort_words
from actors.imports.job import Import, Options
from actors.imports.keys import flat
from actors.imports.prime_rl import WHOLE, read
from actors.imports.prime_rl.files import read_tree, value_of
from actors.imports.prime_rl.names import KEYS
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_each_key_once, check_only_missing, check_values, check_verdicts


@dataclass(frozen=True)
class Case:
    """Configuration with the values and verdicts of its import."""

    text: str
    values: dict[str, Any]
    verdicts: dict[str, str]
    options: Options = field(default_factory=Options)
    words: tuple[str, ...] = ()


def imported(folder: Path, text: str, words: tuple[str, ...] = (), options: Options = Options()) -> Import:  # noqa: B008
    """Import the text of one file."""
    (folder / "rl.toml").write_text(text)
    return read([folder / "rl.toml"], words, options)


SOURCE = '[[orchestrator.train.source]]\nenv.taskset.id = "math-v1"\n'

CASES = {
    # 128 completions ÷ 16 = 8 groups; concurrency.max_inflight 1024 ÷ 16 = 64; nccl by default, without LoRA
    "smallest": Case(
        """
max_steps = 20
seq_len = 2048
[model]
name = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.source]]
name = "reverse-text"
env.taskset.id = "reverse-text"
env.agent.harness.id = "null"
env.agent.runtime.type = "subprocess"
[trainer.optim]
lr = 3e-6
[ckpt]
[inference]
""",
        {
            "model.path": "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT",
            "model.gradient_checkpointing": True,
            "model.compile": True,
            "environments.0.type": "verifiers_v1",
            "environments.0.name": "reverse-text",
            "environments.0.options": {"id": "reverse-text"},
            "environments.0.weight": None,
            "packer.groups_per_step": 8,
            "packer.sequence_len": 2048,
            "packer.max_async_level": 1,
            "packer.max_off_policy_steps": 8,
            "packer.filter_zero_advantages": True,
            "packer.order": "ordinal",
            "rollout.group_size": 16,
            "rollout.max_tokens": 128,
            "rollout.temperature": 1.0,
            "rollout.max_concurrent_groups": 64,
            "reward.advantage": {"type": "mean"},
            "reward.filters": [],
            "trainer.max_steps": 20,
            "trainer.loss.type": "dppo",
            "trainer.loss.dppo_mask_low": 0.2,
            "trainer.loss.kl_tau": 1e-3,
            "trainer.learning_rate": 3e-6,
            "trainer.lr_scheduler": "constant",
            "trainer.optimizer.weight_decay": 0.01,
            "trainer.max_grad_norm": 1.0,
            "trainer.checkpoint.interval_share": 1.0,
            "trainer.num_ranks": 1,
            "trainer.sharding": "none",
            "inference.engine.type": "vllm",
            "weights.channel": "rendezvous",
            "eval.num_prompts": 0,
        },
        {
            "max_steps": "taken",
            "seq_len": "renamed",
            "model.name": "renamed",
            "orchestrator.batch_size": "converted",
            "orchestrator.group_size": "taken",
            "orchestrator.train.source.0.name": "taken",
            "orchestrator.train.source.0.env.taskset.id": "converted",
            "orchestrator.train.source.0.env.agent.harness.id": "irrelevant",
            "trainer.optim.lr": "renamed",
            "ckpt": "converted",
            "inference": "irrelevant",
        },
    ),
    # February 2026: rollouts_per_example, one list of env, the masked loss, and evaluation of a trained environment.
    # 512 ÷ 16 = 32 groups; in flight 512 · 1.5 ÷ 16 = 48; steps take groups as they come with oversampling.
    # min_lr 1e-7 ÷ 1e-6 = 0.1; two GPUs train, so the weights are shared out; 6 ÷ 2 = 3 copies of the model.
    "february": Case(
        """
trainer_gpu_ids = [6, 7]
inference_gpu_ids = [0, 1, 2, 3, 4, 5]
max_steps = 100
[model]
name = "PrimeIntellect/Qwen3-1.7B"
[trainer.model.ac]
freq = 1
[trainer.scheduler]
type = "cosine"
warmup_steps = 5
min_lr = 1e-7
[trainer.loss]
ratio_type = "sequence"
token_mask_high = 6.0
geo_mask_low = 0.2
[orchestrator]
batch_size = 512
rollouts_per_example = 16
oversampling_factor = 1.5
max_async_level = 2
seq_len = 4096
[orchestrator.sampling]
max_tokens = 512
[orchestrator.sampling.temp_scheduler]
type = "cosine"
start_temperature = 1.0
end_temperature = 0.7
[[orchestrator.env]]
id = "primeintellect/alphabet-sort@0.1.8"
name = "sort"
args = { min_turns = 2, max_turns = 2 }
[orchestrator.buffer]
easy_threshold = 0.9
hard_threshold = 0.1
easy_fraction = 0.2
online_difficulty_filtering = true
env_ratios = [1.0]
[orchestrator.advantage]
length_weighted_mean = true
[[orchestrator.filters]]
type = "gibberish"
enforce = true
[orchestrator.eval]
interval = 20
[[orchestrator.eval.env]]
id = "primeintellect/alphabet-sort@0.1.8"
num_examples = 64
rollouts_per_example = 4
[orchestrator.eval.sampling]
temperature = 0.6
[ckpt]
interval = 25
keep_last = 1
[inference.parallel]
tp = 2
dp = 3
""",
        {
            "seed": 42,
            "model.gradient_checkpointing": True,
            "model.compile": False,
            "environments.0.type": "verifiers",
            "environments.0.name": "sort",
            "environments.0.options": {
                "id": "primeintellect/alphabet-sort", "args": {"min_turns": 2, "max_turns": 2},
            },
            "environments.0.weight": 1.0,
            "packer.groups_per_step": 32,
            "packer.sequence_len": 2048,
            "packer.order": "arrival",
            "packer.oversampling_factor": 1.5,
            "packer.max_async_level": 2,
            "packer.filter_zero_advantages": False,
            "packer.online_difficulty_filtering": True,
            "packer.pools.easy_threshold": 0.9,
            "packer.pools.hard_threshold": 0.1,
            "packer.pools.easy_fraction": 0.2,
            "rollout.group_size": 16,
            "rollout.max_tokens": 512,
            "rollout.max_concurrent_groups": 48,
            "rollout.temperature": 1.0,
            "rollout.temperature_schedule.type": "cosine",
            "rollout.temperature_schedule.end": 0.7,
            "rollout.temperature_schedule.steps": None,
            "reward.advantage": {"type": "length_weighted_mean"},
            "trainer.loss.type": "surogate",
            "trainer.loss.ratio_type": "sequence",
            "trainer.loss.token_mask_low": 0.125,
            "trainer.loss.token_mask_high": 6.0,
            "trainer.loss.geo_mask_low": 0.2,
            "trainer.loss.sequence_mask_high": 100.0,
            "trainer.loss.kl_tau": 0.0,
            "trainer.loss.compat.sequence_normalizer": "micro_batches",
            "trainer.lr_scheduler": "cosine",
            "trainer.warmup_steps": 5,
            "trainer.min_lr_ratio": pytest.approx(0.1),
            "trainer.num_ranks": 2,
            "trainer.sharding": "fsdp",
            "trainer.checkpoint.interval": 25,
            "trainer.checkpoint.keep_last": 1,
            "trainer.lr_schedule.first": 0,
            "inference.engine.tensor_parallel_size": 2,
            "inference.engine.data_parallel_size": 3,
            "weights.channel": "filesystem",
            "eval.every_steps": 20,
            "eval.num_prompts": 64,
            "eval.completions_per_prompt": 4,
            "eval.temperature": 0.6,
            "eval.at_start": True,
            "eval.at_end": True,
            "eval.exact_match": None,
        },
        {
            "orchestrator.rollouts_per_example": "renamed",
            "orchestrator.sampling.max_tokens": "taken",
            "orchestrator.sampling.temp_scheduler.start_temperature": "renamed",
            "orchestrator.env.0.id": "converted",
            "orchestrator.env.0.args": "converted",
            "orchestrator.seq_len": "irrelevant",
            "orchestrator.filters.0.type": "converted",
            "orchestrator.buffer.env_ratios": "converted",
            "trainer.scheduler.min_lr": "converted",
            "trainer.loss.geo_mask_low": "taken",
            "trainer_gpu_ids": "converted",
            "inference.parallel.tp": "renamed",
            "ckpt.keep_last": "taken",
        },
    ),
    # Adapters and two environments: 1024 ÷ 8 = 128 groups; equal shares by default; files, since vLLM reads adapters
    # from files; 2048 new tokens leave no room for a prompt in 2048, so 2047.
    "adapters": Case(
        """
max_steps = 200
output_dir = "outputs"
[run]
name = "two-tasks"
[model]
name = "Qwen/Qwen3-4B-Instruct-2507"
[deployment]
num_train_gpus = 4
num_infer_gpus = 4
[trainer.model.lora]
rank = 8
alpha = 16
target_modules = ["q_proj", "v_proj", "experts"]
[trainer.model]
optim_cpu_offload = true
ep = 1
cp = 2
[trainer.optim]
type = "muon"
lr = 1e-5
mu = 0.9
[orchestrator]
batch_size = 1024
group_size = 8
[orchestrator.concurrency]
max_inflight = 500
[orchestrator.train.sampling]
temperature = 0.8
max_completion_tokens = 2048
extra_body = { top_p = 0.95, top_k = -1, min_tokens = 2, stop = "END", chat_template_kwargs = { think = false } }
[[orchestrator.train.source]]
name = "search"
env.taskset = { id = "wiki-search", corpus = "small" }
env.agent = { harness = { id = "tool" }, max_turns = 6 }
curriculum.gates.solved = { type = "advantage_range", reject_min = 0.0, reject_max = 0.0 }
[[orchestrator.train.source]]
env.taskset.id = "math-v1"
[ckpt]
interval = 50
[monitors.wandb]
project = "two"
[inference.vllm]
tensor_parallel_size = 2
max_loras = 4
gpu_memory_utilization = 0.8
max_num_seqs = 128
tool_call_parser = "hermes"
""",
        {
            "name": "two-tasks",
            "telemetry.trackers.0.type": "wandb",
            "telemetry.trackers.0.project": "two",
            "telemetry.names": "prime-rl",
            "output_dir": "outputs/two-tasks",
            "model.lora.rank": 8,
            "model.lora.alpha": 16,
            "model.lora.target_modules": ["q_proj", "v_proj"],
            "environments.0.options": {
                "id": "wiki-search", "taskset": {"corpus": "small"},
                "environment": {"agent": {"harness": {"id": "tool"}, "max_turns": 6}},
            },
            "environments.0.max_turns": 6,
            "environments.0.weight": 1.0,
            "environments.1.name": "math-v1",
            "environments.1.weight": 1.0,
            "packer.groups_per_step": 128,
            "packer.sequence_len": 2048,
            "packer.dynamic_sampling": True,
            "rollout.max_concurrent_groups": 63,
            "rollout.max_tokens": 2047,
            "rollout.temperature": 0.8,
            "rollout.top_p": 0.95,
            "rollout.top_k": 0,
            "rollout.min_tokens": 2,
            "rollout.stop": ["END"],
            "environments.0.chat_template_kwargs": {"think": False},
            "environments.1.chat_template_kwargs": {"think": False},
            "trainer.optimizer.type": "muon",
            "trainer.optimizer.momentum": 0.9,
            "trainer.optimizer.beta2": 0.95,
            "trainer.num_ranks": 4,
            "trainer.sharding": "fsdp",
            "trainer.checkpoint.interval": 50,
            "trainer.checkpoint.keep_last": None,
            "inference.engine.data_parallel_size": 2,
            "inference.engine.max_loras": 4,
            "inference.engine.tool_call_parser": "hermes",
            "inference.engine.extra_args": ["--max-num-seqs", "128"],
            "weights.channel": "filesystem",
        },
        {
            "trainer.model.cp": "renamed",
            "trainer.model.ep": "irrelevant",
            "trainer.model.optim_cpu_offload": "irrelevant",
            "trainer.model.lora.target_modules": "converted",
            "orchestrator.concurrency.max_inflight": "converted",
            "orchestrator.train.sampling.max_completion_tokens": "converted",
            "orchestrator.train.source.0.env.agent.harness.id": "converted",
            "orchestrator.train.source.0.curriculum.gates.solved.reject_min": "converted",
            "monitors.wandb.project": "converted",
            "run.name": "taken",
        },
    ),
    # Several nodes: 4 · 8 = 32 ranks; 3 · 2 servers of 8 ÷ 4 = 2 copies. A linear schedule falls over the last steps.
    # ipo has one bound for both sides.
    "nodes": Case(
        f"""
max_steps = 200
seq_len = 32768
[slurm]
job_name = "math"
[deployment]
type = "multi_node"
num_train_nodes = 4
num_infer_nodes = 3
num_infer_replicas = 2
[weight_broadcast]
type = "nccl"
[trainer.scheduler]
type = "linear"
warmup_steps = 20
decay_steps = 180
[trainer.loss]
type = "ipo"
ipo_threshold = 0.15
[trainer.optim]
max_norm = 0.5
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 16
[orchestrator.algo]
type = "max_rl"
{SOURCE}[orchestrator.eval]
interval = 25
[[orchestrator.eval.source]]
name = "aime"
env.taskset.id = "aime25"
group_size = 16
[inference.vllm]
tensor_parallel_size = 4
""",
        {
            "model.path": "Qwen/Qwen3-0.6B",
            "packer.groups_per_step": 32,
            "packer.max_off_policy_steps": 16,
            "rollout.max_tokens": 32767,
            "reward.advantage": {"type": "max_rl", "eps": 0.0},
            "trainer.num_ranks": 32,
            "trainer.lr_scheduler": "warmup_stable_decay",
            "trainer.lr_schedule.decay_steps": 180,
            "trainer.lr_schedule.decay_type": "linear",
            "trainer.lr_schedule.first": 0,
            "trainer.warmup_steps": 20,
            "trainer.min_lr_ratio": 0.0,
            "trainer.max_grad_norm": 0.5,
            "trainer.loss.type": "ipo",
            "trainer.loss.ipo_mask_low": 0.15,
            "trainer.loss.ipo_mask_high": 0.15,
            "trainer.loss.ratio_clip": None,
            "trainer.loss.kl_tau": 1e-3,
            "up.inference": 6,
            "inference.engine.data_parallel_size": 2,
            "weights.channel": "rendezvous",
            "eval.num_prompts": 0,
        },
        {
            "slurm.job_name": "refused",
            "deployment.num_train_nodes": "converted",
            "weight_broadcast.type": "converted",
            "trainer.scheduler.type": "converted",
            "trainer.loss.ipo_threshold": "converted",
            "orchestrator.algo.type": "converted",
            "orchestrator.eval.interval": "refused",
            "orchestrator.eval.source.0.env.taskset.id": "refused",
        },
    ),
    # March 2026: bounds on both sides and a teacher; words of the command line take precedence. Without decay_steps the
    # last 10 steps fall.
    "march": Case(
        """
max_steps = 60
[trainer.loss]
ipo_mask_low = 0.3
teacher_tau = 0.5
[trainer.scheduler]
type = "linear"
[orchestrator]
rollouts_per_example = 4
[orchestrator.teacher_model.model]
name = "Qwen/Qwen3-8B"
[orchestrator.teacher_model.client]
base_url = ["http://a:8000/v1", "http://b:8000/v1"]
[[orchestrator.env]]
id = "gsm8k"
[orchestrator.sampling]
max_tokens = 1024
[orchestrator.ckpt]
[wandb]
""",
        {
            "trainer.max_steps": 30,
            "trainer.loss.type": "ipo",
            "trainer.loss.ipo_mask_low": 0.3,
            "trainer.loss.ipo_mask_high": 0.2,
            "trainer.loss.teacher_tau": 0.5,
            "trainer.loss.ratio_clip": None,
            "trainer.teacher.path": "Qwen/Qwen3-8B",
            "trainer.lr_scheduler": "warmup_stable_decay",
            "trainer.lr_schedule.decay_steps": 10,
            "trainer.warmup_steps": 10,
            "trainer.checkpoint.interval_share": 1.0,
            "trainer.max_grad_norm": None,
            "packer.groups_per_step": 32,
            "rollout.max_tokens": 512,
            "reward.filters.0.type": "gibberish",
            "reward.filters.1.type": "repetition",
        },
        {
            "trainer.optim.max_norm": "converted",
            "orchestrator.teacher_model.model.name": "renamed",
            "orchestrator.teacher_model.client.base_url": "refused",
            "trainer.scheduler.type": "converted",
            "wandb": "converted",
        },
        Options(version="2026-03"),
        ("--max-steps", "30", "--orchestrator.sampling.max-tokens", "512", "--trainer.optim.max-norm", "None"),
    ),
    # Distillation by the policy's own samples: the loss reads a teacher, and advantages of 0 stay. All sources agree on
    # one group size of their own; 256 ÷ 8 = 32. Without keep_last all checkpoints are kept.
    "distillation": Case(
        """
max_steps = 50
[orchestrator]
batch_size = 256
[orchestrator.algo]
type = "opd"
teacher = { name = "Qwen/Qwen3-32B", base_url = ["http://teacher:8000/v1"] }
[orchestrator.train.sampling]
max_completion_tokens = 700
[[orchestrator.train.source]]
name = "a"
env.taskset.id = "a-v1"
group_size = 8
ratio = 3
[[orchestrator.train.source]]
name = "b"
env.taskset.id = "b-v1"
group_size = 8
ratio = 1
[trainer.model]
ac = "None"
attn = "flash_attention_3"
[ckpt]
interval = 10
keep_last = 3
keep_interval = 20
[log]
level = "warn"
""",
        {
            "trainer.loss.type": "ref_kl",
            "trainer.teacher.path": "Qwen/Qwen3-32B",
            "trainer.teacher_server.url": "http://teacher:8000",
            "packer.filter_zero_advantages": False,
            "packer.groups_per_step": 32,
            "rollout.group_size": 8,
            "environments.0.weight": 3,
            "environments.1.weight": 1,
            "model.gradient_checkpointing": False,
            "model.attention": "flash",
            "trainer.checkpoint.keep_last": 3,
            "trainer.checkpoint.keep_interval": 20,
            "telemetry.log_level": "warning",
            "weights.channel": "filesystem",
        },
        {
            "orchestrator.train.source.0.ratio": "renamed",
            "orchestrator.train.source.0.group_size": "converted",
            "orchestrator.algo.teacher.name": "renamed",
            "orchestrator.algo.teacher.base_url": "converted",
            "log.level": "converted",
        },
    ),
    # Autumn 2025: one environment, adapters as an experiment, rows of micro_batch_size, the loss with masks.
    # 512 ÷ 8 = 64 groups; in flight 512 ÷ 8 = 64.
    "autumn": Case(
        """
max_steps = 100
[ckpt]
[model]
name = "Qwen/Qwen3-4B-Instruct-2507"
[trainer.model]
impl = "liger_kernel"
[trainer.model.ac]
freq = 1
[trainer.model.experimental.lora]
rank = 16
alpha = 64
target_modules = ["q_proj", "v_proj"]
[trainer.weight_broadcast]
adapter_only = true
[trainer.optim]
lr = 1e-5
[orchestrator]
batch_size = 512
micro_batch_size = 8
rollouts_per_example = 8
seq_len = 2048
lora_name = "r16-64-1e-5"
async_level = 2
mask_truncated_completions = true
[orchestrator.sampling]
max_tokens = 768
[orchestrator.environment]
id = "alphabet-sort"
[orchestrator.environment.args]
min_turns = 3
max_turns = 3
[inference]
enable_lora = true
""",
        {
            "model.lora.rank": 16,
            "model.lora.alpha": 64,
            "model.lora.target_modules": ["q_proj", "v_proj"],
            "environments.0.type": "verifiers",
            "environments.0.options": {"id": "alphabet-sort", "args": {"min_turns": 3, "max_turns": 3}},
            "packer.groups_per_step": 64,
            "packer.max_async_level": 2,
            "packer.sequence_len": 2048,
            "rollout.group_size": 8,
            "rollout.max_concurrent_groups": 64,
            "rollout.max_tokens": 768,
            "reward.mask_truncated_completions": True,
            "trainer.loss.type": "surogate",
            "trainer.loss.kl_tau": 0.0,
            "trainer.checkpoint.interval_share": 1.0,
            "weights.channel": "filesystem",
            "eval.num_prompts": 0,
        },
        {
            "trainer.model.experimental.lora.rank": "taken",
            "orchestrator.environment.id": "converted",
            "orchestrator.environment.args": "converted",
            "orchestrator.micro_batch_size": "irrelevant",
            "orchestrator.lora_name": "irrelevant",
            "orchestrator.async_level": "renamed",
        },
    ),
    # Filters with an action: zero advantages before the batch are replaced, after the batch left out.
    # Nodes have 8 GPUs: 2 · 8 = 16 ranks, 2 · 8 ÷ 8 = 2 engines; 32768 tokens leave no room for a prompt.
    "actions": Case(
        """
max_steps = 60
seq_len = 32768
[model]
name = "Qwen/Qwen3-30B-A3B-Thinking-2507"
[weight_broadcast]
type = "nccl"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 2
[ckpt]
interval = 100
[trainer.model]
impl = "custom"
attn = "flash_attention_3"
ep = 8
[trainer.optim]
type = "muon"
lr = 1e-6
[orchestrator]
batch_size = 512
group_size = 8
oversampling_factor = 2
[orchestrator.train.sampling]
max_completion_tokens = 32768
[[orchestrator.train.env]]
name = "math"
env.taskset = { id = "i3_math_v1" }
[[orchestrator.pre_batch_filters]]
type = "zero_advantage"
action = "drop"
[[orchestrator.pre_batch_filters]]
type = "gibberish"
action = "monitor"
[[orchestrator.post_batch_filters]]
type = "zero_advantage"
action = "monitor"
[orchestrator.prime_monitor]
[orchestrator.renderer]
name = "default"
[inference.parallel]
tp = 8
""",
        {
            "packer.dynamic_sampling": True,
            "packer.filter_zero_advantages": False,
            "packer.groups_per_step": 64,
            "packer.oversampling_factor": 2,
            "packer.order": "arrival",
            "rollout.max_tokens": 32767,
            "trainer.num_ranks": 16,
            "up.inference": 2,
            "inference.engine.tensor_parallel_size": 8,
            "trainer.optimizer.type": "muon",
            "weights.channel": "rendezvous",
            "reward.filters.0.enforce": False,
            "reward.filters.1.enforce": False,
            "trainer.checkpoint.interval": 100,
        },
        {
            "orchestrator.pre_batch_filters.0.action": "converted",
            "orchestrator.post_batch_filters.0.action": "converted",
            "orchestrator.prime_monitor": "irrelevant",
            "orchestrator.renderer.name": "refused",
            "trainer.model.ep": "renamed",
        },
    ),
    # The filter of March 2026 leaves completions out of the loss; evaluations of another environment have no place.
    "march-filter": Case(
        """
max_steps = 30
seq_len = 4096
[orchestrator]
batch_size = 64
rollouts_per_example = 8
[[orchestrator.filters]]
type = "zero_advantage"
[orchestrator.sampling]
max_tokens = 512
temperature = 0.7
[[orchestrator.env]]
id = "math-env"
[orchestrator.eval]
interval = 5
[[orchestrator.eval.env]]
id = "aime2025"
[trainer.scheduler]
type = "linear"
warmup_steps = 0
decay_steps = 30
[trainer.optim]
max_norm = 0.5
""",
        {
            "packer.filter_zero_advantages": True,
            "packer.dynamic_sampling": False,
            "rollout.temperature": 0.7,
            "eval.num_prompts": 0,
            "trainer.max_grad_norm": 0.5,
            "packer.groups_per_step": 8,
        },
        {"orchestrator.eval.env.0.id": "refused", "orchestrator.filters.0.type": "converted"},
        words=("--trainer.loss.ipo-mask-low", "0.3"),
    ),
    # A gate on advantages; inference with six of eight GPUs; the tool parser is an argument of the server.
    "gates": Case(
        """
max_steps = 200
seq_len = 4096
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[model]
name = "Qwen/Qwen3-4B-Instruct-2507"
[trainer.optim]
lr = 1e-5
weight_decay = 0.0
[trainer.model.lora]
rank = 8
dropout = 0.0
[orchestrator]
batch_size = 512
[orchestrator.train]
group_size = 16
[orchestrator.concurrency]
initial_inflight = 1024
[orchestrator.train.sampling]
max_completion_tokens = 512
[[orchestrator.train.source]]
name = "wiki-search"
curriculum = { gates = { zero_advantage = { type = "advantage_range" } } }
env.taskset.id = "wiki-search"
[inference.vllm]
tool_call_parser = "hermes"
""",
        {
            "packer.dynamic_sampling": True,
            "packer.groups_per_step": 32,
            "rollout.group_size": 16,
            "model.lora.rank": 8,
            "model.lora.alpha": 32,
            "trainer.num_ranks": 2,
            "trainer.sharding": "fsdp",
            "inference.engine.data_parallel_size": 6,
            "weights.channel": "filesystem",
            "trainer.optimizer.weight_decay": 0.0,
            "inference.engine.tool_call_parser": "hermes",
            "rollout.max_concurrent_groups": 64,
        },
        {"orchestrator.train.group_size": "taken", "orchestrator.concurrency.initial_inflight": "irrelevant"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_real_configuration_has_the_values_of_the_origin(name: str, tmp_path: Path) -> None:
    """The file passes the checks, and each key of the input is reported once."""
    case = CASES[name]
    job = imported(tmp_path, case.text, case.words, case.options)
    check_values(job, case.values)
    check_verdicts(job, case.verdicts)
    tree, _ = read_tree([tmp_path / "rl.toml"], case.words)
    check_each_key_once(job, flat(tree, WHOLE))


def test_three_files_of_three_processes_are_one_run(tmp_path: Path) -> None:
    """In any order; ranks are in none of them, and are asked for unless the command line says them."""
    (tmp_path / "infer.toml").write_text("[parallel]\ntp = 2\ndp = 4\n[model]\nname = 'Qwen/Qwen3-1.7B'\n")
    (tmp_path / "train.toml").write_text("max_steps = 9\n[model]\nname = 'Qwen/Qwen3-1.7B'\n[optim]\nlr = 2e-6\n")
    (tmp_path / "orch.toml").write_text(
        "max_steps = 9\nbatch_size = 64\nrollouts_per_example = 8\n[model]\nname = 'Qwen/Qwen3-1.7B'\n"
        "[sampling]\nmax_tokens = 256\n[[env]]\nid = 'gsm8k'\n"
    )
    files = [tmp_path / name for name in ("infer.toml", "orch.toml", "train.toml")]
    job = read(files, [], Options())
    assert [question.target for question in job.report.questions] == ["trainer.num_ranks"]
    job = read(files, [], Options(world=4))
    check_values(job, {
        "model.path": "Qwen/Qwen3-1.7B", "trainer.max_steps": 9, "trainer.learning_rate": 2e-6, "trainer.num_ranks": 4,
        "packer.groups_per_step": 8, "inference.engine.data_parallel_size": 4, "trainer.loss.type": "surogate",
    })  # fmt: skip
    check_verdicts(job, {"trainer.model.name": "renamed", "orchestrator.model.name": "irrelevant"})


def test_routers_and_divided_experts_are_converted_and_layers_not_compiled(tmp_path: Path) -> None:
    """The engine here is asked for experts by the trainer's key alone. Its head in float32 is the trainer's too."""
    (tmp_path / "run.toml").write_text(
        "max_steps = 9\n[trainer]\nenable_router_replay = true\n[trainer.model]\nname = 'm'\nep = 2\n"
        "[trainer.model.compile]\n[orchestrator]\nbatch_size = 64\nrollouts_per_example = 8\n"
        "[orchestrator.sampling]\nmax_tokens = 256\n[[orchestrator.env]]\nid = 'gsm8k'\n"
        "[inference]\nenable_return_routed_experts = true\nenable_fp32_lm_head = true\n"
        "[deployment]\ntype = 'single_node'\nnum_train_gpus = 4\nnum_infer_gpus = 4\n"
    )
    job = read([tmp_path / "run.toml"], [], Options())
    check_values(job, {
        "trainer.router_replay": True, "model.head_dtype": "float32", "trainer.expert_parallel": 2,
        "trainer.num_ranks": 4, "model.compile": False, "inference.engine.extra_args": [],
    })  # fmt: skip
    check_verdicts(job, {
        "trainer.enable_router_replay": "renamed", "trainer.model.ep": "renamed",
        "inference.enable_fp32_lm_head": "converted",
    })  # fmt: skip
    assert any("layers are not compiled" in note for note in job.report.notes)


def test_a_file_includes_others_and_words_mount_files(tmp_path: Path) -> None:
    """The including file takes precedence, and words of the command line over all files."""
    (tmp_path / "base.toml").write_text(f"max_steps = 5\n[orchestrator]\nbatch_size = 32\ngroup_size = 4\n{SOURCE}")
    (tmp_path / "top.toml").write_text("toml_files = ['base.toml']\nmax_steps = 7\n")
    (tmp_path / "train.toml").write_text("[optim]\nlr = 4e-6\n")
    words = [
        "@",
        str(tmp_path / "top.toml"),
        "--trainer",
        "@",
        str(tmp_path / "train.toml"),
        "--orchestrator.group-size=8",
    ]
    job = read(*sort_words(words), Options())
    check_values(job, {"trainer.max_steps": 7, "trainer.learning_rate": 4e-6, "packer.groups_per_step": 4})


def test_the_time_of_the_defaults_is_told_by_names_or_by_the_user(tmp_path: Path) -> None:
    """Old names bring the loss of their time; the command line overrules them."""
    text = "max_steps = 3\n[[orchestrator.env]]\nid = 'gsm8k'\n"
    job = imported(tmp_path, text)
    assert job.report.origin == "prime-rl 2026-02"
    assert any("orchestrator.env.0.id" in note for note in job.report.notes)
    assert job.run.get("trainer.loss.type") == "surogate"
    assert imported(tmp_path, text, options=Options(version="2026-08-21")).run.get("trainer.loss.type") == "dppo"
    assert imported(tmp_path, text, options=Options(version="2026-04")).run.get("trainer.loss.type") == "ipo"
    assert imported(tmp_path, f"max_steps = 3\n{SOURCE}").report.origin == "prime-rl 2026-08"


def test_what_no_file_says_is_asked_for(tmp_path: Path) -> None:
    """A run without end, without environments, with tokens in the place of completions."""
    job = imported(tmp_path, "[orchestrator]\ntoken_batch_size = 65536\n[run]\nname = 'x'\n")
    asked = {question.target for question in job.report.questions}
    assert asked == {"trainer.max_steps", "environments", "packer.groups_per_step"}
    check_only_missing(job)


def test_rows_and_a_reward_of_the_user_take_the_place_of_the_environment(tmp_path: Path) -> None:
    """With --data alone the reward is asked for."""
    options = Options(data=Path("rows.jsonl"), reward="rewards.py:score")
    job = imported(tmp_path, f"max_steps = 3\n{SOURCE}", options=options)
    check_values(job, {"environments.0.type": "jsonl", "environments.0.path": "rows.jsonl",
                       "reward.functions.0.path": "rewards.py:score"})  # fmt: skip
    job = imported(tmp_path, f"max_steps = 3\n{SOURCE}", options=Options(data=Path("rows.jsonl")))
    assert [question.target for question in job.report.questions] == ["reward.functions.0.path"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_steps = ", "is not TOML"),
        ("max_steps = 'many'", "max_steps: must be an integer, got 'many'"),
        ("max_steps = 0", "max_steps: 0 is below 1"),
        ("model = 3", "model: must be a section"),
        ("[orchestrator]\nbatch_size = 100\ngroup_size = 16", "100 is not divisible by orchestrator.group_size 16"),
        ("[orchestrator]\nbatch_size = 128\ntoken_batch_size = 4096", "set either batch_size or token_batch_size"),
        ("[model]\nname = 'a'\n[trainer.model]\nname = 'b'", "prime-rl refuses different values"),
        ("[deployment]\nnum_train_gpus = 6\nnum_infer_gpus = 4", "exceed gpus_per_node 8"),
        ("[deployment]\nnum_infer_gpus = 3\n[inference.vllm]\ntensor_parallel_size = 2", "3 is not divisible"),
        ("[deployment]\ntype = 'multi_node'", "deployment.num_train_nodes: is required"),
        ("[weight_broadcast]\ntype = 'nccl'\n[trainer.model.lora]", "does not carry adapters"),
        ("[trainer.optim]\nlr = inf", "trainer.optim.lr: must be a number, got inf"),
        ("[trainer.optim]\ntype = 'lion'", "'lion' is none of adamw, muon"),
        ("[trainer.scheduler]\ntype = 'cosine'\nmin_lr = 1.0", "is above trainer.optim.lr"),
        ("max_steps = 15\n[trainer.scheduler]\ntype = 'linear'", "10 and warmup_steps 10 exceed max_steps 15"),
        ("[orchestrator.buffer]\neasy_threshold = 0.1\nhard_threshold = 0.5", "must be above hard_threshold"),
        ("[orchestrator.sampling]\ntemperature = 1.0\ntemp_scheduler.end_temperature = 0.5", "set either"),
        (f"{SOURCE}{SOURCE}", "two environments are called 'math-v1'"),
        ("toml_files = ['rl.toml']", "includes itself"),
        ("toml_files = ['gone.toml']", "can't be read"),
        ("toml_files = 3", "must be a list of file names"),
        ("a" + ".a" * 40 + " = 1", "has more than 30 levels"),
    ],
)  # fmt: skip
def test_errors_name_the_key(text: str, words: str, tmp_path: Path) -> None:
    """Those of the origin too."""
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        imported(tmp_path, text)


def test_a_key_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """With the name that was meant."""
    job = imported(tmp_path, f"max_steps = 3\n[trainer.optim]\nlrr = 1.0\n[nonsense]\nx = 1\n{SOURCE}")
    texts = {entry.key: entry.text for entry in job.report.entries if str(entry.verdict) == "refused"}
    assert set(texts) == {"trainer.optim.lrr", "nonsense.x"}
    assert "trainer.optim.lr?" in texts["trainer.optim.lrr"]


def test_a_word_without_place_is_an_error(tmp_path: Path) -> None:
    """A file where a section is, an item that does not exist."""
    with pytest.raises(ConfigError, match="no item of the list"):
        imported(tmp_path, SOURCE, ("--orchestrator.train.source.4.name", "x"))
    with pytest.raises(ConfigError, match="a value where it needs a section"):
        imported(tmp_path, "max_steps = 3", ("--max-steps.x", "1"))


def test_words_are_numbers_flags_or_texts() -> None:
    """As prime-rl reads them."""
    words = ("1", "1e-5", "true", "None", "Qwen/Qwen3", '["a"]')
    assert [value_of(word) for word in words] == [1, 1e-5, True, None, "Qwen/Qwen3", ["a"]]


SAMPLES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(1, 4096),
    "float": st.floats(0, 2),
    "bool": st.booleans(),
    "str": st.sampled_from(["auto", "x/y", "nccl", "linear", "cosine", "default", "sequence", "muon", "debug"]),
    "list": st.lists(st.sampled_from(["a", "b"]), max_size=3),
    "map": st.dictionaries(st.sampled_from(["top_p", "x"]), st.floats(0.1, 1), max_size=2),
    "any": st.sampled_from([1, "x", True]),
}


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Draw some of the known keys with values of their kinds."""
    names = draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=12, unique=True))
    found = {}
    for name in names:
        key = name.replace("**", "x").replace("source.*", "source.0").replace("*", "x")
        kind = KEYS[name].kind
        value = draw(SAMPLES[kind.rstrip("?")])
        found[key] = value
    return {key: value for key, value in found.items() if not any(other.startswith(f"{key}.") for other in found)}


def to_toml(values: dict[str, Any]) -> str:
    """Return dotted keys as words of a TOML file; items of a list by number become a list of inline tables."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return "".join(f"{name} = {inline(value)}\n" for name, value in tree.items())


def inline(value: Any) -> str:
    """Return a value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict) and set(value) == {"0"}:
        return f"[{inline(value['0'])}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {inline(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return repr(value) if not isinstance(value, str) else f'"{value}"'


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=trees())
def test_any_keys_end_in_one_entry_each_or_in_words(values: dict[str, Any], tmp_path: Path) -> None:
    """Whatever stands together, there is no other exception than one with a text for the user."""
    try:
        job = imported(tmp_path, to_toml(values))
    except ConfigError:
        return
    tree, _ = read_tree([tmp_path / "rl.toml"], ())
    check_each_key_once(job, flat(tree, WHOLE))


@pytest.mark.parametrize(
    ("template", "expected"),
    [("'{{ messages }}'", "{{ messages }}"), ("'chat.jinja'", {"file": "chat.jinja"}), ("''", None)],
)
def test_a_chat_template_is_a_text_or_a_file(template: str, expected: Any, tmp_path: Path) -> None:
    """A file has no brace in its name."""
    text = f"max_steps = 3\n[orchestrator.tokenizer]\nchat_template = {template}\n{SOURCE}"
    job = imported(tmp_path, text)
    assert job.run.tree["model"].get("chat_template") == expected
    verdict = {None: "irrelevant", "{{ messages }}": "taken"}.get(str(expected) if expected else None, "renamed")
    check_verdicts(job, {"orchestrator.tokenizer.chat_template": verdict})


@pytest.mark.parametrize(
    ("keys", "verdict", "strict", "keep"),
    [
        ("strict_async_level = true", "taken", True, 3),
        ("strict_async_level = true\nmax_async_level = 4", "taken", True, 6),
        ("strict_async_level = true\noversampling_factor = 2.0", "refused", False, 3),
        ("strict_async_level = false", "irrelevant", False, 3),
    ],
)
def test_a_strict_level_keeps_the_versions_that_it_needs(
    keys: str, verdict: str, strict: bool, keep: int, tmp_path: Path
) -> None:
    """Engines serve weights that are max_async_level + 1 steps old while the trainer goes on."""
    text = f"max_steps = 3\n[orchestrator]\n{keys}\n[[orchestrator.env]]\nid = 'x'\n"
    job = imported(tmp_path, text, options=Options(version="2026-02"))
    check_verdicts(job, {"orchestrator.strict_async_level": verdict})
    assert bool(job.run.get("packer.strict_async_level")) is strict
    assert (job.run.get("weights.keep") or 3) == keep
