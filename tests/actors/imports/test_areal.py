"""Configurations of AReaL, with the values that its code derives from them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.imports.areal import KEYS, read
from actors.imports.areal.machines import parse_allocation
from actors.imports.job import Import, Options
from actors.imports.keys import flat
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_each_key_once, check_only_missing, check_values, check_verdicts
from tests.howto.pages import page

BASE = """
experiment_name: e
trial_name: t
rollout: {backend: "vllm:d2t2"}
actor:
  path: Qwen/Qwen3-0.6B
  backend: "fsdp:d2"
  mb_spec: {max_tokens_per_mb: 4096}
gconfig: {n_samples: 4, max_new_tokens: 512}
train_dataset: {batch_size: 8, path: rows.jsonl}
"""
OPTIONS = Options(rows=100, reward="rewards.py:f")


def imported(folder: Path, text: str, *words: str, options: Options = OPTIONS) -> Import:
    """Import a text with words of the command line."""
    (folder / "grpo.yaml").write_text(text)
    return read([folder / "grpo.yaml"], words, options)


def test_the_script_of_the_page_has_the_values_of_the_page(tmp_path: Path) -> None:
    """10 · ⌊7473 ÷ 256⌋ = 290 steps; ⌊0.001 · 290⌋ = 0; an interval of an epoch is 29 steps."""
    options = Options(rows=7473, data=Path("train.jsonl"), reward="rewards.py:gsm8k")
    text = (
        page("areal")
        .block("gsm8k_grpo.yaml")
        .replace("path: openai/gsm8k, type: rl}\nsaver", "path: test.jsonl}\nsaver")
    )
    job = imported(tmp_path, text, options=options)
    check_values(job, {
        "name": "gsm8k-grpo-trial0", "output_dir": "/tmp/areal/experiments/gsm8k-grpo-trial0",
        "trainer.max_steps": 290, "trainer.warmup_steps": 0, "trainer.checkpoint.interval": 29,
        "trainer.checkpoint.keep_last": None, "environments.0.max_prompt_tokens": 1024,
        "environments.0.long_prompts": "drop", "eval.every_steps": 29,
        "eval.completions_per_prompt": 4, "eval.temperature": 1.0, "eval.at_start": False,
        "environments.0.eval_path": "test.jsonl", "packer.groups_per_step": 256, "packer.max_async_level": 2,
        "rollout.group_size": 4, "rollout.max_tokens": 1024, "trainer.loss.type": "decoupled",
        "trainer.loss.rejection_sampling.upper": 5.0, "reward.shaping.clip": 20.0, "reward.shaping.bias": -0.5,
        "reward.advantage": {"type": "zscore", "std": "unbiased", "eps": 1e-5}, "trainer.reference": None,
        "reward.adv_norm.mean_level": "batch", "trainer.num_ranks": 4, "trainer.sharding": "fsdp", "up.inference": 4,
        "weights.channel": "rendezvous", "inference.engine.enable_prefix_caching": False,
    })  # fmt: skip
    check_verdicts(job, {"total_train_epochs": "converted", "actor.eps_clip": "renamed", "actor.kl_ctl": "irrelevant",
                         "train_dataset.max_length": "converted", "gconfig.temperature": "taken"})  # fmt: skip
    check_each_key_once(job, flat(yaml.safe_load(text)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # 100 rows ÷ 8 = 12 steps; ⌊0.001 · 12⌋ = 0; its own defaults: lr 1e-3, four minibatches, reward clip 20
        ((), {"trainer.max_steps": 12, "trainer.learning_rate": 1e-3, "trainer.num_minibatches": 4,
              "trainer.loss.type": "dapo", "trainer.loss.old_logprobs": "inference", "reward.advantage.type": "gae",
              "packer.max_async_level": 0, "trainer.checkpoint.interval_share": 1.0, "eval.num_prompts": 0,
              "inference.engine.tensor_parallel_size": 2, "up.inference": 2, "rollout.max_concurrent_groups": 8}),
        (("total_train_epochs=3", "total_train_steps=30", "actor.recompute_logprob=true"),
         {"trainer.max_steps": 30, "trainer.loss.old_logprobs": "step_start"}),
        (("train_dataset.drop_last=false", "saver.freq_epochs=2", "recover.mode=auto", "recover.freq_steps=5"),
         {"trainer.max_steps": 13, "trainer.checkpoint.interval": 5, "trainer.checkpoint.keep_last": None}),
        (("recover.mode=auto", "recover.freq_steps=5"), {"trainer.checkpoint.keep_last": 1}),
        (("gconfig.min_new_tokens=8", "gconfig.frequency_penalty=0.5", "gconfig.ignore_eos=true", "gconfig.stop=[END]"),
         {"rollout.min_tokens": 8, "rollout.frequency_penalty": 0.5, "rollout.ignore_eos": True,
          "rollout.stop": ["END"]}),
        (("actor.optimizer.lr_scheduler_type=cosine", "actor.optimizer.gradient_clipping=0"),
         {"trainer.lr_scheduler": "cosine", "trainer.lr_schedule.first": 0, "trainer.lr_schedule.unit": "step",
          "trainer.max_grad_norm": None}),
        (("rollout.backend=sglang:d2t2", "sglang.mem_fraction_static=0.7", "sglang.context_length=8192",
          "sglang.disable_radix_cache=true", "sglang.max_running_requests=64", "sglang.enable_metrics=false"),
         {"inference.engine.type": "sglang", "inference.engine.mem_fraction_static": 0.7, "up.inference": 2,
          "inference.engine.tensor_parallel_size": 2, "inference.engine.max_model_len": 8192,
          "inference.engine.deterministic": False, "weights.channel": "filesystem",
          "inference.engine.extra_args": ["--disable-radix-cache", "--max-running-requests", "64"]}),
        (("ref.path=${actor.path}", "actor.kl_ctl=0.05", "actor.kl_estimator=k2"),
         {"trainer.reference.beta": 0.05, "trainer.reference.place": "reward", "trainer.reference.estimator": "k2",
          "trainer.reference.old_logprobs": "inference", "trainer.reference.max_kl": 10.0}),
        (("actor.use_sapo_loss=true", "actor.sapo_tau_neg=1.1", "actor.optimizer.warmup_steps_proportion=0.25"),
         {"trainer.loss.type": "sapo", "trainer.loss.average": "step_tokens", "trainer.loss.temperature_neg": 1.1,
          "trainer.warmup_steps": 3}),
        (("actor.use_decoupled_loss=true", "actor.behav_imp_weight_cap=4.0", "actor.m2_threshold=0.04",
          "actor.prox_logp_method=loglinear"),
         {"trainer.loss.type": "m2po", "trainer.loss.m2_threshold": 0.04, "trainer.loss.rejection_sampling.upper": 4.0,
          "trainer.loss.prox_logp_method": "loglinear"}),
        (("actor.use_lora=true", "actor.target_modules=[all-linear]", "actor.weight_update_mode=disk",
          "actor.reward_norm={mean_level: group, mean_leave1out: true, std_level: null}",
          "gconfig.max_new_tokens=4096"),
         {"model.lora.rank": 32, "model.lora.alpha": 16, "model.lora.target_modules": "all-linear",
          "weights.channel": "filesystem", "reward.advantage.type": "rloo", "rollout.max_tokens": 4095}),
    ],
)  # fmt: skip
def test_words_of_the_command_line_take_precedence(
    words: tuple[str, ...], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Each case is a run of its own, derived by AReaL's formulas."""
    check_values(imported(tmp_path, BASE, *words), expected)


