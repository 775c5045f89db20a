"""Runs of five configurations of other systems, rebuilt here from the facts of their documentation.

Each file is imported as its user would import it, and then trains for twenty steps. A test can't have the model, the
GPUs and the days of such a run, so `SMALL` and each `Origin.changes` replace these; everything else is as imported.
"""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.cli import main
from actors.imports.command import import_files, sort_words
from actors.imports.job import Import, Options
from actors.imports.report import Verdict
from schemas.config import load_config
from schemas.config.load import check_tree
from tests.ring.harness import PATIENCE_SECONDS, check_promise, processes

STEPS = 20
NUM_ROWS = 300
"""Rows of the data: more than any of the runs has groups in a step."""

SUROGATE = {
    "train.yaml": """
model: Qwen/Qwen3-0.6B
output_dir: ./outputs
gpus: 1
per_device_train_batch_size: 1
sequence_len: 2048
max_steps: 40
logging_steps: 1
learning_rate: 2e-4
lr_scheduler_type: constant
max_grad_norm: 1.0
weight_decay: 0.01
recipe: fp8-hybrid
lora: true
lora_rank: 16
lora_alpha: 32
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
noise_scheduler: {enabled: true, sigma_start: 5e-2, sigma_end: 5e-4, num_stages: 10}
loss:
  {ratio_type: token, kl_tau: 0.0, adv_tau: 1.0, token_mask_low: 0.125, token_mask_high: 8.0, geo_mask_low: 0.1,
   geo_mask_high: 10.0}
""",
    "infer.yaml": """
model: Qwen/Qwen3-0.6B
enable_lora: true
max_lora_rank: 32
gpu_memory_utilization: 0.5
""",
    "orch.yaml": """
model: {name: Qwen/Qwen3-0.6B, lora_adapter: default, lora_rank: 16, lora_alpha: 32}
env:
  - id: reverse-text
batch_size: 128
rollouts_per_example: 16
seq_len: 2048
max_steps: 40
sampling: {max_tokens: 128}
""",
}

AREAL = {
    "gsm8k_grpo.yaml": """
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 1
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: experiments}
scheduler: {type: null}
rollout:
  backend: "sglang:d4p1t1"
  max_concurrent_rollouts: 256
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  backend: "fsdp:d4p1t1"
  path: Qwen/Qwen2.5-1.5B-Instruct
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    {type: adam, lr: 1.70e-5, weight_decay: 0.017, beta1: 0.9, beta2: 0.999, lr_scheduler_type: constant,
     gradient_clipping: 1.0, warmup_steps_proportion: 0.001}
  eps_clip: 0.4
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
sglang: {model_path: "${actor.path}", dtype: "${actor.dtype}", context_length: 32768, mem_fraction_static: 0.8}
train_dataset: {batch_size: 256, shuffle: true, path: openai/gsm8k, type: rl, max_length: 1024}
valid_dataset: {batch_size: 256, path: openai/gsm8k, type: rl}
saver: {freq_epochs: 1, freq_steps: null, freq_secs: null}
evaluator: {freq_epochs: 1, freq_steps: null, freq_secs: null}
stats_logger: {wandb: {mode: disabled}}
""",
}

MS_SWIFT = {
    "grpo.sh": r"""
NPROC_PER_NODE=2 swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen2.5-1.5B-Instruct \
    --reward_funcs accuracy repetition \
    --dataset rows.jsonl \
    --generation_batch_size 32 \
    --per_device_train_batch_size 4 \
    --num_generations 8 \
    --num_iterations 1 \
    --truncation_strategy left \
    --max_length 1024 \
    --max_completion_length 256 \
    --chord_sft_dataset experts.jsonl \
    --chord_sft_per_device_train_batch_size 1 \
    --chord_mu_warmup_steps 100 --chord_mu_decay_steps 0 --chord_mu_peak 0.05 --chord_mu_valley 0.05 \
    --chord_enable_phi_function false \
    --use_vllm true --vllm_mode colocate --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.4 \
    --sleep_level 1 --offload_model true --offload_optimizer true \
    --max_steps 80
""",
}

TRL_ASYNC = {
    "train_async_grpo.py": """
from datasets import load_dataset
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.rewards import accuracy_reward

rows = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = AsyncGRPOTrainer(model="Qwen/Qwen3-4B", reward_funcs=accuracy_reward, train_dataset=rows)
trainer.train()
""",
}

TRL_SGLANG = {
    "train_sglang.py": """
def digits(completions, **kwargs):
    return [float(sum(sign.isdigit() for sign in text)) for text in completions]


if __name__ == "__main__":
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir="out",
        use_sglang=True,
        sglang_device="cuda:1",
        checkpoint_path="checkpoints",
        max_completion_length=256,
        max_steps=40,
    )
    rows = load_dataset("json", data_files="rows.jsonl", split="train")
    GRPOTrainer(model="Qwen/Qwen2.5-1.5B-Instruct", reward_funcs=digits, args=arguments, train_dataset=rows).train()
""",
}

REWARD = """
def digits(prompts, completions, **columns):
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(sum(sign.isdigit() for sign in text)) for text in texts]
"""

SMALL: dict[str, dict[str, Any]] = {
    "model": {"path": "model"},  # a tiny model with random weights in place of one of billions of parameters
    "rollout": {"max_tokens": 8},  # two cores sample
    "packer": {"sequence_len": 256},
    "trainer": {"max_steps": STEPS, "num_ranks": 1, "sharding": "none"},  # one process trains: no second GPU
    "inference": {"engine": {"type": "embedded", "max_sequence_len": 256}},  # vLLM and SGLang need a GPU
    "up": {"inference": 1},
}
"""Values of all runs that replace what a machine without a GPU does not have: model, lengths, number of processes."""


