"""Keys of TRL's configurations other than batches, data and rewards: model, adapters, sampling, objective, engine."""

from pathlib import Path
from typing import Any

from actors.imports.files import map_of
from actors.imports.huggingface import (
    ATTENTION,
    ROOM,
    UNBOUNDED,
    Pace,
    adapter_forms,
    embedded_engine,
    lora_targets,
    moving_reference,
    sharding,
)
from actors.imports.job import Import
from actors.imports.trl.inputs import Inputs
from schemas.errors import ConfigError

_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
_LEVELS = (*_CLIPPED, "cispo", "sapo")
_STEP_TOKENS = ("dapo", "cispo", "vespo")
_SHARDED = ("FSDP", "zero2", "zero3", "fsdp1", "fsdp2")


def model(job: Import, inputs: Inputs) -> Any:
    """Write the model, its precision and its attention, and return its name."""
    key = "model" if "model" in job.given else "model_name_or_path"
    name = job.given.get(key)
    if name is None:
        job.ask("model.path", "no file names the model; --model NAME")
    else:
        job.rename(key, "model.path")
    job.settle("model_name_or_path", f"{key} decides")
    for revision in ("model_revision", "model_init_kwargs.revision"):
        job.refuse_unless(revision, ("main", None), "the newest revision is loaded here", "give a directory as model")
    _precision(job)
    keys = [one for one in ("model_init_kwargs.attn_implementation", "attn_implementation") if one in job.given]
    kind = job.given[keys[0]] if keys else None
    if keys and kind in ATTENTION:
        ours = ATTENTION[kind]
        job.convert(keys, {"model.attention": ours}, f"{kind} is {ours}")
    for key in keys:
        job.settle(key, "the same attention by another implementation; here model.attention auto")
    trust = [one for one in ("trust_remote_code", "model_init_kwargs.trust_remote_code") if job.given.get(one)]
    job.convert(trust, {"model.trust_remote_code": True} if trust else {}, "true")
    for key in ("trust_remote_code", "model_init_kwargs.trust_remote_code"):
        job.settle(key, "false is the default here")
    job.rename("gradient_checkpointing", "model.gradient_checkpointing")
    if job.value("torch_compile"):
        job.convert("torch_compile", {"model.compile": True}, "true")
    job.settle("torch_compile", "switched off")
    if job.value("use_cpu"):
        job.convert("use_cpu", {"model.device": "cpu"}, "cpu")
    job.settle("use_cpu", "switched off")
    return name if isinstance(name, str) else None


def _precision(job: Import) -> None:
    loaded = ("model_init_kwargs.dtype", "model_init_kwargs.torch_dtype", "dtype", "torch_dtype")
    given = [key for key in loaded if key in job.given and not job.unreadable([key])]
    dtype = str(job.given[given[0]] if given else job.defaults["dtype"]).rpartition(".")[2]
    half = job.value("fp16")
    mixed = (not half) if job.value("bf16") is None else job.value("bf16")
    mixed = mixed or (str(job.given.get("accelerate.mixed_precision", "")) == "bf16" and "bf16" not in job.given)
    if half or dtype in ("float16", "half"):
        for key in ("fp16", *given):
            job.refuse(key, "float16 has no counterpart; the run computes in bfloat16", "set model.dtype")
        job.run.set("model.dtype", "bfloat16", "float16 in the origin")
    else:
        ours = "bfloat16" if mixed or dtype in ("bfloat16", "auto") else "float32"
        text = f"weights loaded as {dtype}, {'bfloat16 autocast' if mixed else 'no autocast'}: computed in {ours}"
        if dtype in ("bfloat16", "auto"):
            text += "; trained weights are float32 here"
        job.convert([*given, "bf16", "fp16"], {"model.dtype": ours}, text)
    if job.given.get("cast_lm_head_to_fp32"):
        job.convert("cast_lm_head_to_fp32", {"model.head_dtype": "float32"}, "float32, in the engine too")
    job.settle("cast_lm_head_to_fp32", "switched off")
    for key in (*loaded, "bf16", "fp16"):
        job.settle(key, f"model.dtype is {job.run.get('model.dtype')}")


