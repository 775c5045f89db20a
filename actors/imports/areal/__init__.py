"""Import of AReaL 1.0: OmegaConf files of its GRPO examples, with `${…}` resolved, and words `a.b=c`."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.imports.areal.composition import Resolver, composed, join, put
from actors.imports.areal.machines import convert_machines
from actors.imports.areal.objective import convert_loss, convert_rewards
from actors.imports.areal.tables import (
    IRRELEVANT,
    KEYS,
    REFUSED,
    SPELLINGS,
    SWITCHES,
    TRACKER_KEYS,
    defaults_of,
    release_of,
)
from actors.imports.job import Import, Options
from actors.imports.keys import check_types, coerced, flat
from actors.imports.trackers import tracker_section
from schemas.errors import ConfigError


def read(files: Sequence[Path], arguments: Sequence[str], options: Options) -> Import:
    """Return the finished import.

    Raises:
        ConfigError: a file can't be read, a reference has no value, or AReaL itself refuses the values.
    """
    paths, words = list(files), list(arguments)
    while "--config" in words:
        at = words.index("--config")
        paths += [Path(word) for word in words[at + 1 : at + 2]]
        del words[at : at + 2]
    tree: dict[str, Any] = {}
    for path in paths:
        join(tree, composed(path))
    for word in words:
        put(tree, word)
    if {"exp_ctrl", "ppo"} & tree.keys():
        raise ConfigError(
            f"{min({'exp_ctrl', 'ppo'} & tree.keys())}: is a section of AReaL before its rewrite in 0.3, which is not "
            "known here; write the file with the keys of 0.3.0 to 1.0.4"
        )
    values = flat(tree)
    given = flat(Resolver(tree).tree())
    names = {name: spelling for spelling, name in SPELLINGS.items() if spelling in given and name not in given}
    given = {(SPELLINGS[key] if SPELLINGS.get(key) in names else key): value for key, value in given.items()}
    given = coerced(given, KEYS, texts=True)
    check_types(given, KEYS, names)
    release, sign = release_of(options.version, given)
    job = Import(given, defaults_of(release), f"AReaL {'.'.join(map(str, release))}", options, names)
    if sign:
        job.note(f"{sign} is of that time, so its defaults hold; --from-version says otherwise")
    texts = " ".join(str(value) for value in values.values() if "${" in str(value))
    _convert(job, set(re.findall(r"\$\{([^${}]+)\}", texts)))
    return job


def _convert(job: Import, referred: set[str]) -> None:
    """Report each key once, section by section.

    Args:
        job: the import.
        referred: keys whose values other keys have.
    """
    names = [str(job.given[key]) for key in ("experiment_name", "trial_name") if job.given.get(key)]
    label = re.sub(r"[^A-Za-z0-9_.-]", "-", "-".join(names) or "run")
    job.convert(["experiment_name", "trial_name"], {"name": label}, f"name = {label}")
    folder = f"{job.value('cluster.fileroot').rstrip('/')}/{label}"
    job.convert("cluster.fileroot", {"output_dir": folder}, folder)
    job.rename("seed", "seed")
    _convert_model(job)
    steps, per_epoch = _convert_length(job)
    _convert_data(job)
    _convert_sampling(job)
    convert_loss(job)
    convert_rewards(job)
    _convert_optimizer(job, steps)
    convert_machines(job)
    _convert_timers(job, per_epoch)
    for key, (reason, instead) in SWITCHES.items():
        job.refuse_unless(key, (False, None), reason, instead)
    if job.given.get("stats_logger.tensorboard.path"):
        path = "stats_logger.tensorboard"
        tracker_section(job, "tensorboard", path, {"path": "logging_dir"}, "areal")
    for key in job.keys_below("stats_logger"):
        # a tracker that is switched off, and the file names of one that is
        section = key.rpartition(".")[0]
        if job.given.get(f"{section}.mode", "disabled") in ("disabled", None):
            job.settle(key, "no tracker is on")
    for kind in ("wandb", "swanlab"):
        mode = job.given.get(f"stats_logger.{kind}.mode")
        if mode in ("online", "offline"):
            keys = {name: name for name in ("project", "name", "mode", *TRACKER_KEYS[kind])}
            tracker_section(job, kind, f"stats_logger.{kind}", keys, "areal")
    job.sweep({}, {key: reason for key, reason in REFUSED.items() if "**" not in key})
    job.sweep(IRRELEVANT, REFUSED)
    for key in job.given:
        if key in referred:
            job.settle(key, "other keys have its value")
    job.finish(list(KEYS))


def _convert_model(job: Import) -> None:
    if job.value("actor.path"):
        job.rename("actor.path", "model.path")
    else:
        job.ask("model.path", "the model; actor.path")
    if job.value("actor.dtype") in ("bfloat16", "float32"):
        job.rename("actor.dtype", "model.dtype")
    else:
        dtype = job.value("actor.dtype")
        job.refuse("actor.dtype", f"{dtype}: bfloat16 or float32 here", "bfloat16 is used")
        if "actor.dtype" not in job.given:
            job.note(f"actor.dtype is {dtype} by default in that release; bfloat16 is used")
    job.rename("actor.gradient_checkpointing", "model.gradient_checkpointing")
    attention = {"flash_attention_2": "flash", "flash_attention_3": "flash", "sdpa": "padded", "eager": "padded"}
    if job.has("actor.attn_impl"):
        job.rename("actor.attn_impl", "model.attention", attention.get(job.given["actor.attn_impl"], "auto"))
    if job.value("actor.use_lora"):
        job.rename("actor.lora_rank", "model.lora.rank")
        job.rename("actor.lora_alpha", "model.lora.alpha")
        modules = job.value("actor.target_modules")
        chosen = "all-linear" if not modules or "all-linear" in modules else list(modules)
        job.convert("actor.target_modules", {"model.lora.target_modules": chosen}, f"{chosen}")
        job.convert("actor.use_lora", {"model.lora.rank": job.value("actor.lora_rank")}, "a section here")
    for name in ("use_lora", "lora_rank", "lora_alpha", "target_modules"):
        job.settle(f"actor.{name}", "no adapters")


def _convert_length(job: Import) -> tuple[int | None, int | None]:
    """Write prompts per step and the length of the run, and return steps and steps per epoch, if they are known."""
    batch = job.value("train_dataset.batch_size")
    if batch < 1:
        raise ConfigError(f"train_dataset.batch_size: {batch} is below 1")
    job.rename("train_dataset.batch_size", "packer.groups_per_step")
    consumer = job.given.get("rollout.consumer_batch_size")
    if consumer not in (None, batch):
        job.refuse("rollout.consumer_batch_size", f"a step has train_dataset.batch_size {batch} prompts here")
    job.settle("rollout.consumer_batch_size", "train_dataset.batch_size")
    rows, keys = _rows(job), ["total_train_epochs", "total_train_steps", "train_dataset.drop_last"]
    if rows is None and job.value("total_train_steps") is None and job.value("train_dataset.drop_last"):
        epochs = job.value("total_train_epochs")
        if epochs < 1:
            raise ConfigError(f"total_train_epochs: {epochs} gives a run without steps")
        text = f"{epochs} epochs, the steps of which are counted at the start"
        job.convert(keys, {"trainer.max_epochs": float(epochs)}, text)
        return None, None
    if rows is None:
        job.ask("trainer.max_steps", "rows of the training data; --rows N")
        for key in keys:
            job.settle(key, "waits for --rows")
        return None, None
    per_epoch = rows // batch if job.value("train_dataset.drop_last") else math.ceil(rows / batch)
    if per_epoch < 1:
        raise ConfigError(f"train_dataset.batch_size: {batch} exceeds the {rows} rows; an epoch would have no step")
    epochs, bound = job.value("total_train_epochs"), job.value("total_train_steps")
    steps = min(epochs * per_epoch, bound or epochs * per_epoch)
    if steps < 1:
        raise ConfigError(f"total_train_epochs: {epochs} gives a run without steps")
    text = f"{epochs} · ⌊{rows} ÷ {batch}⌋ = {epochs * per_epoch}" + (f", at most {bound}" if bound else "")
    job.convert(keys, {"trainer.max_steps": steps}, text)
    return steps, per_epoch


def _rows(job: Import) -> int | None:
    if job.options.rows is not None or job.options.data is None:
        return job.options.rows
    try:
        with job.options.data.open(encoding="utf-8") as lines:
            return sum(1 for line in lines if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{job.options.data}: can't be read: {error}") from None


def _convert_data(job: Import) -> None:
    path = job.options.data or (job.given.get("train_dataset.path") or "")
    job.run.set("environments.0.type", "jsonl", "rows with prompts")
    if job.options.data or str(path).endswith(".jsonl"):
        job.convert("train_dataset.path", {"environments.0.path": str(path)}, f"{path}")
    else:
        job.ask("environments.0.path", f"the data {path or ''} as JSON Lines; --data rows.jsonl")
        job.settle("train_dataset.path", "export the data set; --data has the file")
    if job.options.reward:
        job.run.set("reward.functions.0.path", job.options.reward, "--reward")
    else:
        job.ask("reward.functions.0.path", "reward function; --reward FILE.py:F")


def _serves_sglang(job: Import) -> bool:
    text = job.given.get("rollout.backend") or job.given.get("allocation_mode")
    return "sglang" in str(text)


def _convert_sampling(job: Import) -> None:
    job.rename("gconfig.n_samples", "rollout.group_size")
    length, tokens = job.value("actor.mb_spec.max_tokens_per_mb"), job.value("gconfig.max_new_tokens")
    limit = job.value("sglang.context_length" if _serves_sglang(job) else "vllm.max_model_len")
    if length is None:
        job.ask("packer.sequence_len", "tokens of a micro-batch; actor.mb_spec.max_tokens_per_mb")
    else:
        job.rename("actor.mb_spec.max_tokens_per_mb", "packer.sequence_len")
    longest = min(value for value in (length, limit, tokens + 1) if value is not None)
    if tokens >= longest:
        text = f"{tokens} leaves no room for a prompt in {longest} tokens: {longest} − 1"
        job.convert("gconfig.max_new_tokens", {"rollout.max_tokens": longest - 1}, text)
    else:
        job.rename("gconfig.max_new_tokens", "rollout.max_tokens")
    if job.value("gconfig.greedy"):
        job.refuse("gconfig.greedy", "training samples", "temperature counts")
    job.settle("gconfig.greedy", "switched off")
    if job.value("gconfig.temperature") <= 0:
        raise ConfigError("gconfig.temperature: must be above 0 for training")
    job.rename("gconfig.temperature", "rollout.temperature")
    job.rename("gconfig.top_p", "rollout.top_p")
    top = job.value("gconfig.top_k")
    if 0 < top < 10_000_000:
        job.rename("gconfig.top_k", "rollout.top_k")
    else:
        job.convert("gconfig.top_k", {"rollout.top_k": 0}, f"{top}: all tokens")
    for theirs, ours in (("min_new_tokens", "min_tokens"), ("frequency_penalty", "frequency_penalty"),
                         ("ignore_eos", "ignore_eos")):  # fmt: skip
        job.rename(f"gconfig.{theirs}", f"rollout.{ours}")
    if stop := job.value("gconfig.stop"):
        texts = [stop] if isinstance(stop, str) else stop
        job.rename("gconfig.stop", "rollout.stop", texts, "the function gets the completion without the text here")
    job.settle("gconfig.stop", "empty")
    if job.value("train_dataset.max_length") is not None:
        targets = {"environments.0.max_prompt_tokens": job.value("train_dataset.max_length")}
        text = "rows with longer prompts are left out; the chat template's tokens count here, not there"
        job.convert("train_dataset.max_length", targets, text)
        job.run.set("environments.0.long_prompts", "drop", "as in AReaL")
    job.settle("train_dataset.max_length", "empty: no limit")
    level, batch = job.value("rollout.max_head_offpolicyness"), job.value("train_dataset.batch_size")
    if job.value("async_training"):
        job.rename("rollout.max_head_offpolicyness", "packer.max_async_level")
        job.settle("async_training", "true: rollout.max_head_offpolicyness says how far")
    else:
        keys = ["async_training", "rollout.max_head_offpolicyness"]
        job.convert(keys, {"packer.max_async_level": 0}, "false: sampling and training alternate")
    if level > 8:
        job.run.set("packer.max_off_policy_steps", level, "AReaL drops nothing")
    flying = job.value("rollout.max_concurrent_rollouts")
    if flying is None:
        job.run.set("rollout.max_concurrent_groups", batch, "default of AReaL: the batch")
        job.settle("rollout.max_concurrent_rollouts", "empty: the batch")
    else:
        job.rename("rollout.max_concurrent_rollouts", "rollout.max_concurrent_groups")
    job.rename("rollout.request_timeout", "inference.request_timeout")
    job.rename("rollout.request_retries", "rollout.completion_retries")
    job.rename("rollout.setup_timeout", "inference.engine.startup_timeout")


def _convert_optimizer(job: Import, steps: int | None) -> None:
    if job.value("actor.optimizer.type") == "adam":
        job.convert("actor.optimizer.type", {"trainer.optimizer.type": "adamw"}, "adam is AdamW")
    else:
        job.refuse("actor.optimizer.type", "not built", "adamw is used")
    job.rename("actor.optimizer.lr", "trainer.learning_rate")
    for name in ("weight_decay", "beta1", "beta2", "eps"):
        job.rename(f"actor.optimizer.{name}", f"trainer.optimizer.{name}")
    schedule = job.value("actor.optimizer.lr_scheduler_type")
    if schedule not in ("constant", "linear", "cosine"):
        raise ConfigError(f"actor.optimizer.lr_scheduler_type: {schedule!r} is none of constant, linear, cosine")
    job.rename("actor.optimizer.lr_scheduler_type", "trainer.lr_scheduler")
    if schedule != "constant":
        job.rename("actor.optimizer.min_lr_ratio", "trainer.min_lr_ratio")
    job.settle("actor.optimizer.min_lr_ratio", "without effect on a constant rate")
    if job.value("actor.optimizer.gradient_clipping") > 0:
        job.rename("actor.optimizer.gradient_clipping", "trainer.max_grad_norm")
    else:
        job.convert("actor.optimizer.gradient_clipping", {"trainer.max_grad_norm": None}, "0: no maximum")
    key = "actor.optimizer.warmup_steps_proportion"
    share = job.value(key)
    warmup = None if steps is None else int(share * steps)
    if warmup is None and share:
        job.rename(key, "trainer.warmup_ratio", text="rounded up here, down there; --rows N counts the steps")
    else:
        job.convert(key, {"trainer.warmup_steps": warmup or 0}, f"⌊{share:g} · {steps}⌋ = {warmup or 0}")
    if warmup or schedule != "constant":
        job.run.set("trainer.lr_schedule.first", 0, "transformers' schedules count from 0")


def _convert_timers(job: Import, per_epoch: int | None) -> None:
    """Write the intervals of checkpoints and evaluations."""
    has_recover = job.given.get("recover.mode") not in (None, "disabled")
    timers = ["saver", "recover"] if has_recover else ["saver"]
    for timer in (*timers, "evaluator"):
        job.refuse_unless(f"{timer}.freq_secs", (None,), "intervals are numbers of steps here", "freq_steps")
    target = "trainer.checkpoint"
    epochs = [value for timer in timers if (value := job.value(f"{timer}.freq_epochs"))]
    if epochs and job.run.get("trainer.max_epochs") is not None:
        keys = [f"{timer}.freq_epochs" for timer in timers]
        job.convert(keys, {f"{target}.interval_epochs": float(min(epochs))}, f"the smaller of them: {min(epochs)}")
        for timer in timers:
            job.refuse_unless(f"{timer}.freq_steps", (None,), "freq_epochs counts", "--rows N gives the smaller one")
    elif found := [interval for timer in timers if (interval := _interval(job, timer, per_epoch))]:
        job.run.set(f"{target}.interval", min(found), "the smaller of saver and recover, in steps")
    elif epochs:
        job.ask(f"{target}.interval", "steps of an epoch; --rows N")
    else:
        job.run.set(f"{target}.interval_share", 1.0, "no timer: the last step alone")
    if any(job.value(f"saver.freq_{unit}") for unit in ("epochs", "steps")):
        job.run.set(f"{target}.keep_last", None, "AReaL keeps all that its saver writes")
    elif has_recover:
        job.run.set(f"{target}.keep_last", 1, "AReaL keeps one state to recover from")
    _convert_evaluation(job, per_epoch)
    for timer in ("saver", "recover", "evaluator"):
        for unit in ("epochs", "steps", "secs"):
            is_open = per_epoch is None and job.value(f"{timer}.freq_{unit}") is not None and unit == "epochs"
            reason = "recover.mode is not on" if timer not in (*timers, "evaluator") else "no interval"
            job.settle(f"{timer}.freq_{unit}", "waits for --rows" if is_open and timer in timers else reason)


def _convert_evaluation(job: Import, per_epoch: int | None) -> None:
    """Write the evaluation: on rows of its own, sampled like training unless eval_gconfig says otherwise."""
    has_rows = job.has("valid_dataset") and job.given.get("valid_dataset", {}) is not None
    has_moment = any(job.value(f"evaluator.freq_{unit}") for unit in ("epochs", "steps"))
    if not has_rows or not (has_moment or job.value("evaluator.eval_before_train")):
        job.run.set("eval.num_prompts", 0, "no evaluation: " + ("no moment for it" if has_rows else "no valid_dataset"))
        job.settle("evaluator.eval_before_train", "no evaluation")
        return
    if not has_moment:
        job.run.set("eval.every_steps", 0, "before training alone")
    path = job.given.get("valid_dataset.path") or ""
    if path.endswith(".jsonl"):
        job.rename("valid_dataset.path", "environments.0.eval_path")
    else:
        job.ask("environments.0.eval_path", f"the held-out rows {path} as JSON Lines")
        job.settle("valid_dataset.path", "export the data set")
    if has_moment and _interval(job, "evaluator", per_epoch) is None and per_epoch is None:
        job.ask("eval.every_steps", "steps of an epoch; --rows N")
    job.rename("evaluator.eval_before_train", "eval.at_start")
    job.run.set("eval.num_prompts", 1_000_000, "all rows; fewer give all")
    job.run.set("eval.exact_match", None, "AReaL measures rewards alone")
    job.run.set("eval.at_end", False, "AReaL evaluates at the intervals alone")
    own = job.has("eval_gconfig") and job.given.get("eval_gconfig", {}) is not None
    section, why = ("eval_gconfig", "") if own else ("gconfig", "eval_gconfig is a copy of gconfig")
    for name, here in (("n_samples", "completions_per_prompt"), ("top_p", "top_p")):
        _evaluated(job, f"{section}.{name}", f"eval.{here}", job.value(f"{section}.{name}"), why)
    # a section of its own has AReaL's defaults, not the values of gconfig
    temperature = 0.0 if job.value(f"{section}.greedy") else job.value(f"{section}.temperature")
    _evaluated(job, f"{section}.temperature", "eval.temperature", float(temperature), why)
    job.settle("eval_gconfig.greedy", f"eval.temperature is {temperature:g}")
    # a row of the packer has room for a prompt
    tokens, row = job.value(f"{section}.max_new_tokens"), job.run.get("packer.sequence_len")
    tokens = min(tokens, row - 1) if own and isinstance(row, int) else job.run.get("rollout.max_tokens")
    _evaluated(job, f"{section}.max_new_tokens", "eval.max_tokens", tokens, why)
    top = job.value(f"{section}.top_k")
    _evaluated(job, f"{section}.top_k", "eval.top_k", top if 0 < top < 10_000_000 else 0, why)


def _evaluated(job: Import, key: str, target: str, value: Any, why: str) -> None:
    """Write a value of an evaluation, and report its key if it is one of eval_gconfig alone."""
    if why:
        job.run.set(target, value, why)
    else:
        job.convert(key, {target: value}, f"{value}")


def _interval(job: Import, timer: str, per_epoch: int | None) -> int | None:
    """Return the interval of a timer in steps, and report its keys; None if there is none or the rows are missing."""
    epochs, steps = job.value(f"{timer}.freq_epochs"), job.value(f"{timer}.freq_steps")
    found = [steps] if steps else []
    text = f"{steps} steps" if steps else ""
    if epochs and per_epoch:
        found.append(epochs * per_epoch)
        text = f"{epochs} · {per_epoch} = {epochs * per_epoch} steps"
    if not found:
        return None
    target = "eval.every_steps" if timer == "evaluator" else "trainer.checkpoint.interval"
    job.convert([f"{timer}.freq_epochs", f"{timer}.freq_steps"], {target: min(found)}, text)
    return int(min(found))
