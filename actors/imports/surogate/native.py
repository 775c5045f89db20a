"""Keys of `surogate grpo-native`: one file for one process that samples, scores and trains in turn."""

from typing import Any

from actors.imports.job import Import
from schemas.errors import ConfigError

MARKS = {"generation", "problems_per_step", "reward"}
"""Keys that only this file has."""

_PLACES = (
    ("train.generation.num_completions", "orchestrator.group_size"),
    ("train.generation.max_gen_len", "orchestrator.train.sampling.max_completion_tokens"),
    ("train.generation.top_p", "orchestrator.train.sampling.top_p"),
    ("train.generation.top_k", "orchestrator.train.sampling.top_k"),
    ("train.sampling.", "orchestrator.train.sampling."),
    ("train.reward.env.", "orchestrator.train.source."),
    ("train.advantage", "orchestrator.advantage"),
    ("train.filters", "orchestrator.filters"),
    ("train.eval.temperature", "orchestrator.eval.sampling.temperature"),
    ("train.eval.env.", "orchestrator.eval.source."),
    ("train.eval.rollouts_per_example", "orchestrator.eval.group_size"),
    ("train.eval.", "orchestrator.eval."),
    ("train.teacher_model", "orchestrator.teacher_model.model.name"),
)
"""Keys, or beginnings of keys, and the names by which the conversions of orch.yaml know them."""

DEFAULTS: dict[str, Any] = {
    "train.save_steps": 0,
    "train.problems_per_step": 8,
    "train.generation.min_p": 0.0,
    "train.reward.mode": "verifiers",
    "train.reward.dataset_path": None,
    "train.reward.reward_fn_import_path": None,
    "orchestrator.group_size": 4,
    "orchestrator.train.sampling.max_completion_tokens": 512,
    "orchestrator.eval.num_examples": 100,
    "orchestrator.eval.interval": 10,
}
"""Defaults that differ from those of the three files."""


def is_native(given: dict[str, Any]) -> bool:
    """Tell whether values by dotted key are those of one file for one process."""
    return any(key.split(".")[1] in MARKS for key in given if key.startswith("train."))


def name_of(key: str) -> str | None:
    """Return the name by which the conversions of orch.yaml know a key, or None."""
    for start, name in _PLACES:
        if key == start or (key.startswith(start) and (start.endswith(".") or key[len(start)] == ".")):
            return name + key[len(start) :]
    return None


def convert_data(job: Import) -> None:
    """Write the rows and the function of rewards by callback, unless the command line names them.

    Raises:
        ConfigError: the mode is none of Surogate's.
    """
    mode = job.value("train.reward.mode")
    if mode not in ("verifiers", "callback"):
        raise ConfigError(f"train.reward.mode: {mode!r} is none of verifiers, callback")
    job.settle("train.reward.mode", f"{mode}: " + ("environments" if mode == "verifiers" else "a function"))
    if mode == "verifiers":
        return
    path, function = job.value("train.reward.dataset_path"), job.value("train.reward.reward_fn_import_path")
    job.run.set("environments.0.type", "jsonl", "reward.mode callback")
    if job.options.data is not None:
        job.run.set("environments.0.path", str(job.options.data), "--data")
    elif path:
        job.rename("train.reward.dataset_path", "environments.0.path")
    else:
        job.ask("environments.0.path", "rows with prompts; --data rows.jsonl")
    if job.options.reward is not None:
        job.run.set("reward.functions.0.path", job.options.reward, "--reward")
    elif function:
        module, _, name = str(function).replace(":", ".").rpartition(".")
        text = "a function of lists; it gets columns by keyword too, so it needs **columns"
        job.convert("train.reward.reward_fn_import_path", {"reward.functions.0.path": f"{module}:{name}"}, text)
    else:
        job.ask("reward.functions.0.path", "reward function; --reward FILE.py:F")
    for name in ("dataset_path", "reward_fn_import_path"):
        job.settle(f"train.reward.{name}", "the command line has another")


def convert_batches(job: Import) -> None:
    """Write group size and groups per step, which are prompts here as there."""
    groups = job.value("train.problems_per_step")
    if not isinstance(groups, int) or groups < 1:
        raise ConfigError(f"train.problems_per_step: {groups!r} is below 1")
    job.rename("orchestrator.group_size", "rollout.group_size")
    job.rename("train.problems_per_step", "packer.groups_per_step")
    job.rename("train.generation.min_p", "rollout.min_p")


def convert_rest(job: Import) -> None:
    """Write what one process in turn means: no lag, no filter by default, evaluations at multiples alone."""
    job.run.set("packer.max_async_level", 0, "sampling and training alternate")
    if not job.has("orchestrator.filters"):
        job.run.set("reward.filters", [], "none by default")
    if job.run.get("eval.num_prompts"):
        if "orchestrator.eval.sampling.temperature" not in job.given:
            job.answer("eval.temperature", 0.0, "greedy by default")
        job.run.set("eval.at_start", False, "at multiples of the interval only")
        job.run.set("eval.at_end", False, "at multiples of the interval only")
        if "orchestrator.eval.max_gen_len" in job.given:
            job.rename("orchestrator.eval.max_gen_len", "eval.max_tokens")
    job.settle("train.reward.multiturn", "the environment says how many turns there are")
    job.note("Surogate samples with its own engine; here vLLM does")