def adapters(job: Import, inputs: Inputs, name: Any) -> None:
    """Write LoRA and the quantisation of the base model."""
    direct = [key for key in job.given if key == "peft_config" or key.startswith("peft_config.")]
    if direct:
        _lora(job, name, "peft_config.", "", {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0})
        if job.unreadable(["peft_config"]):
            job.convert("peft_config", {"model.lora.rank": 1}, "")
        job.settle("peft_config", "peft's defaults: rank 8, alpha 8")
    elif job.value("use_peft") and inputs.uses_model_arguments:
        _lora(job, name, "", "lora_", {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05})
        job.convert("use_peft", {"model.lora.rank": job.value("lora_r")}, "adapters are trained")
    reason = (
        "without use_peft all weights are trained" if inputs.uses_model_arguments else "the script does not read it"
    )
    for key in [key for key in job.defaults if key.startswith("lora_")] + ["use_peft", "use_rslora", "use_dora"]:
        job.settle(key, reason)
    _quantization(job, inputs)


def _lora(job: Import, name: Any, prefix: str, stem: str, own: dict[str, Any]) -> None:
    """Write the keys of an adapter.

    Args:
        job: the import.
        name: the model.
        prefix: start of the keys, with a dot.
        stem: start of the names of ModelConfig, which LoraConfig's do not have.
        own: defaults of rank, alpha and dropout.
    """
    names = {one: prefix + (one if one.startswith("lora_") else stem + one) for one in own}
    job.defaults |= {names[one]: value for one, value in own.items()}
    job.rename(names["r"], "model.lora.rank")
    job.rename(names["lora_alpha"], "model.lora.alpha")
    job.rename(names["lora_dropout"], "model.lora.dropout")
    key = f"{prefix}{stem}target_modules"
    targets = job.given.get(key)
    if job.unreadable([key]):
        job.rename(key, "model.lora.target_modules")
    elif targets in ("all-linear", ["all-linear"]):
        job.convert(key, {"model.lora.target_modules": "all-linear"}, "all-linear")
    elif targets:
        words = targets if isinstance(targets, list) else [targets]
        if any("," in str(word) for word in words):
            job.note(f"{key}: a comma is part of {words}; the origin looks for modules of such names")
        # ModelConfig makes a text of a list of one, and peft reads a text as an expression
        regular = (
            len(words) == 1 and (stem or isinstance(targets, str)) and any(sign in str(words[0]) for sign in ".*(|[\\")
        )
        if regular:
            job.rename(key, "model.lora.target_modules", str(words[0]), "an expression that whole names match")
        else:
            job.convert(key, {"model.lora.target_modules": [str(word) for word in words]}, "names of modules")
    elif found := lora_targets(job, name):
        job.convert(key, {"model.lora.target_modules": found}, "none given: peft's table for this family")
    else:
        job.convert(key, {"model.lora.target_modules": ["all"]}, "none given: peft's table")
        job.ask("model.lora.target_modules", f"modules of peft's table for {name}; model.lora.target_modules=[…]")
    job.refuse_unless(f"{prefix}{stem}target_parameters", (None, [], ""), "adapters are on linear layers alone here")
    forms = {one: f"{prefix}{one}" for one in ("use_rslora", "use_dora", "init_lora_weights")}
    forms["modules_to_save"] = f"{prefix}{stem}modules_to_save"
    adapter_forms(job, forms, "use_vllm" not in job.defaults or bool(job.value("use_vllm")))
    job.refuse_unless(f"{prefix}bias", "none", "biases stay frozen here")
    for one in ("task_type", "inference_mode", "peft_type"):
        job.settle(f"{prefix}{stem}{one}", "a causal language model, trained")
    for one in [one for one in job.given if prefix and one.startswith(prefix) and not job.is_reported(one)]:
        job.refuse(one, "no counterpart")


