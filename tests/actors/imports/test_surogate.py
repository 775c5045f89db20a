"""Configurations of Surogate, with the values that its code derives from them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.imports.job import Import, Options
from actors.imports.keys import flat
from actors.imports.surogate import TRAIN_KEYS, WHOLE, read
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_each_key_once, check_only_missing, check_values, check_verdicts

ENV = "env: [{id: gsm8k}]\n"


@dataclass(frozen=True)
class Case:
    """Files with the values and verdicts of their import."""

    train: str
    orch: str
    infer: str
    values: dict[str, Any]
    verdicts: dict[str, str]
    options: Options = field(default_factory=Options)


def imported(folder: Path, train: str, orch: str, infer: str = "", options: Options = Options()) -> Import:  # noqa: B008
    """Import texts under names that do not tell what they are."""
    files = []
    for number, text in enumerate((orch, infer, train)):
        if text:
            files.append(folder / f"file{number}.yaml")
            files[-1].write_text(text)
    return read(files, [], options)


CASES = {
    # August 2026: ipo, linear to 0, 8-bit AdamW, adapters on all linear layers; 128 ÷ 8 = 16 groups
    "smallest": Case(
        "model: Qwen/Qwen3-0.6B\nsequence_len: 2048\nlora_rank: 16\n",
        "batch_size: 128\nrollouts_per_example: 8\nmax_steps: 40\nsampling: {max_tokens: 256}\n" + ENV,
        "model: Qwen/Qwen3-0.6B\nmax_model_len: 2048\nmax_lora_rank: 32\n",
        {
            "model.path": "Qwen/Qwen3-0.6B", "model.lora.rank": 16, "model.lora.alpha": 32,
            "model.lora.dropout": 0.0, "model.lora.target_modules": "all-linear", "model.gradient_checkpointing": True,
            "packer.groups_per_step": 16, "packer.sequence_len": 2048, "rollout.group_size": 8,
            "rollout.max_tokens": 256, "trainer.max_steps": 40, "trainer.loss.type": "ipo",
            "trainer.loss.ipo_mask_low": 0.2, "trainer.loss.ratio_clip": 7.389056, "trainer.loss.kl_tau": 1e-3,
            "trainer.learning_rate": 2e-4, "trainer.lr_scheduler": "linear", "trainer.optimizer.type": "adamw_8bit",
            "trainer.optimizer.weight_decay": 0.0, "trainer.checkpoint.interval": 50, "trainer.checkpoint.keep_last": 5,
            "inference.engine.max_model_len": 2048, "inference.engine.max_lora_rank": 32,
            "inference.engine.max_loras": 8, "weights.channel": "filesystem", "eval.num_prompts": 0, "seed": 42,
            "reward.advantage": {"type": "mean"}, "packer.max_async_level": 1, "output_dir": "output",
        },
        {"train.model": "renamed", "infer.model": "irrelevant", "orch.batch_size": "converted",
         "orch.max_steps": "taken", "train.sequence_len": "taken", "orch.sampling.max_tokens": "taken"},
    ),
    # February 2026: weight decay 0.1 and dropout 0.05; the loss masks ratios; ⌊0.1 · 40⌋ = 4
    "february": Case(
        "model: m\nlora_rank: 8\nwarmup_ratio: 0.1\nsave_steps: 0\nlr_scheduler_type: cosine\nfinal_lr_fraction: 0.2\n"
        "loss: {ratio_type: sequence, token_mask_low: 0.2}\nsequence_len: 1024\n",
        "batch_size: 64\nrollouts_per_example: 4\nmax_steps: 40\nseq_len: 2048\nsampling: {max_tokens: 100}\n" + ENV,
        "",
        {
            "trainer.loss.type": "surogate", "trainer.loss.ratio_type": "sequence", "trainer.loss.kl_tau": 0.0,
            "trainer.loss.token_mask_low": 0.2, "trainer.loss.compat.sequence_normalizer": "step_tokens",
            "trainer.warmup_steps": 4, "trainer.min_lr_ratio": 0.2, "trainer.optimizer.weight_decay": 0.1,
            "model.lora.dropout": 0.05, "trainer.checkpoint.interval_share": 1.0, "packer.sequence_len": 1024,
        },
        {"orch.seq_len": "irrelevant", "train.warmup_ratio": "converted", "train.save_steps": "converted"},
        Options(version="2026-02"),
    ),
    # level 3 with the optimizer that surogate takes where none is named
    "shared out in 8 bits": Case(
        "model: m\nlora: false\ngpus: 2\nzero_level: 3\n",
        "batch_size: 32\nrollouts_per_example: 4\nmax_steps: 10\nsampling: {max_tokens: 100}\n" + ENV,
        "",
        {"trainer.optimizer.type": "adamw_8bit", "trainer.sharding": "fsdp", "trainer.num_ranks": 2},
        {"train.zero_level": "converted"},
    ),
    # four-bit base, noise, three GPUs with level 3: quantised weights are not shared out
    "quantised": Case(
        "model: m\nlora: true\nqlora_bnb: true\nqlora_bnb_double_quant: false\ngpus: 3\nzero_level: 3\n"
        "noise_scheduler: {enabled: true, num_stages: 5}\nweight_broadcast_type: nccl\noptimizer: adamw\n",
        "batch_size: 32\nrollouts_per_example: 4\nmax_steps: 10\nsampling: {max_tokens: 100}\n" + ENV,
        "",
        {
            "model.quantization.type": "nf4", "model.quantization.double_quant": False, "trainer.num_ranks": 3,
            "trainer.sharding": "none", "inference.noise.num_stages": 5, "inference.noise.sigma_start": 0.05,
            "weights.channel": "rendezvous", "trainer.optimizer.type": "adamw", "packer.sequence_len": 1024,
        },
        {"train.qlora_bnb": "converted", "train.zero_level": "converted", "train.weight_broadcast_type": "renamed"},
    ),
    # one copy of the base, where trainer and vLLM share a GPU
    "colocated": Case(
        "model: m\nlora: true\ngpus: 1\nweight_broadcast_type: colocate\n",
        "batch_size: 32\nrollouts_per_example: 4\nmax_steps: 10\nsampling: {max_tokens: 100}\n" + ENV,
        "",
        {"up.share_base": True, "up.colocate": True, "model.quantization": None},
        {"train.weight_broadcast_type": "converted"},
    ),
    "colocated on two": Case(
        "model: m\nlora: true\ngpus: 2\nweight_broadcast_type: colocate\n",
        "batch_size: 32\nrollouts_per_example: 4\nmax_steps: 10\nsampling: {max_tokens: 100}\n" + ENV,
        "",
        {"up.share_base": False, "up.colocate": True},
        {"train.weight_broadcast_type": "refused"},
    ),
    # all weights, shared out; schedule wsd and a schedule of temperatures; 1024 tokens leave no room for a prompt
    "full": Case(
        "model: m\nlora: false\ngpus: 4\nshard_weights: true\nshard_gradients: true\noptimizer: adamw\n"
        "lr_scheduler_type: wsd\nmax_grad_norm: 0\nsave_total_limit: 1\nrecipe: fp8-hybrid\n",
        "batch_size: 64\nrollouts_per_example: 16\nmax_steps: 10\noversampling_factor: 2.0\n"
        "sampling: {max_tokens: 1024, repetition_penalty: 1.1, min_tokens: 2, temp_scheduler: {start_temperature: 1.0, "
        "end_temperature: 0.5, total_steps: 8}}\n"
        "env: [{id: a-b, path: /envs, args: {n: 1}}, {id: c}]\nbuffer: {env_ratios: [3, 1]}\n",
        "",
        {
            "model.lora": None, "trainer.sharding": "fsdp", "trainer.lr_scheduler": "warmup_stable_decay",
            "trainer.lr_schedule.decay_steps": 1, "trainer.lr_schedule.decay_type": "1-sqrt",
            "trainer.lr_schedule.first": 0, "rollout.repetition_penalty": 1.1, "rollout.min_tokens": 2,
            "trainer.max_grad_norm": None, "trainer.checkpoint.keep_last": 1, "rollout.max_tokens": 1023,
            "rollout.temperature_schedule.end": 0.5, "rollout.temperature_schedule.steps": 8,
            "rollout.max_concurrent_groups": 8, "packer.order": "arrival", "packer.oversampling_factor": 2.0,
            "environments.0.options": {"id": "a-b", "args": {"n": 1}, "path": "/envs"},
            "environments.0.weight": 3, "environments.1.weight": 1,
        },
        {"train.recipe": "refused", "train.lr_scheduler_type": "converted", "train.lora": "converted",
         "orch.sampling.repetition_penalty": "taken", "orch.sampling.temp_scheduler.total_steps": "renamed",
         "orch.env.0.path": "converted"},
    ),
    # evaluation of the trained environment, at the end too; a judge beside its rewards; W&B
    "evaluation": Case(
        "model: m\nlora_alpha: 64\nreport_to: wandb\n",
        "batch_size: 8\nrollouts_per_example: 8\nmax_steps: 10\nsampling: {max_tokens: 10, temperature: 0.9}\n"
        "eval: {interval: 5, eval_base_model: false, env: [{id: gsm8k}], sampling: {temperature: 0.0}}\n"
        "ruler: {enabled: true, mode: add, weight: 0.5, judge_model: big, judge: {base_url: ['http://j:8001/v1'],"
        " api_key_var: KEY, timeout: 30.0}, rubric: Be fair., sampling: {temperature: 0.0}, debug: true}\n"
        "buffer: {easy_threshold: 0.8}\n" + ENV,
        "tp: 2\ndp: 2\nmax_num_seqs: 64\n",
        {
            "eval.every_steps": 5, "eval.at_start": False, "eval.at_end": True, "eval.num_prompts": 1_000_000,
            "eval.completions_per_prompt": 1, "eval.temperature": 0.0, "packer.pools.easy_threshold": 0.8,
            "inference.engine.tensor_parallel_size": 2, "inference.engine.data_parallel_size": 2,
            "inference.engine.extra_args": ["--max-num-seqs", "64"], "rollout.temperature": 0.9,
            "reward.functions.0.path": "relative_judge", "reward.functions.0.weight": 0.5,
            "reward.functions.0.kwargs": {"url": "http://j:8001", "model": "big", "api_key_env": "KEY",
                                          "timeout": 30.0, "rubric": "Be fair.", "settings": {"temperature": 0.0}},
        },
        {"orch.ruler.enabled": "converted", "orch.ruler.debug": "irrelevant",
         "train.report_to": "converted", "orch.eval.interval": "renamed"},
    ),
    # a teacher, an own advantage window, and no adapters' rank in infer.yaml
    "teacher": Case(
        "model: m\nlora_rank: 4\nloss: {teacher_tau: 0.1, kl_tau: 0.0}\nmax_async_level: 3\nmax_steps: 7\n",
        "batch_size: 8\nrollouts_per_example: 2\nsampling: {max_tokens: 10}\nmax_async_level: 3\n"
        "max_off_policy_steps: 2\nstrict_async_level: true\n"
        "teacher_model: {model: {name: big}, client: {base_url: 'http://t:80/v1'}}\n"
        "advantage: {length_weighted_mean: true}\nfilters: []\n" + ENV,
        "",
        {
            "trainer.teacher.path": "big", "trainer.teacher_server.url": "http://t:80", "weights.keep": 5,
            "packer.strict_async_level": True, "trainer.loss.teacher_tau": 0.1, "trainer.loss.kl_tau": 0.0,
            "packer.max_async_level": 3, "packer.max_off_policy_steps": 3, "trainer.max_steps": 7,
            "reward.advantage": {"type": "length_weighted_mean"}, "reward.filters": [],
        },
        {"orch.max_async_level": "taken", "train.max_async_level": "irrelevant", "train.max_steps": "taken",
         "orch.max_off_policy_steps": "converted", "orch.strict_async_level": "taken",
         "orch.teacher_model.client.base_url": "converted"},
    ),
    # the judge in the place of the environment's rewards, which keep weight 0; 16 ÷ 4 = 4 groups; saved at the end
    "judge": Case(
        "model: m\nmax_steps: 10\noptimizer: adamw\nsave_steps: 0\nlora_rank: 16\nsequence_len: 2048\n",
        "batch_size: 16\nrollouts_per_example: 4\nmax_steps: 10\nsampling: {max_tokens: 256}\nuse_token_client: false\n"
        "verification: {enabled: true}\nruler: {enabled: true, judge_model: j, judge: {base_url: 'http://j:1/v1'}}\n"
        "env: [{id: markdown-table-qa, address: null}]\nreport_to: null\n",
        "model: m\nport: 8007\nenable_lora: true\nweight_broadcast_type: filesystem\ntrust_remote_code: true\n"
        "enable_auto_tool_choice: false\ntool_call_parser: hermes\n",
        {
            "environments.0.rewards": {"markdown-table-qa": 0.0}, "reward.functions.0.weight": 1.0,
            "reward.functions.0.kwargs": {"url": "http://j:1", "model": "j"}, "packer.groups_per_step": 4,
            "trainer.checkpoint.interval_share": 1.0, "model.trust_remote_code": True, "inference.port": 8007,
            "inference.engine.extra_args": [],
        },
        {"orch.ruler.judge.base_url": "converted", "orch.env.0.address": "irrelevant", "orch.report_to": "irrelevant",
         "infer.weight_broadcast_type": "irrelevant", "infer.trust_remote_code": "taken"},
    ),
    # one process that samples and trains in turn: prompts a step, no filter, saved at the end, evaluations greedy
    "native": Case(
        "model: m\nlora_rank: 16\nsequence_len: 2048\nmax_steps: 5\nproblems_per_step: 8\nrecipe: bf16\n"
        "generation: {num_completions: 16, max_gen_len: 128, top_k: 0, min_p: 0.1}\nsampling: {temperature: 0.8}\n"
        "reward: {mode: verifiers, env: [{id: reverse-text}]}\nadvantage: {type: default}\n"
        "eval: {env: [{id: reverse-text}], num_examples: 50}\n",
        "",
        "",
        {
            "packer.groups_per_step": 8, "rollout.group_size": 16, "rollout.max_tokens": 128, "rollout.min_p": 0.1,
            "rollout.temperature": 0.8, "packer.max_async_level": 0, "reward.filters": [],
            "environments.0.options": {"id": "reverse-text"}, "trainer.checkpoint.interval_share": 1.0,
            "eval.num_prompts": 50, "eval.every_steps": 10, "eval.temperature": 0.0, "eval.at_start": False,
            "eval.at_end": False, "trainer.loss.type": "ipo",
        },
        {"train.generation.num_completions": "renamed", "train.problems_per_step": "renamed",
         "train.reward.env.0.id": "converted", "train.reward.mode": "irrelevant"},
    ),
    # the same with a function: four completions of 512 tokens for each of eight prompts by default
    "callback": Case(
        "model: m\nlora: false\nsequence_len: 1024\nmax_steps: 5\noptimizer: adamw\n"
        "reward: {mode: callback, reward_fn_import_path: my.rewards.score, dataset_path: rows.jsonl}\n"
        "filters: [{type: repetition, enforce: true}]\nqlora_fp8: false\n",
        "",
        "",
        {
            "packer.groups_per_step": 8, "rollout.group_size": 4, "rollout.max_tokens": 512, "eval.num_prompts": 0,
            "environments.0.path": "rows.jsonl", "reward.functions.0.path": "my.rewards:score",
            "reward.filters.0.enforce": True,
        },
        {"train.reward.reward_fn_import_path": "converted", "train.reward.dataset_path": "renamed",
         "train.qlora_fp8": "irrelevant"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_real_configuration_has_the_values_of_the_origin(name: str, tmp_path: Path) -> None:
    """The file passes the checks, and each key of the input is reported once."""
    case = CASES[name]
    job = imported(tmp_path, case.train, case.orch, case.infer, case.options)
    check_values(job, case.values)
    check_verdicts(job, case.verdicts)
    texts = {"train": case.train, "orch": case.orch, "infer": case.infer}
    check_each_key_once(job, flat({kind: yaml.safe_load(text) for kind, text in texts.items() if text}, WHOLE))


@pytest.mark.parametrize(
    ("train", "orch", "words"),
    [
        ("lora_rank: [", "", "is not YAML"),
        ("- 1", "", "must be a map of keys"),
        ("x: 1", "", "no keys that tell"),
        ("lora_rank: 4", "lora_rank: 4", "second train.yaml"),
        ("lora_rank: many", ENV, "train.lora_rank: must be an integer, got 'many'"),
        ("model: a\nlora_rank: 4", f"model: {{name: b}}\nbatch_size: 4\n{ENV}", "different values"),
        ("model: a\nlora_rank: 4\nmax_steps: 3", f"max_steps: 4\n{ENV}", "different values"),
        ("model: a\nlora_rank: 4\nmax_async_level: 2", f"max_async_level: 1\n{ENV}", "different values"),
        ("model: a\nlora_rank: 4", f"batch_size: 10\nrollouts_per_example: 4\n{ENV}", "10 is not divisible"),
        ("model: a\nlora_rank: 4\nweight_broadcast_type: pigeon", ENV, "'pigeon' is none of"),
    ],
)
def test_errors_name_the_key(train: str, orch: str, words: str, tmp_path: Path) -> None:
    """Those of the origin too."""
    with pytest.raises(ConfigError, match=words):
        imported(tmp_path, train, orch)


def test_what_no_file_says_is_asked_for(tmp_path: Path) -> None:
    """The model, the length of the run, environments."""
    job = imported(tmp_path, "lora_rank: 8\nsave_steps: 0\nwarmup_ratio: 0.1\n", "batch_size: 4\n")
    asked = {question.target for question in job.report.questions}
    assert asked == {"model.path", "trainer.max_steps", "environments", "trainer.warmup_steps"}
    check_only_missing(job)


VALUES = {
    "int": st.integers(0, 100), "float": st.floats(0, 2), "bool": st.booleans(), "any": st.booleans(),
    "str": st.sampled_from(["linear", "nccl", "token", "x"]),
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), names=st.lists(st.sampled_from(sorted(TRAIN_KEYS)), max_size=10, unique=True))
def test_any_keys_end_in_one_entry_each_or_in_words(data: st.DataObject, names: list[str], tmp_path: Path) -> None:
    """No other exception than one with a text for the user."""
    tree: dict[str, Any] = {"model": "m", "gpus": 1}
    for name in names:
        section, _, last = name.rpartition(".")
        node = tree.setdefault(section, {}) if section else tree
        node[last] = data.draw(VALUES[TRAIN_KEYS[name].kind.rstrip("?")])
    try:
        job = imported(tmp_path, yaml.safe_dump(tree), f"max_steps: 5\n{ENV}")
    except ConfigError:
        return
    check_each_key_once(job, flat({"train": tree, "orch": yaml.safe_load(f"max_steps: 5\n{ENV}")}, WHOLE))