@dataclass(frozen=True)
class Origin:
    """A configuration of another system, and what becomes of it here."""

    system: str
    files: dict[str, str]
    command: str
    """Words behind `actors import SYSTEM`."""
    refused: set[str]
    """Keys of the parts that do not exist here."""
    asked: set[str] = field(default_factory=set)
    """Keys of run.yaml that only the user can give."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of this run that a test replaces, beside `SMALL`."""
    has_signal: bool = True
    """Whether rewards of a model with random weights differ."""


ORIGINS = {
    # missing here: training in fp8; and the package of the environment, so the command names rows and a function
    "surogate": Origin(
        "surogate",
        SUROGATE,
        "train.yaml infer.yaml orch.yaml --data rows.jsonl --reward rewards.py:digits",
        refused={"train.recipe", "orch.env.0.id"},
    ),
    # missing here: nothing, but AReaL's own code makes the rows, and rates them
    "areal": Origin(
        "areal",
        AREAL,
        "gsm8k_grpo.yaml scheduler.type=local +sglang.attention_backend=triton --rows 7473 --data rows.jsonl "
        "--reward rewards.py:digits",
        refused=set(),
        asked={"environments.0.eval_path"},
        # few held-out rows at step 10, in place of 1 319 rows every 29 steps, and shorter ones
        changes={
            "environments": {"eval_path": "held.jsonl", "max_prompt_tokens": 128},
            "eval": {"every_steps": 10, "max_tokens": 8},
        },
    ),
    # missing here: an engine and a trainer that take turns on the memory of a GPU
    "ms-swift": Origin(
        "ms-swift",
        MS_SWIFT,
        "grpo.sh",
        refused={"sleep_level", "offload_model", "offload_optimizer"},
        changes={"environments": {"max_prompt_tokens": 128}},  # a length
    ),
    # missing here: nothing; the rows on the hub are replaced by rows of the test
    "trl-async": Origin(
        "trl",
        TRL_ASYNC,
        "train_async_grpo.py --world 1 --rows 103022 --from-version 1.0",
        refused=set(),
        changes={"environments": {"path": "rows.jsonl"}},
        has_signal=False,  # no text of random bytes is a right answer
    ),
    # missing here: nothing
    "trl-sglang": Origin("trl", TRL_SGLANG, "train_sglang.py --world 1", refused=set()),
}


OPTIONS = ("--world", "--rows", "--data", "--reward", "--from-version")


def write_inputs(folder: Path, origin: Origin) -> None:
    """Write the files of an origin, its data and its reward function."""
    for name, text in origin.files.items():
        (folder / name).write_text(text)
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{number} + {number} = ", "solution": str(2 * number)} for number in range(NUM_ROWS)]
    experts = [{"prompt": row["prompt"], "completion": row["solution"]} for row in rows]
    for name, found in (("rows.jsonl", rows), ("held.jsonl", rows[:8]), ("experts.jsonl", experts)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))


def imported(origin: Origin) -> Import:
    """Return the import that the command of an origin makes in the current folder."""
    words, options = shlex.split(origin.command), dict[str, str]()
    for name in OPTIONS:
        if name in words:
            at = words.index(name)
            _, options[name] = words[at : at + 2]
            del words[at : at + 2]
    files, arguments = sort_words(words)
    return import_files(origin.system, files, arguments, Options(
        world=int(options["--world"]) if "--world" in options else None,
        rows=int(options["--rows"]) if "--rows" in options else None,
        data=Path(options["--data"]) if "--data" in options else None,
        reward=options.get("--reward"),
        version=options.get("--from-version"),
    ))  # fmt: skip


def merged(tree: dict[str, Any], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a tree with values of its sections replaced; those of `environments` are values of the first one."""
    found = dict(tree)
    for name, values in changes.items():
        if name == "environments":
            found[name] = [{**tree[name][0], **values}, *tree[name][1:]]
        else:
            found[name] = {**found.get(name, {}), **values}
    return found


@pytest.mark.parametrize("name", ORIGINS)
def test_an_import_names_every_part_that_does_not_exist_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing else; with the values it asks for, the run is one that `actors up` would start."""
    origin = ORIGINS[name]
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path, origin)
    job = imported(origin)
    assert {entry.key for entry in job.report.of(Verdict.REFUSED)} == origin.refused
    assert {question.target for question in job.report.questions} == origin.asked
    asked = {key: value for key, value in origin.changes.items() if any(one.startswith(key) for one in origin.asked)}
    check_tree(merged(job.run.tree, asked))
    # the command gives the same
    assert main(["import", origin.system, *shlex.split(origin.command)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == job.run.tree


@pytest.mark.long
@pytest.mark.parametrize("name", ORIGINS)
def test_an_imported_run_trains_twenty_steps_and_keeps_the_promise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of `actors up` with a real model: no group is lost, none is trained twice."""
    from tests.chat_model import build_chat_model

    origin = ORIGINS[name]
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path, origin)
    build_chat_model(tmp_path / "model")
    tree = merged(merged(imported(origin).run.tree, SMALL), origin.changes)
    tree["output_dir"] = "out"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "run.yaml")
    with processes(config, tmp_path) as started:
        assert started.up().wait(4 * PATIENCE_SECONDS) == 0, started.text("up")
    said = check_promise(config)
    assert said.steps == STEPS
    metrics = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(any(line[f"reward/{function.title}"] is not None for line in metrics)
               for function in config.reward.functions)  # fmt: skip
    # some step has changed the weights: completions of a group had different rewards
    assert any(line["grad_norm"] for line in metrics) or not origin.has_signal