def _quantization(job: Import, inputs: Inputs) -> None:
    direct = any(key.startswith("quantization_config.") for key in job.given)
    prefix = "quantization_config." if direct else ""
    four, eight = f"{prefix}load_in_4bit", f"{prefix}load_in_8bit"
    kind = job.given.get(f"{prefix}bnb_4bit_quant_type", "fp4" if direct else "nf4")
    nested = f"{prefix}bnb_4bit_use_double_quant" if direct else "use_bnb_nested_quant"
    is_on = job.given.get(four) is True and (direct or inputs.uses_model_arguments)
    if is_on and kind == "nf4":
        double = bool(job.given.get(nested, False))
        job.convert([four, f"{prefix}bnb_4bit_quant_type"], {"model.quantization.type": "nf4"}, "four bits, nf4")
        job.convert(nested, {"model.quantization.double_quant": double}, f"{double}")
        if job.run.get("model.lora.rank") is None:
            raise ConfigError(f"{four}: a quantised model can't be trained without adapters; set use_peft")
    elif is_on:
        job.refuse(four, f"no {kind} here; the base model is not quantised", "set model.quantization to nf4")
    job.refuse_unless(eight, False, "no quantisation of eight bits here", "set model.quantization to nf4")
    for key in [key for key in job.given if prefix and key.startswith(prefix)]:
        job.settle(key, "the base model is computed in model.dtype")
    for key in (
        "load_in_4bit",
        "load_in_8bit",
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
        "bnb_4bit_quant_storage",
    ):
        job.settle(key, "the base model is not quantised")
    job.refuse("quantization_config", "no quantisation that is known here")


def sampling(job: Import, version: tuple[int, int]) -> None:
    """Write sampling and the lengths of rows."""
    job.rename("max_completion_length", "rollout.max_tokens")
    job.rename("temperature", "rollout.temperature")
    job.rename("top_p", "rollout.top_p")
    # releases without the key sampled from vLLM with its default, all tokens
    top_k = 0 if version < (0, 16) and job.value("use_vllm") and "top_k" not in job.given else job.value("top_k")
    if version < (0, 16) and job.value("temperature") not in (None, 1.0):
        job.note(
            "before TRL 0.16 the loss had logprobs of temperature 1, whatever the temperature of sampling; here they "
            "have that of sampling"
        )
    if top_k is None or top_k <= 0:
        job.convert("top_k", {"rollout.top_k": 0}, f"{top_k}: all tokens")
    else:
        job.rename("top_k", "rollout.top_k")
    if job.value("min_p") is None:
        job.convert("min_p", {"rollout.min_p": 0.0}, "none: no limit")
    else:
        job.rename("min_p", "rollout.min_p")
    if job.value("repetition_penalty") is None:
        job.convert("repetition_penalty", {"rollout.repetition_penalty": 1.0}, "none: 1")
    else:
        job.rename("repetition_penalty", "rollout.repetition_penalty")
    job.settle("generation_kwargs", "empty")
    has_vllm = "use_vllm" not in job.defaults or bool(job.value("use_vllm"))
    _generation(job, _OF_VLLM if has_vllm else _OF_TRANSFORMERS)
    _lengths(job)