def test_what_no_file_says_is_asked_for(tmp_path: Path) -> None:
    """The rows give the length, warm-up and the interval."""
    job = imported(tmp_path, BASE, options=Options())
    asked = {question.target for question in job.report.questions}
    assert asked == {"reward.functions.0.path"}
    check_only_missing(job)
    job = imported(tmp_path, BASE, "total_train_steps=30", "saver.freq_epochs=1", options=Options())
    asked = {question.target for question in job.report.questions}
    assert asked == {"trainer.max_steps", "trainer.checkpoint.interval", "reward.functions.0.path"}
    check_only_missing(job)


def test_without_rows_the_length_is_in_epochs(tmp_path: Path) -> None:
    """Checkpoints and warm-up too."""
    words = ("total_train_epochs=3", "saver.freq_epochs=2", "recover.mode=auto", "recover.freq_epochs=1")
    job = imported(tmp_path, BASE, *words, options=Options(reward="rewards.py:f"))
    check_values(job, {
        "trainer.max_epochs": 3.0, "trainer.max_steps": 0, "trainer.checkpoint.interval_epochs": 1.0,
        "trainer.checkpoint.keep_last": None, "trainer.warmup_ratio": 0.001,
    })  # fmt: skip


def test_an_allocation_is_read_into_sizes() -> None:
    """Sizes of both parts; the names are optional in old files."""
    assert parse_allocation("sglang:d4p1t2+fsdp:d8") == {"sglang": {"d": 4, "p": 1, "t": 2}, "fsdp": {"d": 8}}
    assert parse_allocation("vllm:d2+megatron:d1t2c2") == {"vllm": {"d": 2}, "megatron": {"d": 1, "t": 2, "c": 2}}


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("fsdp:d4", {"trainer.num_ranks": 4}),
        ("fsdp:d2c2", {"trainer.num_ranks": 4, "trainer.context_parallel": 2}),
    ],
)
def test_ranks_that_share_sequences_are_kept(backend: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """`c` of an allocation: AReaL has Ulysses too."""
    job = imported(tmp_path, BASE, f"actor.backend={backend}")
    check_values(job, expected)
    assert (job.run.get("trainer.context_parallel") is not None) == ("trainer.context_parallel" in expected)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("seed=${oc.env:SEED}", "needs the environment variable SEED"),
        ("seed=${trial_name}", "seed: must be an integer, got 't'"),
        ("seed=${gone.key}", "which no file has"),
        ("seed=${seed}", "refers to itself"),
        ("train_dataset.batch_size=200", "exceeds the 100 rows"),
        ("actor.backend=fsdp-4", "is not of the form"),
        ("actor.optimizer.lr_scheduler_type=wsd", "is none of constant, linear, cosine"),
        ("nonsense", "is no file and no word"),
    ],
)
def test_errors_name_the_key(word: str, text: str, tmp_path: Path) -> None:
    """Environment variables are never read."""
    with pytest.raises(ConfigError, match=text):
        imported(tmp_path, BASE, word)


