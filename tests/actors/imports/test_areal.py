"""Configurations of AReaL, with the values that its code derives from them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.imports.areal import KEYS, parse_allocation, read
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