_SHARED = {name: name for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
_OF_VLLM = _SHARED | {
    name: name for name in ("frequency_penalty", "presence_penalty", "min_tokens", "stop", "ignore_eos")
}
_OF_TRANSFORMERS = _SHARED | {"min_new_tokens": "min_tokens", "stop_strings": "stop"}
"""Keys of `rollout` by the names of generation_kwargs, which go to vLLM's or to transformers' parameters."""


def _generation(job: Import, names: dict[str, str]) -> None:
    """Write generation_kwargs, which take precedence over keys of the same name."""
    for key in job.keys_below("generation_kwargs"):
        name, value = key.partition(".")[2], job.given[key]
        if name in ("temperature", "max_tokens", "max_new_tokens"):
            job.refuse(key, "the origin's loss has another value of it", "set the key of the configuration")
        elif name in ("seed", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            job.settle(key, "without influence on the distribution of tokens")
        elif name not in names:
            job.refuse(key, "requests carry no such key here")
        elif value is None:
            job.settle(key, "empty")
        elif names[name] == "stop":
            texts = [value] if isinstance(value, str) else value
            text = "functions get the completion without the text here, and it counts as ended"
            job.rename(key, "rollout.stop", texts, text)
        elif name == "top_k" and isinstance(value, int) and value < 0:
            job.convert(key, {"rollout.top_k": 0}, f"{value}: all tokens")
        else:
            job.rename(key, f"rollout.{names[name]}")


def _lengths(job: Import) -> None:
    tokens, limit = job.value("max_completion_length"), job.value("max_prompt_length")
    context = next((key for key in ("vllm_max_model_length", "vllm_max_model_len") if job.given.get(key)), "")
    if limit is not None:
        length, text = limit + tokens, f"max_prompt_length {limit} + max_completion_length {tokens} = {limit + tokens}"
    elif context and job.given[context] > tokens:
        length, text = job.given[context], f"{context} {job.given[context]}"
    else:
        length = tokens + ROOM
        text = f"max_completion_length {tokens} + {ROOM} for the prompt, which TRL does not limit = {length}"
    job.run.set("packer.sequence_len", length, text)


def objective(job: Import, trainer: str, version: tuple[int, int], pace: Pace) -> None:
    """Write loss, advantage, reference and corrections.

    Raises:
        ConfigError: TRL refuses the values too.
    """
    job.run.set("reward.on_error", "fail", "an error of a reward function ends the run")
    if trainer == "async":
        _async_objective(job)
    elif trainer == "rloo":
        _rloo_objective(job)
    else:
        _loss(job, pace.updates)
        _advantage(job)
        _reference(job)
        _correction(job)
        _entropy(job)
        if job.is_set("off_policy_mask_threshold"):
            job.rename("off_policy_mask_threshold", "trainer.off_policy_mask_threshold")
            job.run.set("trainer.loss.compat.off_policy_tokens", "count", "as in TRL")
        job.settle("off_policy_mask_threshold", "no mask")
    if trainer != "async":
        job.rename("mask_truncated_completions", "reward.mask_truncated_completions")
        moving_reference(job, pace)


def _loss(job: Import, updates: int) -> None:
    kind = job.value("loss_type")
    if kind not in _LOSSES:
        raise ConfigError(f"loss_type: {kind!r} must be one of {', '.join(_LOSSES)}")
    _loss_type(job, kind)
    job.run.set("trainer.loss.old_logprobs", "step_start", "the weights that sampled")
    low, high = job.value("epsilon"), job.value("epsilon_high")
    cap = low if high is None else high
    if kind == "cispo":
        job.convert(["epsilon_high", "epsilon"], {"trainer.loss.epsilon_high": cap}, f"cap of the ratio: {cap:g}")
    elif kind in _CLIPPED:
        job.rename("epsilon", "trainer.loss.epsilon")
        if job.is_set("epsilon_high"):
            job.rename("epsilon_high", "trainer.loss.epsilon_high")
    for key in ("epsilon", "epsilon_high"):
        job.settle(key, "empty: epsilon" if kind in _CLIPPED else f"loss {kind} does not clip")
    _ratio(job, kind, cap)
    for side in ("neg", "pos"):
        names = {f"sapo_temperature_{side}": f"temperature_{side}"} if kind == "sapo" else {}
        if kind == "vespo":
            names = {f"vespo_{name}_{side}": f"{name}_{side}" for name in ("k", "lambda")}
        for theirs, ours in names.items():
            job.rename(theirs, f"trainer.loss.{ours}")
        for theirs in (f"sapo_temperature_{side}", f"vespo_k_{side}", f"vespo_lambda_{side}"):
            job.settle(theirs, f"loss {kind} does not read it")
    if kind in _STEP_TOKENS and updates > 1:
        job.run.set("trainer.loss.compat.loss_normalizer", "step_mean", "each update by the generation's mean tokens")


def _loss_type(job: Import, kind: str) -> None:
    """Write the type of the loss. Micro-batches of the origin are a device's samples, here rows of tokens."""
    if kind == "bnpo" and _is_one_micro_batch(job):
        job.convert(
            "loss_type", {"trainer.loss.type": "dapo"}, "bnpo of a single micro-batch: its tokens are the update's"
        )
        return
    job.rename("loss_type", "trainer.loss.type")
    if kind == "bnpo":
        job.note(
            "loss_type bnpo is the mean over micro-batches of their token means; micro-batches are filled to "
            "packer.sequence_len tokens here, so that the weights of tokens differ. dapo has no such average"
        )


def _is_one_micro_batch(job: Import) -> bool:
    """Return whether an update is computed in one piece in the origin."""
    accumulation = "gradient_accumulation_steps"
    return not job.unreadable([accumulation]) and job.value(accumulation) == 1 == job.run.get("trainer.num_ranks")


def _ratio(job: Import, kind: str, cap: float) -> None:
    """Write the keys of the ratio other than its clip."""
    delta = job.value("delta")
    if kind in _CLIPPED and (job.unreadable(["delta"]) or (delta is not None and delta > max(1 + cap, 1))):
        job.rename("delta", "trainer.loss.delta")
    elif delta is not None and kind in _CLIPPED:
        job.refuse("delta", f"must be above 1 + epsilon_high = {1 + cap:g} here", "raise it, or leave it out")
    job.settle("delta", f"loss {kind} does not read it")
    level = job.value("importance_sampling_level")
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance_sampling_level: {level!r} must be token or sequence")
    if kind in _LEVELS:
        job.rename("importance_sampling_level", "trainer.loss.importance_sampling_level")
    job.settle("importance_sampling_level", f"loss {kind} has the ratio of the completion")


def _advantage(job: Import) -> None:
    scale, together = job.value("scale_rewards"), job.value("multi_objective_aggregation")
    scale = {True: "group", False: "none", "true": "group", "false": "none", "True": "group", "False": "none"}.get(
        scale, scale
    )
    if together not in ("sum_then_normalize", "normalize_then_sum"):
        raise ConfigError(f"multi_objective_aggregation: {together!r} must be sum_then_normalize or normalize_then_sum")
    if together == "normalize_then_sum":
        job.convert(
            "multi_objective_aggregation",
            {"reward.advantage.type": "gdpo", "reward.advantage.std": "unbiased", "reward.advantage.eps": 1e-4},
            "each function by itself, then the sum: gdpo with TRL's eps 1e-4",
        )
        job.settle("scale_rewards", "normalize_then_sum decides")
        return
    job.settle("multi_objective_aggregation", "the weighted sum is normalised, as here")
    kinds = {"group": "zscore", "batch": "batch_std", "none": "mean"}
    if scale not in kinds:
        raise ConfigError(f"scale_rewards: {scale!r} must be one of group, batch, none")
    targets: dict[str, Any] = {"reward.advantage.type": kinds[scale]}
    if scale != "none":
        targets |= {"reward.advantage.std": "unbiased", "reward.advantage.eps": 1e-4}
    job.convert("scale_rewards", targets, f"{scale} is {kinds[scale]}")


def _reference(job: Import) -> None:
    beta = job.value("beta")
    if not beta and not job.unreadable(["beta"]):
        job.settle("beta", "0: no reference")
        job.settle("use_bias_correction_kl", "no reference")
        return
    job.rename("beta", "trainer.reference.beta")
    job.run.set("trainer.reference.estimator", "k3", "TRL's estimator")
    job.rename("use_bias_correction_kl", "trainer.reference.bias_correction")
    job.run.set("trainer.reference.switches", "escape", "corrections leave the KL alone in TRL")


def _correction(job: Import) -> None:
    keys = [f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "cap", "clip_min")]
    on, mode, high, cap, low = (job.value(key) for key in keys)
    if not (job.value("use_vllm") and on):
        for key in keys:
            job.settle(key, "no correction" if job.value("use_vllm") else "only with use_vllm")
        return
    # the sequence's ratio is exp of the sum of its log ratios in TRL
    action, level = {
        "token_truncate": ("truncate", "token"),
        "token_mask": ("mask", "token"),
        "sequence_truncate": ("truncate", "sequence"),
        "sequence_mask": ("mask", "sequence"),
    }.get(mode, ("", ""))
    if not action:
        raise ConfigError(
            f"vllm_importance_sampling_mode: {mode!r} must be one of token_truncate, token_mask, sequence_truncate, "
            "sequence_mask"
        )
    if job.value("loss_type") == "vespo" and level == "sequence":
        raise ConfigError(
            f"vllm_importance_sampling_mode: {mode} with loss_type vespo, which TRL refuses; take token_truncate or "
            "token_mask"
        )
    targets: dict[str, Any] = {"trainer.correction.mode": action, "trainer.correction.level": level}
    if level == "sequence":
        targets |= {"trainer.correction.sequence_ratio": "sum", "trainer.correction.sequence_weight": "completion"}
    job.convert([keys[1], keys[0]], targets, f"{mode}: {action} by {level}")
    used, limit = (keys[3], cap) if cap is not None else (keys[2], high)
    if job.is_set(keys[4]) and not job.unreadable([keys[4], used]) and limit is not None and low >= limit:
        raise ConfigError(f"{keys[4]}: {low:g} must be below {used} {limit:g}, as in TRL")
    if action == "truncate" and limit is None and not job.is_set(keys[4]):
        raise ConfigError(f"{keys[2]}: {mode} needs a bound, or {keys[4]}, as in TRL")
    if limit is None:
        job.convert(used, {"trainer.correction.high": UNBOUNDED}, "no upper bound")
    else:
        job.rename(used, "trainer.correction.high")
    for key in keys[2:4]:
        job.settle(key, f"{used} decides")
    if job.is_set(keys[4]):
        job.rename(keys[4], "trainer.correction.low")
    job.settle(keys[4], "no lower bound")


def _entropy(job: Import) -> None:
    quantile = job.value("top_entropy_quantile")
    if quantile == 0:
        # 0 keeps one token in TRL; here the share must be above 0, and one token is kept in any case
        job.convert("top_entropy_quantile", {"trainer.top_entropy_quantile": 1e-9}, "0: the highest token alone")
    else:
        job.rename("top_entropy_quantile", "trainer.top_entropy_quantile")
    if not job.unreadable(["top_entropy_quantile"]) and quantile < 1:
        job.note(
            "top_entropy_quantile: the highest tokens of each micro-batch count; micro-batches are filled to "
            "packer.sequence_len tokens here, and are a device's samples in TRL"
        )
    job.rename("entropy_coef", "trainer.entropy_coef")
    is_adaptive = job.value("use_adaptive_entropy")
    # the tokens of a single micro-batch are those of the update, whose number the loss has unless it is the step's mean
    is_of_update = _is_one_micro_batch(job) and job.run.get("trainer.loss.compat.loss_normalizer") is None
    if (is_adaptive or job.value("entropy_coef")) and not is_of_update:
        job.run.set("trainer.loss.compat.entropy_average", "micro_batch_tokens", "as in TRL")
    names = {
        "entropy_target": "target",
        "entropy_coef_delta": "delta",
        "entropy_coef_min": "min_coef",
        "entropy_coef_max": "max_coef",
    }
    for theirs, ours in names.items():
        if is_adaptive:
            job.rename(theirs, f"trainer.adaptive_entropy.{ours}")
        job.settle(theirs, "only with use_adaptive_entropy")
    if is_adaptive:
        job.convert("use_adaptive_entropy", {}, "true: trainer.adaptive_entropy")
    job.settle("use_adaptive_entropy", "switched off")


def _rloo_objective(job: Import) -> None:
    job.run.set("trainer.loss.type", "rloo", "RLOOTrainer")
    job.run.set("trainer.loss.old_logprobs", "step_start", "the weights that sampled")
    job.rename("epsilon", "trainer.loss.epsilon")
    if job.is_set("epsilon_high"):
        job.rename("epsilon_high", "trainer.loss.epsilon_high")
    job.settle("epsilon_high", "empty: epsilon")
    job.run.set("reward.advantage.type", "rloo", "RLOOTrainer")
    if job.value("normalize_advantages"):
        targets = {"scale": "batch", "std_of": "advantages", "std": "unbiased", "eps": 1e-4}
        job.convert(
            "normalize_advantages",
            {f"reward.advantage.{key}": value for key, value in targets.items()},
            "over the advantages of the step",
        )
    job.settle("normalize_advantages", "switched off")
    if job.value("beta") or job.unreadable(["beta"]):
        job.rename("beta", "trainer.reference.beta")
        job.run.set("trainer.reference.estimator", "k1", "the KL of a completion is a sum of log ratios")
        job.run.set("trainer.reference.place", "group_reward", "RLOO takes the KL from the reward")
    job.settle("beta", "0: no reference")
    clip = job.value("reward_clip_range")
    if clip and not job.unreadable(["reward_clip_range"]):
        low, high = (float(one) for one in (clip if isinstance(clip, list | tuple) else [clip, clip]))
        if low == -high:
            job.convert("reward_clip_range", {"reward.shaping.clip": high}, f"−{high:g} to {high:g}")
        else:
            job.refuse("reward_clip_range", "bounds are symmetric here", "clip in the reward function")
    job.settle("reward_clip_range", "no clipping")


def _async_objective(job: Import) -> None:
    # the mean over the tokens of a micro-batch, then over the micro-batches of an update
    accumulation = job.value("gradient_accumulation_steps")
    kind = "bnpo" if accumulation > 1 else "dapo"
    job.run.set("trainer.loss.type", kind, f"mean over the tokens of each of {accumulation} micro-batches")
    job.run.set("trainer.loss.old_logprobs", "inference", "the ratio is to the engine")
    job.rename("epsilon", "trainer.loss.epsilon")
    if job.is_set("epsilon_high"):
        job.rename("epsilon_high", "trainer.loss.epsilon_high")
    job.settle("epsilon_high", "empty: epsilon")
    for key, value in (("type", "zscore"), ("std", "population"), ("eps", 1e-8)):
        job.run.set(f"reward.advantage.{key}", value, "AsyncGRPOTrainer")
    # TRL drops what is older; here groups also do not start so early that they would become older
    level = job.value("max_staleness")
    job.convert(
        "max_staleness",
        {"packer.max_async_level": level, "packer.max_off_policy_steps": level},
        f"groups older than {level} updates are dropped; sampling runs as far ahead",
    )
    job.run.set("packer.order", "arrival", "completions train as they arrive")
    job.refuse_unless("weight_sync_steps", 1, "engines get each version of the weights here")
    budget = job.value("token_budget")
    if budget and budget > job.value("max_completion_length"):
        job.rename("token_budget", "packer.sequence_len")
    job.settle("token_budget", "micro-batches are filled to packer.sequence_len")
    job.rename("request_timeout", "inference.request_timeout")
    job.rename("weight_sync_timeout", "weights.timeout")
    job.refuse_unless("max_inflight_tasks", -1, "the numbers of groups ahead follow from packer.max_async_level")
    job.settle("queue_maxsize", "groups ahead follow from packer.max_async_level")
    job.settle("heartbeat_stale_after_s", "workers have heartbeats of their own")
    job.settle("fork_threshold_tokens", "a turn that changes earlier tokens starts a new sample here")
    job.settle("ignore_data_skip", "a run resumes where it stopped")


def engine(job: Import, trainer: str, version: tuple[int, int], world: int | None) -> None:
    """Write the engine."""
    server = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")
    if trainer == "async":
        job.run.set("inference.engine.type", "vllm", "AsyncGRPOTrainer samples from vLLM")
        job.refuse(server[0], "the run starts vLLM itself", "set inference.engine.urls, if that server has its flags")
        _rest_of_vllm(job, server, "the run starts vLLM itself")
        return
    if job.given.get("use_sglang"):
        _sglang(job)
        _rest_of_vllm(job, server, "only with use_vllm")
        return
    job.settle("use_sglang", "switched off")
    if not job.value("use_vllm"):
        embedded_engine(job)
        _rest_of_vllm(job, server, "only with use_vllm")
        return
    job.convert("use_vllm", {"inference.engine.type": "vllm"}, "vLLM as a server of the run")
    mode = job.value("vllm_mode") if version >= (0, 18) else "server"
    keys = ["vllm_max_model_length", "vllm_max_model_len"]
    context = next((job.given[key] for key in keys if job.given.get(key)), None)
    if context is not None and context > job.value("max_completion_length"):
        job.convert(keys, {"inference.engine.max_model_len": context}, f"{context}")
    if mode == "colocate" or version < (0, 18):
        job.rename("vllm_gpu_memory_utilization", "inference.engine.gpu_memory_utilization")
        job.rename("vllm_tensor_parallel_size", "inference.engine.tensor_parallel_size")
    if mode == "colocate":
        job.convert("vllm_mode", {"up.colocate": True}, "trainer and vLLM share GPUs")
        size = job.value("vllm_tensor_parallel_size")
        if world is not None and world % size:
            raise ConfigError(f"vllm_tensor_parallel_size: {size} must divide the {world} processes")
        if world is not None and world > size:
            job.run.set("up.inference", world // size, f"{world} processes ÷ {size} per engine")
    job.settle("vllm_mode", "server: the run starts vLLM on GPUs of its own")
    for key in server:
        job.refuse(key, "TRL's server speaks another protocol", "the run starts vLLM itself")
    _rest_of_vllm(job, server, "belongs to the command of TRL's server")


def _sglang(job: Import) -> None:
    """Write the server of SGLang that a fork of TRL starts beside the trainer."""
    job.convert("use_sglang", {"inference.engine.type": "sglang"}, "a server of SGLang on a GPU of its own")
    job.run.set("inference.engine.deterministic", False, "that server samples without seeds")
    job.run.set("weights.channel", "filesystem", "the channel of SGLang's servers here")
    share = "sglang_gpu_memory_utilization"
    if job.given.get(share) is not None:
        job.rename(share, "inference.engine.mem_fraction_static")
    for key in ("sglang_device", "checkpoint_path", *(key for key in job.given if key.startswith("sglang_"))):
        job.settle(key, "the run starts the server, and gives it the weights by weights.channel")
    job.settle("use_vllm", "use_sglang counts")


def _rest_of_vllm(job: Import, server: tuple[str, ...], reason: str) -> None:
    for key in (*server, *(key for key in job.given if key.startswith("vllm_"))):
        if key == "vllm_enable_sleep_mode":
            job.refuse_unless(key, False, "engine and trainer never take turns on a GPU here", "false")
        elif key in ("vllm_structured_outputs_regex", "vllm_guided_decoding_regex"):
            job.refuse_unless(key, None, "requests carry no grammar here", "remove it")
        else:
            job.settle(key, reason)


def spread(job: Import, world: int | None) -> None:
    """Write the sharding of the model over the ranks."""
    stage = job.given.get("accelerate.deepspeed_config.zero_stage")
    kind = str(job.given.get("accelerate.distributed_type", ""))
    named = str(job.given.get("accelerate_config", job.given.get("config_file", "")))
    file = job.given.get("deepspeed")
    keys = ["accelerate.deepspeed_config.zero_stage", "accelerate.distributed_type", "deepspeed", "fsdp"]
    keys += ["accelerate_config", "config_file", *(key for key in job.given if key.startswith("deepspeed."))]
    if isinstance(file, str) and Path(file).is_file():
        stage = map_of(Path(file)).get("zero_optimization", {}).get("stage", stage)
    elif isinstance(file, str) and (
        found := [digit for digit in "0123" if f"zero{digit}" in file or f"z{digit}" in file]
    ):
        stage = int(found[0])
    elif file is not None:
        stage = job.given.get("deepspeed.zero_optimization.stage", 3)
    stage = job.given.get("deepspeed.zero_optimization.stage", stage)
    is_fsdp = kind == "FSDP" or bool(job.given.get("fsdp")) or named in _SHARDED
    given = [key for key in keys if key in job.given and not job.is_reported(key)]
    if not given:
        if job.run.get("trainer.sharding") is None and named in _SHARDED:
            sharding(job, world, True, (), named)
        return
    is_sharded = is_fsdp or (stage is not None and int(stage) >= 2)
    what = f"ZeRO stage {stage}" if stage is not None else "FSDP" if is_fsdp else f"{kind or 'data parallel'}"
    sharding(job, world, is_sharded, tuple(given), f"{what} is {'fsdp' if is_sharded else 'none'}")
