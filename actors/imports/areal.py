"""Import of AReaL 1.0: OmegaConf files of its GRPO examples, with `${…}` resolved, and words `a.b=c`."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from actors.imports.files import map_of
from actors.imports.job import Import, Options
from actors.imports.keys import Key, check_types, defaults, flat, table
from schemas.config.load import parse
from schemas.config.sglang_engine import SET_BY_US
from schemas.errors import ConfigError

KEYS: dict[str, Key] = table("""
experiment_name                  str?    null
trial_name                       str?    null
seed                             int     1
cluster.fileroot                 str     /tmp/areal/
allocation_mode                  str?    ""
total_train_epochs               int     1
total_train_steps                int?    null
train_dataset.batch_size         int     1
train_dataset.path               str?    null
train_dataset.drop_last          bool    true
train_dataset.max_length         int?    null
valid_dataset.path               str?    null
rollout.backend                  str?    null
rollout.max_concurrent_rollouts  int?    null
rollout.consumer_batch_size      int?    null
rollout.max_head_offpolicyness   int     0
rollout.request_timeout          float   3600
rollout.request_retries          int     3
rollout.setup_timeout            float   300.0
gconfig.n_samples                int     1
gconfig.max_new_tokens           int     16384
gconfig.max_tokens               int?    32768
gconfig.min_new_tokens           int     0
gconfig.greedy                   bool    false
gconfig.temperature              float   1.0
gconfig.top_p                    float   1.0
gconfig.top_k                    int     100000000
gconfig.frequency_penalty        float   0.0
gconfig.ignore_eos               bool    false
gconfig.stop                     any?    null
eval_gconfig.n_samples           int     1
eval_gconfig.temperature         float   1.0
eval_gconfig.greedy              bool    false
actor.path                       str     ""
actor.backend                    str?    null
actor.dtype                      str     bfloat16
actor.attn_impl                  str     flash_attention_2
actor.gradient_checkpointing     bool    false
actor.use_lora                   bool    false
actor.lora_rank                  int     32
actor.lora_alpha                 float   16
actor.target_modules             any     []
actor.mb_spec.max_tokens_per_mb  int?    null
actor.optimizer.type             str     adam
actor.optimizer.lr               float   0.001
actor.optimizer.weight_decay     float   0.01
actor.optimizer.beta1            float   0.9
actor.optimizer.beta2            float   0.999
actor.optimizer.eps              float   1.0e-8
actor.optimizer.min_lr_ratio     float   0.0
actor.optimizer.lr_scheduler_type str    constant
actor.optimizer.warmup_steps_proportion float 0.001
actor.optimizer.gradient_clipping float  1.0
actor.ppo_n_minibatches          int?    4
actor.eps_clip                   float   0.2
actor.eps_clip_higher            float?  null
actor.c_clip                     float?  null
actor.m2_threshold               float?  null
actor.use_decoupled_loss         bool    false
actor.recompute_logprob          bool    false
actor.prox_logp_method           str     recompute
actor.importance_sampling_level  str     token
actor.use_sapo_loss              bool    false
actor.sapo_tau_pos               float   1.0
actor.sapo_tau_neg               float   1.05
actor.behav_imp_weight_cap       float?  null
actor.rejection_sampling.level   str     token
actor.rejection_sampling.action  str     mask
actor.rejection_sampling.metric  str     ratio
actor.rejection_sampling.agg     str     mean
actor.rejection_sampling.upper   float   5.0
actor.rejection_sampling.lower   float?  null
actor.reward_bias                float   0.0
actor.reward_scaling             float   1.0
actor.reward_clip                float   20.0
actor.overlong_reward_penalty    bool    false
actor.overlong_tokens            int?    null
actor.overlong_penalty_factor    float?  null
actor.mask_no_eos_with_zero      bool    false
actor.discount                   float   1.0
actor.gae_lambda                 float   1.0
actor.kl_ctl                     float   0.1
actor.kl_estimator               str     k1
actor.weight_update_mode         str     xccl
vllm.max_model_len               int?    32768
vllm.gpu_memory_utilization      float   0.9
vllm.enforce_eager               bool    false
vllm.no_enable_prefix_caching    bool    true
vllm.max_num_seqs                int     256
vllm.max_lora_rank               int     16
sglang.context_length            int?    32768
sglang.mem_fraction_static       float?  0.9
vllm.max_loras                   int     8
saver.freq_epochs                int?    null
saver.freq_steps                 int?    null
saver.freq_secs                  int?    null
recover.freq_epochs              int?    null
recover.freq_steps               int?    null
recover.freq_secs                int?    null
evaluator.freq_epochs            int?    null
evaluator.freq_steps             int?    null
evaluator.freq_secs              int?    null
evaluator.eval_before_train      bool    false
""")
"""Keys that are read, with the defaults of AReaL 1.0.4."""
LOSS_KEYS = (
    "eps_clip", "eps_clip_higher", "c_clip", "m2_threshold", "prox_logp_method", "sapo_tau_pos", "sapo_tau_neg",
    "importance_sampling_level", "behav_imp_weight_cap", "rejection_sampling",
)  # fmt: skip
"""Keys that only some losses read."""
NORM_KEYS = ("mean_level", "mean_leave1out", "std_level", "std_unbiased", "eps")
"""Keys of a normalisation."""

IRRELEVANT = {
    "actor.rejection_sampling": "only the decoupled loss reads it",
    "cluster.**": "processes are started by actors up, systemd or Kubernetes",
    "tokenizer_path": "the tokenizer is the model's",
    "*.tokenizer_path": "the tokenizer is the model's",
    "*.experiment_name": "one name here",
    "*.trial_name": "one name here",
    "*.fileroot": "one folder here, output_dir",
    "async_training": "packer.max_async_level says it",
    "perf_tracer.**": "for profiles",
    "memory_profiler.**": "for profiles",
    "scheduler.**": "processes are started by actors up",
    "*.scheduling_spec.**": "processes are started by actors up",
    "*.scheduling_spec": "processes are started by actors up",
    "*.scheduling_strategy.**": "processes are started by actors up",
    "train_dataset.**": "rows of a JSON Lines file",
    "valid_dataset.**": "rows of a JSON Lines file",
    "train_dataset": "rows of a JSON Lines file",
    "valid_dataset": "no evaluation",
    "gconfig.max_tokens": "bounded by packer.sequence_len and max_model_len",
    "gconfig.skip_special_tokens": "texts have no special tokens",
    "gconfig.stop_token_ids": "the model's own end of a turn",
    "eval_gconfig.**": "evaluations have a temperature and a number of completions",
    "rollout.queue_size": "steps bound the work in flight",
    "rollout.enable_rollout_tracing": "samples.jsonl",
    "rollout.check_trajectory_format": "groups are always checked",
    "rollout.dump_to_file": "samples.jsonl",
    "rollout.pause_grace_period": "weights.update_mode",
    "rollout.use_lora": "model.lora",
    "rollout.lora_name": "adapters have no names here",
    "actor.disable_dropout": "dropout is off, unless model.dropout is set",
    "actor.is_critic": "no critic",
    "actor.pad_to_maximum": "rows are packed",
    "actor.temperature": "logprobs have the temperature of sampling",
    "actor.mb_spec.**": "samples are packed by best fit",
    "actor.max_new_tokens": "rollout.max_tokens",
    "actor.group_size": "rollout.group_size",
    "actor.peft_type": "LoRA",
    "actor.fsdp.**": "a plan of memory",
    "actor.megatron.**": "another engine",
    "actor.archon.**": "another engine",
    "actor.grad_reduce_dtype": "gradients are reduced in float32",
    "actor.optimizer_dtype": "states are float32",
    "actor.optimizer.initial_loss_scale": "for float16 only",
    "actor.optimizer.min_loss_scale": "for float16 only",
    "actor.optimizer.loss_scale_window": "for float16 only",
    "actor.optimizer.hysteresis": "for float16 only",
    "actor.log_agent_stats": "metrics.jsonl",
    "actor.log_agent_stats_keys": "metrics.jsonl",
    "actor.*.group_size": "the size of the group always",
    "ref.**": "the reference is a copy of the first weights",
    "ref": "the reference is a copy of the first weights",
    "saver.mode": "checkpoints are saved in the background",
    "recover.**": "actors up resumes by itself",
    "vllm.model": "model.path",
    "vllm.dtype": "model.dtype",
    "vllm.seed": "each completion has a seed of its own",
    "vllm.skip_tokenizer_init": "the server speaks token ids",
    "sglang.model_path": "model.path",
    "sglang.dtype": "model.dtype",
    "sglang.random_seed": "each completion has a seed of its own",
    "sglang.skip_tokenizer_init": "the server speaks token ids",
    "sglang.**": "no server of SGLang in this run",
    "vllm.**": "an argument of its servers; pass others in inference.engine.extra_args",
    "launcher.**": "processes are started by actors up",
}
"""Reasons of keys without influence."""
REFUSED = {
    "enable_offload": "trainer and engine keep their memory",
    "total_train_n_seqs": "the length of a run is a number of steps",
    "stats_logger.**": "no tracker is built; metrics.jsonl has the figures",
    "critic.**": "no critic is built",
    "teacher.**": "see trainer.distillation of type joint",
    "dynamic_bs": "a step has a number of groups",
    "rollout.agent.**": "environments with turns: environments[].type python",
    "rollout.openai.**": "environments with turns: environments[].type python",
    "actor.init_from_scratch": "training starts from a model",
    "actor.enable_tree_training": "not built",
    "actor.offload": "the trainer keeps its memory",
    "actor.use_kernels": "not built",
    "gconfig.**": "requests have no such parameter here",
}
"""Reasons of keys without counterpart."""


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
        _join(tree, map_of(path))
    for word in words:
        _put(tree, word)
    values = flat(tree)
    given = {key: _resolved(value, values, key, ()) for key, value in values.items()}
    check_types(given, KEYS)
    job = Import(given, defaults(KEYS), f"AReaL {options.version or '1.0.4'}", options)
    _convert(job)
    return job


def _join(tree: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _join(tree[key], value)
        else:
            tree[key] = value


def _put(tree: dict[str, Any], word: str) -> None:
    name, equals, text = word.lstrip("+").partition("=")
    if not equals:
        raise ConfigError(f"{word}: is no file and no word key=value of AReaL")
    node, *parts = tree, *name.split(".")
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{word}: there is a value where it needs a section")
    try:
        node[parts[-1]] = parse(text)
    except yaml.YAMLError:
        node[parts[-1]] = text


def _resolved(value: Any, values: Mapping[str, Any], key: str, path: tuple[str, ...]) -> Any:
    """Return a value with its references `${a.b}` and `${oc.env:NAME,default}` replaced."""
    if isinstance(value, list):
        return [_resolved(item, values, key, path) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if key in path:
        raise ConfigError(f"{path[0]}: refers to itself: {' → '.join([*path, key])}")

    def found(name: str) -> Any:
        if name.startswith("oc.env:"):
            variable, comma, default = name.removeprefix("oc.env:").partition(",")
            if not comma:
                raise ConfigError(f"{key}: needs the environment variable {variable}, not read here; give {key}=VALUE")
            return parse(default)
        if name in values:
            return _resolved(values[name], values, name, (*path, key))
        if name in KEYS:
            return KEYS[name].default
        raise ConfigError(f"{key}: refers to {name}, which no file has; give {name}=VALUE")

    if match := re.fullmatch(r"\$\{([^${}]+)\}", value):
        return found(match[1])
    return re.sub(r"\$\{([^${}]+)\}", lambda match: str(found(match[1])), value)


def parse_allocation(text: str) -> dict[str, dict[str, int]]:
    """Return the sizes of each part of an allocation: `sglang:d4t2+fsdp:d4` gives {sglang: {d: 4, t: 2}, …}.

    Raises:
        ConfigError: the text is no allocation.
    """
    found = {}
    for number, part in enumerate(text.split("+")):
        match = re.fullmatch(r"(?:(\w+)(?:\[\w+\])?:)?((?:[dptce]\d+)+)", part.strip())
        if match is None:
            raise ConfigError(f"allocation {text!r}: {part!r} is not of the form fsdp:d4 or vllm:d2t2")
        sizes = {letter: int(count) for letter, count in re.findall(r"([dptce])(\d+)", match[2])}
        if 0 in sizes.values():
            raise ConfigError(f"allocation {text!r}: a size is 0")
        found[match[1] or ("fsdp" if number else "sglang")] = sizes
    return found


def _convert(job: Import) -> None:
    """Report each key once, section by section."""
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
    _convert_loss(job)
    _convert_rewards(job)
    _convert_optimizer(job, steps)
    _convert_machines(job)
    _convert_timers(job, per_epoch)
    job.sweep({}, {key: reason for key, reason in REFUSED.items() if "**" not in key})
    job.sweep(IRRELEVANT, REFUSED)
    job.finish(list(KEYS))


def _convert_model(job: Import) -> None:
    if job.value("actor.path"):
        job.rename("actor.path", "model.path")
    else:
        job.ask("model.path", "the model; actor.path")
    if job.value("actor.dtype") in ("bfloat16", "float32"):
        job.rename("actor.dtype", "model.dtype")
    else:
        job.refuse("actor.dtype", "bfloat16 or float32 here", "bfloat16 is used")
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
    return text is not None and text != "" and "sglang" in parse_allocation(text)


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
    job.rename("rollout.max_head_offpolicyness", "packer.max_async_level")
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


def _convert_loss(job: Import) -> None:
    is_decoupled, recomputes = job.value("actor.use_decoupled_loss"), job.value("actor.recompute_logprob")
    flags = ["actor.use_decoupled_loss", "actor.recompute_logprob", "actor.use_sapo_loss"]
    old, threshold = ("step_start" if recomputes else "inference"), job.value("actor.m2_threshold")
    if job.value("actor.use_sapo_loss"):
        if is_decoupled:
            raise ConfigError("actor.use_sapo_loss: AReaL needs use_decoupled_loss: false with it")
        job.convert(flags, {"trainer.loss.type": "sapo", "trainer.loss.old_logprobs": old}, f"sapo, old of {old}")
        job.run.set("trainer.loss.average", "step_tokens", "AReaL's average")
        job.rename("actor.sapo_tau_pos", "trainer.loss.temperature_pos")
        job.rename("actor.sapo_tau_neg", "trainer.loss.temperature_neg")
    elif is_decoupled:
        kind = "decoupled" if threshold is None else "m2po"
        job.convert(flags, {"trainer.loss.type": kind}, kind)
        method = job.value("actor.prox_logp_method")
        if method in ("recompute", "loglinear"):
            job.rename("actor.prox_logp_method", "trainer.loss.prox_logp_method")
        else:
            job.convert(
                "actor.prox_logp_method", {"trainer.loss.prox_logp_method": "recompute"}, f"{method}: recompute"
            )
        if threshold is not None:
            job.rename("actor.m2_threshold", "trainer.loss.m2_threshold")
        _convert_rejection(job)
    else:
        job.convert(flags, {"trainer.loss.type": "dapo", "trainer.loss.old_logprobs": old}, f"dapo, old of {old}")
    if not job.value("actor.use_sapo_loss"):
        job.rename("actor.eps_clip", "trainer.loss.epsilon")
        for theirs, ours in (("eps_clip_higher", "epsilon_high"), ("c_clip", "dual_clip")):
            if job.value(f"actor.{theirs}") is not None:
                job.rename(f"actor.{theirs}", f"trainer.loss.{ours}")
        job.rename("actor.importance_sampling_level", "trainer.loss.importance_sampling_level")
        if not is_decoupled and job.value("actor.importance_sampling_level") == "sequence":
            job.run.set("trainer.loss.compat.advantage_level", "completion", "AReaL's advantage of a sequence")
    for name in LOSS_KEYS:
        job.settle(f"actor.{name}", "without effect on this loss")
    for key in job.keys_below("actor.rejection_sampling"):
        job.settle(key, "only the decoupled loss reads it")
    job.rename("actor.ppo_n_minibatches", "trainer.num_minibatches", job.value("actor.ppo_n_minibatches") or 1)
    _convert_reference(job, "inference" if is_decoupled or not recomputes else "step_start")


def _convert_reference(job: Import, source: str) -> None:
    """Write the KL in the reward, against the policy that `source` names."""
    if (beta := job.value("actor.kl_ctl")) > 0 and job.has("ref"):
        job.rename("actor.kl_ctl", "trainer.reference.beta")
        job.rename("actor.kl_estimator", "trainer.reference.estimator")
        for name, value in (("place", "reward"), ("old_logprobs", source), ("max_kl", 10.0)):
            job.run.set(f"trainer.reference.{name}", value, "AReaL's KL in the reward")
    else:
        job.settle("actor.kl_ctl", "0: no KL" if beta == 0 else "without ref: there is no reference")
        job.settle("actor.kl_estimator", "no KL")


def _convert_rejection(job: Import) -> None:
    section, target, cap = "actor.rejection_sampling", "trainer.loss.rejection_sampling", "actor.behav_imp_weight_cap"
    if job.has(section) and job.given.get(section, {}) is not None:
        for name in ("level", "action", "metric", "agg", "upper"):
            job.rename(f"{section}.{name}", f"{target}.{name}")
        if job.value(f"{section}.lower") is not None:
            job.rename(f"{section}.lower", f"{target}.lower")
        job.settle(f"{section}.lower", "empty: none")
    elif job.given.get(cap) is not None:
        job.convert(cap, {f"{target}.upper": job.given[cap], f"{target}.action": "mask", f"{target}.metric": "ratio"},
                    f"ratios above {job.given[cap]:g} are masked")  # fmt: skip


def _convert_rewards(job: Import) -> None:
    for theirs, ours in (("reward_bias", "bias"), ("reward_scaling", "scale"), ("reward_clip", "clip")):
        job.rename(f"actor.{theirs}", f"reward.shaping.{ours}")
    if job.value("actor.overlong_reward_penalty"):
        job.refuse("actor.overlong_reward_penalty", "a function of its own here", "add the function `overlong`")
    for name in ("overlong_reward_penalty", "overlong_tokens", "overlong_penalty_factor"):
        job.settle(f"actor.{name}", "no penalty" if not job.value("actor.overlong_reward_penalty") else "see overlong")
    job.rename("actor.mask_no_eos_with_zero", "reward.mask_no_eos_with_zero")
    discount = job.value("actor.discount") * job.value("actor.gae_lambda")
    norm = _norm(job, "actor.reward_norm")
    kind: dict[str, Any]
    if norm is None:
        kind = {"type": "gae", "discount": job.value("actor.discount"), "gae_lambda": job.value("actor.gae_lambda")}
    elif norm["mean_level"] == norm["std_level"] == "group" and not norm["mean_leave1out"] and discount == 1:
        kind = {"type": "zscore", "std": "unbiased" if norm["std_unbiased"] else "population", "eps": norm["eps"]}
    elif norm["mean_level"] == "group" and norm["std_level"] == "none" and discount == 1:
        kind = {"type": "rloo" if norm["mean_leave1out"] else "mean"}
    elif discount == 1:
        kind = {"type": "norm", **norm}
    else:
        scaled = "zscore" if norm["std_level"] != "none" else "mean"
        kind = {"type": "gae", "discount": job.value("actor.discount"), "gae_lambda": job.value("actor.gae_lambda"),
                "reward_norm": scaled}  # fmt: skip
    keys = [key for key in job.keys_below("actor.reward_norm") if not key.endswith(".group_size")]
    keys += ["actor.reward_norm", "actor.discount", "actor.gae_lambda"]
    job.convert(keys, {f"reward.advantage.{name}": value for name, value in kind.items()}, f"{kind}")
    normed = _norm(job, "actor.adv_norm")
    if normed is None:
        job.settle("actor.adv_norm", "empty: none")
        return
    for name in NORM_KEYS:
        key, target = f"actor.adv_norm.{name}", f"reward.adv_norm.{name}"
        if job.given.get(key) is None:
            job.convert(key, {target: normed[name]}, f"{normed[name]}")
        else:
            job.rename(key, target)
    job.settle("actor.adv_norm", "with the defaults of AReaL")


def _norm(job: Import, section: str) -> dict[str, Any] | None:
    """Return the keys of a normalisation, or None. A level that is null is `none`."""
    if not job.has(section) or job.given.get(section, {}) is None:
        return None
    base = {"mean_level": "batch", "mean_leave1out": False, "std_level": "batch", "std_unbiased": True, "eps": 1e-5}
    found = {name: job.given.get(f"{section}.{name}", value) for name, value in base.items()}
    for name in ("mean_level", "std_level"):
        found[name] = found[name] or "none"
        if found[name] not in ("batch", "group", "none"):
            raise ConfigError(f"{section}.{name}: {found[name]!r} is none of batch, group, null")
    return found


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


def _convert_machines(job: Import) -> None:
    parts = parse_allocation(job.given["allocation_mode"]) if job.given.get("allocation_mode") else {}
    engine = parse_allocation(job.given["rollout.backend"]) if job.given.get("rollout.backend") else parts
    actor = parse_allocation(job.given["actor.backend"]) if job.given.get("actor.backend") else parts
    served = next((name for name in engine if name in ("sglang", "vllm")), "")
    trained = next((name for name in actor if name not in ("sglang", "vllm")), "")
    texts = []
    if served:
        sizes = engine[served]
        job.run.set("up.inference", sizes.get("d", 1), f"{served}: d{sizes.get('d', 1)}")
        job.run.set("inference.engine.tensor_parallel_size", sizes.get("t", 1), f"{served}: t{sizes.get('t', 1)}")
        texts.append(f"{sizes.get('d', 1)} engines of {sizes.get('t', 1)} GPUs")
    else:
        job.ask("up.inference", "number of engines; rollout.backend")
    if trained:
        sizes = actor[trained]
        ranks = math.prod(sizes.values())
        job.run.set("trainer.num_ranks", ranks, f"{trained}: {sizes}")
        job.run.set("trainer.sharding", "fsdp" if ranks > 1 else "none", "as in AReaL")
        texts.append(f"{ranks} ranks")
        if any(count > 1 for letter, count in sizes.items() if letter != "d"):
            job.note(f"{trained} {sizes}: ranks are data-parallel here; p, t, c and e have no counterpart")
    else:
        job.ask("trainer.num_ranks", "trainer processes; actor.backend")
    job.convert(["rollout.backend", "actor.backend", "allocation_mode"], {}, ", ".join(texts) or "empty")
    if served == "sglang":
        _convert_sglang(job)
    else:
        _convert_vllm(job)
    _convert_channel(job, served)


def _convert_sglang(job: Import) -> None:
    """Write the keys of servers of SGLang."""
    job.run.set("inference.engine.type", "sglang", "as in AReaL")
    job.run.set("inference.engine.deterministic", False, "AReaL's servers sample without seeds")
    if job.value("sglang.context_length") is not None:
        job.rename("sglang.context_length", "inference.engine.max_model_len")
    if job.value("sglang.mem_fraction_static") is not None:
        job.rename("sglang.mem_fraction_static", "inference.engine.mem_fraction_static")
    for key in ("sglang.context_length", "sglang.mem_fraction_static"):
        job.settle(key, "empty: SGLang's choice")
    words: list[str] = []
    for key in job.keys_below("sglang"):
        name, value = key.partition(".")[2], job.given[key]
        if job.is_reported(key) or key in IRRELEVANT:
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False or value == [] or value == "":
            job.settle(key, "switched off")
        elif flag in SET_BY_US or "." in name:
            job.settle(key, "set by the engine here")
        else:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [flag, *map(str, values)]
            job.convert(key, {"inference.engine.extra_args": list(words)}, "an argument of the server")
    if words:
        job.run.set("inference.engine.extra_args", words, "sglang")


def _convert_vllm(job: Import) -> None:
    """Write the keys of servers of vLLM."""
    job.run.set("inference.engine.type", "vllm", "the engine that is started here")
    if job.value("vllm.max_model_len") is not None:
        job.rename("vllm.max_model_len", "inference.engine.max_model_len")
    job.rename("vllm.gpu_memory_utilization", "inference.engine.gpu_memory_utilization")
    job.rename("vllm.enforce_eager", "inference.engine.enforce_eager")
    cached = not job.value("vllm.no_enable_prefix_caching")
    job.convert(
        "vllm.no_enable_prefix_caching", {"inference.engine.enable_prefix_caching": cached}, f"not {not cached}"
    )
    if job.has("vllm.max_num_seqs"):
        words = ["--max-num-seqs", str(job.given["vllm.max_num_seqs"])]
        job.convert("vllm.max_num_seqs", {"inference.engine.extra_args": words}, " ".join(words))
    job.settle("vllm.max_lora_rank", "the engine takes the rank of model.lora")
    job.settle("vllm.max_loras", "the engine holds the old and the new version")


def _convert_channel(job: Import, served: str) -> None:
    """Write the channel of the weights."""
    mode = job.value("actor.weight_update_mode")
    if mode not in ("xccl", "nccl", "disk"):
        job.refuse("actor.weight_update_mode", f"{mode} is not built", "filesystem is used")
        job.run.set("weights.channel", "filesystem", f"in the place of {mode}")
    else:
        channel = "filesystem" if mode == "disk" or served == "sglang" else "rendezvous"
        text = f"{mode}: {channel}" + (", the channel of SGLang's servers here" if served == "sglang" else "")
        job.convert("actor.weight_update_mode", {"weights.channel": channel}, text)


def _convert_timers(job: Import, per_epoch: int | None) -> None:
    """Write the intervals of checkpoints and evaluations."""
    for timer in ("saver", "recover", "evaluator"):
        job.refuse_unless(f"{timer}.freq_secs", (None,), "intervals are numbers of steps here")
    has_recover = job.given.get("recover.mode") not in (None, "disabled")
    timers = ["saver", "recover"] if has_recover else ["saver"]
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
            is_open = per_epoch is None and job.value(f"{timer}.freq_{unit}") is not None
            job.settle(f"{timer}.freq_{unit}", "waits for --rows" if is_open else "no interval")


def _convert_evaluation(job: Import, per_epoch: int | None) -> None:
    """Write the evaluation: on rows of its own, sampled like training unless eval_gconfig says otherwise."""
    if not job.has("valid_dataset") or job.given.get("valid_dataset", {}) is None or not job.has("evaluator"):
        job.run.set("eval.num_prompts", 0, "no evaluation")
        job.settle("evaluator.eval_before_train", "no evaluation")
        return
    path = job.given.get("valid_dataset.path") or ""
    if path.endswith(".jsonl"):
        job.rename("valid_dataset.path", "environments.0.eval_path")
    else:
        job.ask("environments.0.eval_path", f"the held-out rows {path} as JSON Lines")
        job.settle("valid_dataset.path", "export the data set")
    if _interval(job, "evaluator", per_epoch) is None and per_epoch is None:
        job.ask("eval.every_steps", "steps of an epoch; --rows N")
    job.rename("evaluator.eval_before_train", "eval.at_start")
    job.run.set("eval.num_prompts", 1_000_000, "all rows; fewer give all")
    job.run.set("eval.exact_match", None, "AReaL measures rewards alone")
    for name, target in (("n_samples", "eval.completions_per_prompt"), ("temperature", "eval.temperature")):
        key = f"eval_gconfig.{name}"
        if job.has(key):
            job.rename(key, target)
        else:
            job.run.set(target, job.value(f"gconfig.{name}"), "eval_gconfig is a copy of gconfig")


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
