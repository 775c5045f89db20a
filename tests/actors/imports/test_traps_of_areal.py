"""AReaL files with traps: references to sections, keys that stand twice, Hydra's defaults list and words, types."""

from pathlib import Path
from typing import Any

import pytest

from actors.imports.areal import read
from actors.imports.job import Import, Options
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_each_key_once, check_values, check_verdicts

COMPLETE = Options(rows=1000, data=Path("rows.jsonl"), reward="rewards.py:f")
BASE = """
experiment_name: e
trial_name: t
total_train_steps: 10
rollout: {backend: "vllm:d2"}
actor: {path: Qwen/Qwen3-0.6B, backend: "fsdp:d2", mb_spec: {max_tokens_per_mb: 4096}, optimizer: {lr: 1e-6}}
train_dataset: {batch_size: 16}
gconfig: {n_samples: 4, max_new_tokens: 1024}
"""


def imported(tmp_path: Path, text: str, words: tuple[str, ...] = (), options: Options = COMPLETE) -> Import:
    """Return the import of a file."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return read([file], list(words), options)


def test_references_to_sections_are_followed(tmp_path: Path) -> None:
    """OmegaConf: a reference to a section or a list stands for all of it, one with dots starts at its own section."""
    text = f"""{BASE}
evaluator: {{freq_steps: 5}}
valid_dataset: {{path: held.jsonl}}
eval_gconfig: ${{gconfig}}
vllm: {{max_model_len: 3000, gpu_memory_utilization: 0.5}}
saver: {{freq_steps: 2, experiment_name: "${{experiment_name}}", fileroot: "${{.experiment_name}}-x"}}
spec: [{{gpu: 1, env_vars: {{}}}}]
ref: {{scheduling_spec: "${{spec}}", path: "${{..actor.path}}"}}
"""
    job = imported(tmp_path, text)
    check_values(job, {"eval.completions_per_prompt": 4, "eval.max_tokens": 1024, "trainer.max_steps": 10})
    shown = {entry.key: entry.value for entry in job.report.entries}
    assert shown["eval_gconfig.n_samples"] == 4
    assert shown["ref.scheduling_spec.0.gpu"] == 1
    assert shown["ref.path"] == "Qwen/Qwen3-0.6B"
    assert shown["saver.fileroot"] == "e-x"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: ${b}\nb: {c: '${a}'}", "refers to itself"),
        ("a: ${nowhere.at.all}", "a: refers to nowhere.at.all, which no file has"),
        ("a: ${oc.env:SOME_FOLDER}", "a: needs the environment variable SOME_FOLDER"),
        # OmegaConf's loader: found duplicate key
        ("seed: 1\nseed: 2", r"seed \(lines \d+ and \d+\) stands twice in a map, which the origin refuses"),
        ("exp_ctrl: {total_train_epochs: 1}", "exp_ctrl: is a section of AReaL before its rewrite in 0.3"),
        ("seed: many", "seed: must be an integer, got 'many'"),
    ],
)
def test_what_omegaconf_refuses_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """Faults of a file, each in words."""
    with pytest.raises(ConfigError, match=problem):
        imported(tmp_path, f"{BASE}{text}\n")


def test_references_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    """Each section has the one before ten times: 10⁶ values."""
    sections = "\n".join(f"s{i}: [" + ", ".join([f"'${{s{i - 1}}}'"] * 10) + "]" for i in range(1, 7))
    with pytest.raises(ConfigError, match="make more than 20000 values"):
        imported(tmp_path, f"{BASE}s0: 1\n{sections}\n")


def test_texts_become_the_numbers_of_their_keys(tmp_path: Path) -> None:
    """Structured configurations of OmegaConf convert texts to numbers and switches, and numbers to texts."""
    text = BASE.replace("trial_name: t", "trial_name: 7").replace("lr: 1e-6", 'lr: "2e-5"') + 'seed: "3"\n'
    job = imported(tmp_path, text, ("+actor.gradient_checkpointing='true'",))
    values: dict[str, Any] = {"trainer.learning_rate": 2e-5, "seed": 3, "name": "e-7"}
    check_values(job, values | {"model.gradient_checkpointing": True})


def test_a_defaults_list_is_composed(tmp_path: Path) -> None:
    """Hydra 1.1 and later: the file itself comes last unless _self_ says where; a group is a section."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "small.yaml").write_text("gpu_memory_utilization: 0.4\n")
    listed = "defaults:\n  - base\n  - vllm: small\n"
    job = imported(tmp_path, f"{listed}train_dataset: {{batch_size: 32}}\n")
    check_values(job, {"packer.groups_per_step": 32, "inference.engine.gpu_memory_utilization": 0.4,
                       "model.path": "Qwen/Qwen3-0.6B"})  # fmt: skip
    first = imported(tmp_path, "defaults:\n  - _self_\n  - base\ntrain_dataset: {batch_size: 32}\n")
    check_values(first, {"packer.groups_per_step": 16})
    with pytest.raises(ConfigError, match="can't be read"):
        imported(tmp_path, "defaults: [nowhere]\nseed: 1\n")
    with pytest.raises(ConfigError, match="includes itself"):
        imported(tmp_path, "defaults: [config]\nseed: 1\n")