VALUES = {
    "int": st.integers(0, 64), "float": st.floats(0, 2), "bool": st.booleans(), "any": st.just(["all-linear"]),
    "str": st.sampled_from(["linear", "disk", "token", "sequence", "fsdp:d2", "vllm:d1"]),
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), names=st.lists(st.sampled_from(sorted(KEYS)), max_size=10, unique=True))
def test_any_keys_end_in_one_entry_each_or_in_words(data: st.DataObject, names: list[str], tmp_path: Path) -> None:
    """No other exception than one with a text for the user."""
    tree: dict[str, Any] = {}
    for name in names:
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = data.draw(VALUES[KEYS[name].kind.rstrip("?")])
    try:
        job = imported(tmp_path, yaml.safe_dump(tree))
    except ConfigError:
        return
    check_each_key_once(job, flat(tree))


LITE = """
experiment_name: e
trial_name: t
allocation_mode: sglang.d4p1t1+d4p1t1
cluster: {fileroot: /tmp/areal/experiments, n_nodes: 1, n_gpus_per_node: 8, name_resolve: {type: nfs}}
total_train_epochs: 10
tokenizer_path: ${actor.path}
async_training: true
rollout: {max_concurrent_rollouts: 256, consumer_batch_size: "${train_dataset.batch_size}", max_head_offpolicyness: 2}
gconfig: {n_samples: 4, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  path: Qwen/Qwen2-1.5B-Instruct
  mb_spec: {max_tokens_per_mb: 10240}
  backend: fsdp
  group_size: ${gconfig.n_samples}
  group_adv_norm: false
  eps_clip: 0.4
  temperature: ${gconfig.temperature}
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  optimizer: {lr: 1.70e-5}
ref: {path: "${actor.path}", optimizer: null, backend: fsdp}
server_only: false
sglang: {model_path: "${actor.path}", context_length: 32768, mem_fraction_static: 0.8, max_running_requests: null}
train_dataset: {batch_size: 256, shuffle: true, path: openai/gsm8k, type: rl}
valid_dataset: {batch_size: 256, path: test.jsonl, type: rl}
saver: {freq_epochs: 1, freq_steps: null, freq_secs: null}
recover: {mode: disabled, freq_epochs: 1, freq_steps: null, freq_secs: 3600}
evaluator: {freq_epochs: 1, freq_steps: null, freq_secs: null}
stats_logger: {wandb: {mode: disabled}}
"""
"""First release, July 2025: dots in the allocation, engines without sizes, advantages always normalised."""