def test_words_add_change_and_take_out(tmp_path: Path) -> None:
    """Hydra's words: key=value, +key=value, ++key=value, ~key."""
    text = f"{BASE}evaluator: {{freq_steps: 5}}\nvalid_dataset: {{path: held.jsonl}}\n"
    words = ("train_dataset.batch_size=8", "+actor.c_clip=3.0", "++gconfig.top_p=0.9", "~evaluator")
    job = imported(tmp_path, text, words)
    check_values(job, {"packer.groups_per_step": 8, "trainer.loss.dual_clip": 3.0, "rollout.top_p": 0.9,
                       "eval.num_prompts": 0})  # fmt: skip
    with pytest.raises(ConfigError, match="~nothing: no file has this key"):
        imported(tmp_path, text, ("~nothing",))


def test_timers_that_are_off_say_so(tmp_path: Path) -> None:
    """checkpointer is what 0.3.0 called recover; without a mode it does nothing. A key that is empty is off."""
    text = f"{BASE}checkpointer: {{freq_epochs: 1, freq_secs: 3600}}\nsaver: {{freq_steps: 3}}\ncritic: null\n"
    job = imported(tmp_path, text)
    check_values(job, {"trainer.checkpoint.interval": 3})
    check_verdicts(job, {"checkpointer.freq_epochs": "irrelevant", "checkpointer.freq_secs": "irrelevant",
                         "critic": "irrelevant"})  # fmt: skip
    check_each_key_once(job, {entry.key for entry in job.report.entries})


def test_a_baseline_without_the_completion_itself_is_lost_with_a_discount(tmp_path: Path) -> None:
    """mean_leave1out is rloo without a discount; with one the importer says that it is lost."""
    norm = "reward_norm: {mean_level: group, std_level: null, mean_leave1out: true}"
    plain = imported(tmp_path, BASE.replace("actor: {", f"actor: {{{norm}, "))
    check_values(plain, {"reward.advantage.type": "rloo"})
    job = imported(tmp_path, BASE.replace("actor: {", f"actor: {{{norm}, discount: 0.9, "))
    check_verdicts(job, {"actor.reward_norm.mean_leave1out": "refused", "actor.discount": "converted"})
    check_values(job, {"reward.advantage.type": "gae"})


def test_keys_of_trackers_are_not_shown(tmp_path: Path) -> None:
    """The key of W&B's server stays out of the report."""
    job = imported(tmp_path, f"{BASE}stats_logger: {{wandb: {{mode: online, api_key: abc123xyz}}}}\n")
    assert "abc123xyz" not in "\n".join(job.report.lines())