MODERN = """
experiment_name: boba
trial_name: t
enable_offload: false
total_train_epochs: 2
cluster: {fileroot: /tmp/areal}
allocation_mode: vllm:d4+d4
scheduler: {type: null}
rollout: {max_concurrent_rollouts: 64, max_head_offpolicyness: 4, dump_to_file: true}
gconfig: {n_samples: 16, max_new_tokens: 8192, temperature: 1.0}
actor:
  path: deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
  init_from_scratch: false
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 16384}
  optimizer: {lr: 1e-5}
  ppo_n_minibatches: 4
  recompute_logprob: true
  use_decoupled_loss: true
  kl_ctl: 0.0
  max_new_tokens: ${gconfig.max_new_tokens}
  reward_norm: {mean_level: group, std_level: group, group_size: 16}
vllm: {max_model_len: 32768, gpu_memory_utilization: 0.9}
train_dataset: {batch_size: 32, path: rows.jsonl, pin_memory: true}
valid_dataset: {path: test.jsonl}
evaluator: {freq_epochs: null, freq_steps: null, freq_secs: null}
stats_logger: {wandb: {mode: disabled}}
"""
"""A file of 2026."""


@pytest.mark.parametrize(
    ("text", "words", "rows", "expected"),
    [
        # 10 · ⌊7473 ÷ 256⌋ = 290; lite's own defaults: float16 is no precision here, eps 1e-5, beta2 .95, decay .05
        (LITE, ("actor.dtype=bfloat16",), 7473, {
            "trainer.max_steps": 290, "up.inference": 4, "trainer.num_ranks": 4, "inference.engine.type": "sglang",
            "reward.advantage.type": "gae", "reward.adv_norm": {"mean_level": "batch", "mean_leave1out": False,
            "std_level": "batch", "std_unbiased": False, "eps": 1e-5}, "trainer.optimizer.beta2": 0.95,
            "trainer.optimizer.weight_decay": 0.05, "trainer.optimizer.eps": 1e-5,
            "model.gradient_checkpointing": True, "trainer.loss.rejection_sampling.upper": 5.0,
            "packer.max_async_level": 2, "trainer.checkpoint.interval": 29, "eval.every_steps": 29,
            "eval.at_end": False, "eval.max_tokens": 1024, "inference.engine.startup_timeout": 90.0}),
        (LITE, ("actor.dtype=bfloat16", "async_training=false", "actor.group_adv_norm=true"), 7473, {
            "packer.max_async_level": 0, "reward.adv_norm.mean_level": "group", "reward.adv_norm.std_level": "group"}),
        (LITE, ("actor.dtype=bfloat16", "actor.adv_norm=false", "actor.group_reward_norm=true"), 7473, {
            "reward.adv_norm": None, "reward.advantage": {"type": "zscore", "std": "unbiased", "eps": 1e-9}}),
        # the penalty counts from context_length in the days of that key, else from actor.max_new_tokens
        (LITE, ("actor.dtype=bfloat16", "context_length=32768", "actor.context_length=${context_length}",
                "actor.overlong_reward_penalty=true", "actor.overlong_tokens=1024", "actor.overlong_penalty_factor=1.0",
                "actor.eps_clip_higher=0.28"), 7473, {
            "reward.functions.1.path": "overlong", "trainer.loss.epsilon_high": 0.28,
            "reward.functions.1.kwargs": {"max_tokens": 32768, "overlong_tokens": 1024, "factor": 1.0}}),
        (MODERN, ("actor.overlong_reward_penalty=true", "actor.overlong_tokens=512",
                  "actor.overlong_penalty_factor=0.5"), 100, {
            "reward.functions.1.kwargs": {"max_tokens": 8192, "overlong_tokens": 512, "factor": 0.5}}),
        # no cap and no rejection_sampling: none in 1.0.4; no moment of an evaluation: none
        (MODERN, (), 100, {"trainer.loss.rejection_sampling": None, "eval.num_prompts": 0, "trainer.max_steps": 6,
                           "trainer.num_minibatches": 4, "trainer.checkpoint.interval_share": 1.0,
                           "trainer.num_ranks": 4, "up.inference": 4}),
        # the bound in the words of early 2026, whose default is 5
        (MODERN, ("actor.behave_imp_weight_mode=sequence_truncate",), 100, {
            "trainer.loss.rejection_sampling.upper": 5.0, "trainer.loss.rejection_sampling.level": "sequence",
            "trainer.loss.rejection_sampling.action": "clamp", "trainer.loss.rejection_sampling.agg": "mean"}),
        (MODERN, ("actor.behave_imp_weight_mode=disabled",), 100, {"trainer.loss.rejection_sampling": None}),
        (MODERN, ("actor.behave_imp_weight_cap=2.0",), 100, {"trainer.loss.rejection_sampling.upper": 2.0,
                                                            "trainer.loss.rejection_sampling.action": "mask"}),
        # experts are spread over the ranks of attention: 4 · 4 · 2 = 32
        (MODERN, ("allocation_mode=vllm:d4p1t8+megatron:(attn:d4p4t2c1|ffn:d1p4t1e8)",), 100, {
            "trainer.num_ranks": 32, "up.inference": 4, "inference.engine.tensor_parallel_size": 8,
            "trainer.tensor_parallel": 2, "trainer.expert_parallel": 8, "up.colocate": False}),
        (MODERN, ("allocation_mode=vllm:d2 + megatron:d2t1e2",), 100, {
            "trainer.num_ranks": 2, "trainer.expert_parallel": 2, "trainer.tensor_parallel": 1}),
        # rows are divided in one way: by tokens
        (MODERN, ("allocation_mode=vllm:d2 + fsdp:d2t2c2",), 100, {
            "trainer.num_ranks": 8, "trainer.context_parallel": 2, "trainer.tensor_parallel": 1}),
        # the same GPUs; a ref that is null is no reference, whatever kl_ctl
        (MODERN, ("allocation_mode=sglang[rollout]:d8p1t1|fsdp[actor]:d8p1t1", "ref=null", "actor.kl_ctl=0.1",
                  "actor.colocated=true", "actor.colocated_weight_path=/dev/shm/w"), 100, {
            "up.colocate": True, "up.inference": 8, "trainer.num_ranks": 8, "trainer.reference": None}),
        (MODERN, ("actor.dynamic_sampling=true",), 100, {"packer.filter_zero_advantages": True}),
        # a section of its own has the defaults of its class: 16384 tokens, less one for a prompt
        (MODERN, ("evaluator.freq_steps=10", "eval_gconfig.greedy=true", "gconfig.temperature=0.6"), 100, {
            "eval.temperature": 0.0, "eval.completions_per_prompt": 1, "eval.max_tokens": 16383,
            "eval.every_steps": 10, "rollout.temperature": 0.6, "rollout.max_tokens": 8192}),
        (MODERN, ("evaluator.freq_steps=10", "gconfig.temperature=0.6", "gconfig.top_p=0.9", "gconfig.top_k=20"), 100, {
            "eval.temperature": 0.6, "eval.completions_per_prompt": 16, "eval.max_tokens": 8192, "eval.top_p": 0.9,
            "eval.top_k": 20}),
        (MODERN, ("evaluator.eval_before_train=true",), 100, {"eval.at_start": True, "eval.every_steps": 0,
                                                             "eval.num_prompts": 1_000_000}),
    ],
)  # fmt: skip
def test_files_of_several_years_have_the_values_of_their_code(
    text: str, words: tuple[str, ...], rows: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Each key of the file and of the words has one entry."""
    options = Options(rows=rows, reward="rewards.py:f", data=Path("rows.jsonl"))
    job = imported(tmp_path, text, *words, options=options)
    check_values(job, expected)
    keys = flat(yaml.safe_load(text)).keys() | {word.partition("=")[0] for word in words}
    check_each_key_once(job, {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)})


def test_the_time_of_a_file_is_told_by_its_keys_or_by_the_user(tmp_path: Path) -> None:
    """The standard deviation of 0.3.3 has divisor n, of 0.3.4 divisor n − 1."""
    words = ("actor.adv_norm={mean_level: group, std_level: batch}",)
    for version, origin, unbiased in ((None, "AReaL 1.0.4", True), ("0.3.3", "AReaL 0.3.3", False)):
        options = Options(rows=100, reward="rewards.py:f", version=version)
        job = imported(tmp_path, MODERN, *words, options=options)
        assert job.report.origin == origin
        check_values(job, {"reward.adv_norm.std_unbiased": unbiased})
    dotted = imported(tmp_path, MODERN.replace("vllm:d4+d4", "vllm.d4p1t1+d4p1t1"), *words)
    assert dotted.report.origin == "AReaL 0.3.3"
    assert imported(tmp_path, LITE, "train_dataset.batch_size=8").report.origin == "AReaL 0.3.0"
    for version, problem in (("2.0", "is not known"), ("new", "is no version")):
        with pytest.raises(ConfigError, match=problem):
            imported(tmp_path, MODERN, options=Options(version=version))


@pytest.mark.parametrize(
    ("word", "verdict"),
    [
        ("enable_offload=false", "irrelevant"),
        ("enable_offload=true", "refused"),
        ("dynamic_bs=true", "refused"),
        ("stats_logger.wandb.mode=online", "converted"),
        ("stats_logger.wandb.mode=disabled", "irrelevant"),
        ("stats_logger.tensorboard.path=a", "converted"),
        ("actor.init_from_scratch=false", "irrelevant"),
        ("actor.use_cispo_loss=true", "refused"),
        ("recover.freq_secs=3600", "irrelevant"),
        ("saver.freq_secs=3600", "refused"),
        ("actor.self_distillation.is_clip=2", "refused"),
    ],
)
def test_a_switch_is_refused_where_it_is_on(word: str, verdict: str, tmp_path: Path) -> None:
    """What is off changes nothing; a refusal says what to do."""
    job = imported(tmp_path, MODERN, word)
    key = word.partition("=")[0]
    check_verdicts(job, {key: verdict})
    text = next(entry.text for entry in job.report.entries if entry.key == key)
    assert text
    if verdict == "refused":
        assert "; " in text, f"no way out: {text}"
