"""Keys of ms-swift other than data and rewards: model, batches, sampling, objective, engine."""

import math
import re
from typing import Any

from actors.algorithms.batch_sizes import TrlBatchSizes, our_keys
from actors.imports.files import map_of
from actors.imports.huggingface import (
    ATTENTION,
    ROOM,
    Pace,
    adapter_forms,
    batch_formula,
    embedded_engine,
    evaluation,
    length,
    moving_reference,
    no_evaluation,
    sharding,
    updates_per_epoch,
)
from actors.imports.job import Import
from actors.imports.ms_swift.inputs import Inputs
from actors.imports.ms_swift.versions import ONE_ACCUMULATED, ONE_ACCUMULATED_ASLEEP, WITHOUT_MODE
from actors.imports.words import mapping
from schemas.errors import ConfigError

_SIZES = (
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "generation_batch_size"),
)
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")
_LOSSES = (*_CLIPPED, "cispo", "sapo")
_MODES = {
    "token_truncate": ("truncate", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("truncate", "sequence"),
    "sequence_mask": ("mask", "sequence"),
}
_NO_WORLD = "trainer processes of the run (NPROC_PER_NODE × NNODES); --world N"


def model(job: Import) -> None:
    """Write the model, its precision, its attention and its adapters."""
    if job.is_set("model"):
        job.rename("model", "model.path")
    else:
        job.ask("model.path", "no file names the model; --model NAME")
    if re.search(r"-vl\b|-omni|internvl|llava|ovis", str(job.value("model")), re.IGNORECASE):
        job.note(f"{job.value('model')} reads pictures or sound, which runs here do not")
    if not job.value("use_hf"):
        job.note("ms-swift loads models and data from ModelScope unless use_hf; here names are of the Hugging Face hub")
    job.settle("use_hf", "names are of the Hugging Face hub here")
    job.refuse_unless("model_revision", (None, "master", "main"), "the newest revision is loaded here")
    dtype = job.value("torch_dtype")
    if dtype in ("float16", "fp16") or job.value("fp16"):
        for key in ("torch_dtype", "fp16"):
            job.refuse(key, "float16 has no counterpart; the run computes in bfloat16", "set model.dtype")
        job.run.set("model.dtype", "bfloat16", "float16 in the origin")
    elif dtype is None and not job.unreadable(["torch_dtype"]):
        job.run.set("model.dtype", "bfloat16", "torch_dtype is that of the model's config.json")
    else:
        job.rename("torch_dtype", "model.dtype")
    job.settle("bf16", "model.dtype decides")
    job.settle("fp16", "switched off")
    kind = job.value("attn_impl")
    if kind in ATTENTION:
        job.convert("attn_impl", {"model.attention": ATTENTION[kind]}, f"{kind} is {ATTENTION[kind]}")
    job.settle("attn_impl", "model.attention auto")
    job.rename("gradient_checkpointing", "model.gradient_checkpointing")
    if job.value("torch_compile"):
        job.convert("torch_compile", {"model.compile": True}, "true")
    job.settle("torch_compile", "switched off")
    _adapters(job)
    _vision(job)


def _vision(job: Import) -> None:
    """Write which parts in front of the language layers are trained."""
    for key, target in (("freeze_vit", "train_vision_tower"), ("freeze_aligner", "train_projector")):
        if job.value(key) is not False and not job.unreadable([key]):
            job.settle(key, "frozen")
        elif job.value("use_vllm"):
            job.refuse(
                key, "vLLM keeps features of images here", f"set inference.engine.type embedded and model.{target}"
            )
        else:
            job.rename(key, f"model.{target}", True, "trained, if the model sees images")
    job.refuse_unless("freeze_llm", False, "language layers are always trained here")


def _adapters(job: Import) -> None:
    kind = job.value("tuner_type")
    names = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "target_regex", "use_rslora", "use_dora")
    if kind == "full":
        job.convert("tuner_type", {}, "full: all weights are trained, no model.lora")
        for key in (*names, "lora_bias", "lora_dtype", "init_weights", "modules_to_save", "target_parameters"):
            job.settle(key, "tuner_type full has no adapters")
        job.refuse_unless("freeze_parameters_ratio", 0.0, "all weights are trained here")
        return
    if kind != "lora":
        job.refuse("tuner_type", f"no adapters of type {kind} here; the run has LoRA", "set model.lora")
    job.rename("lora_rank", "model.lora.rank")
    job.convert("tuner_type", {"model.lora.rank": job.value("lora_rank")}, "lora: adapters are trained")
    job.rename("lora_alpha", "model.lora.alpha")
    job.rename("lora_dropout", "model.lora.dropout")
    targets = job.value("target_modules") or ["all-linear"]
    if "all-linear" in targets:
        job.convert("target_modules", {"model.lora.target_modules": "all-linear"}, "all-linear")
    else:
        job.convert("target_modules", {"model.lora.target_modules": targets}, "names of modules")
    if job.is_set("target_regex"):
        job.rename("target_regex", "model.lora.target_modules", text="an expression that whole names match")
    job.settle("target_regex", "empty")
    forms = {"use_rslora": "use_rslora", "use_dora": "use_dora", "init_lora_weights": "init_weights"}
    named = [name for name in job.given.get("modules_to_save") or [] if not str(name).startswith("all-")]
    if not job.unreadable(["modules_to_save"]) and named != (job.given.get("modules_to_save") or []):
        job.refuse(
            "modules_to_save", "all-embedding and all-norm are names of ms-swift", "list the names of the modules"
        )
    else:
        forms["modules_to_save"] = "modules_to_save"
    adapter_forms(job, forms, bool(job.value("use_vllm")))
    job.refuse_unless("target_parameters", None, "adapters are on linear layers alone here")
    job.refuse_unless("lora_bias", "none", "biases stay frozen here")
    job.settle("lora_dtype", "adapters are float32 here")
    _quantization(job)


def _quantization(job: Import) -> None:
    method, bits, kind = (job.value(key) for key in ("quant_method", "quant_bits", "bnb_4bit_quant_type"))
    if method == "bnb" and bits == 4 and kind == "nf4":
        job.convert(["quant_method", "quant_bits", "bnb_4bit_quant_type"], {"model.quantization.type": "nf4"}, "nf4")
        job.rename("bnb_4bit_use_double_quant", "model.quantization.double_quant")
    elif method is not None:
        for key in ("quant_method", "quant_bits"):
            job.refuse(key, "only bnb with 4 bits and nf4 has a counterpart", "set model.quantization to nf4")
    for key in ("quant_method", "quant_bits", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        job.settle(key, "the base model is not quantised")
    for key in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"):
        job.settle(key, "the base model is computed in model.dtype")


def world_of(job: Import, inputs: Inputs) -> int | None:
    """Write `trainer.num_ranks` and return it; None if no file says it."""
    keys = ("NPROC_PER_NODE", "NNODES")
    given = [key for key in keys if key in job.given]
    if job.options.world is not None:
        job.run.set("trainer.num_ranks", job.options.world, "--world")
        for key in keys:
            job.settle(key, "--world decides")
        return job.options.world
    if job.unreadable(given):
        job.convert(given, {"trainer.num_ranks": 1}, "")
        job.ask("trainer.num_ranks", _NO_WORLD)
        return None
    numbers = [str(job.given.get(key, "1")) for key in keys]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise ConfigError(f"NPROC_PER_NODE: {' and NNODES: '.join(numbers)} must be numbers of processes and nodes")
    if not given and not inputs.is_shell:
        job.ask("trainer.num_ranks", _NO_WORLD)
        return None
    world = int(numbers[0]) * int(numbers[1])
    text = f"{numbers[0]} processes × {numbers[1]} nodes = {world}"
    if "NPROC_PER_NODE" not in given:
        text = "no NPROC_PER_NODE: swift starts one process"
        job.note(text)
    job.convert(given, {"trainer.num_ranks": world}, text)
    if not given:
        job.run.set("trainer.num_ranks", world, text)
    return world


def batches(job: Import, version: tuple[int, int], world: int | None, rows: int | None) -> Pace:
    """Write groups, minibatches and the length of the run, and return the pace.

    Raises:
        ConfigError: ms-swift refuses the numbers too, or an update would straddle two generations.
    """
    values: dict[str, Any] = {key: job.value(key) for key in (*_SIZES, "num_iterations", "num_generations")}
    for key, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{key}: must be 1 or more, got {value}")
    per_device, accumulation = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    if accumulation is None:
        # 16 completions of an update before GRPO had a default of its own
        accumulation = 1 if version >= ONE_ACCUMULATED else max(1, math.ceil(16 / per_device / (world or 1)))
    is_asleep = bool(job.value("use_vllm")) and (job.value("sleep_level") or 0) > 0 and not job.value("async_generate")
    if version <= ONE_ACCUMULATED_ASLEEP and is_asleep and accumulation > 1:
        job.note(
            f"up to 3.3 ms-swift sets gradient_accumulation_steps to 1 with sleep_level, so {accumulation} is not read"
        )
        accumulation = 1
    # ms-swift builds on TRL: the sizes have TRL's names and meaning
    sizes = TrlBatchSizes(
        per_device_train_batch_size=per_device,
        num_generations=values["num_generations"],
        world_size=world or 1,
        generation_batch_size=values["generation_batch_size"],
        steps_per_generation=values["steps_per_generation"],
        gradient_accumulation_steps=accumulation,
        num_iterations=values["num_iterations"],
    )
    job.rename("num_generations", "rollout.group_size")
    level = int(bool(job.value("async_generate")))
    text = "sampled by the weights before the last update" if level else "generation and training alternate"
    job.run.set("packer.max_async_level", level, text)
    if "async_generate" in job.given:
        job.convert("async_generate", {"packer.max_async_level": level}, text)
    if world is None or job.unreadable([*_SIZES, "num_iterations", "num_generations"]):
        return _open(job, sizes, world)
    ours = our_keys(sizes)
    groups, parts = ours["packer.groups_per_step"], ours["trainer.num_minibatches"]
    targets = {"packer.groups_per_step": groups, "trainer.num_minibatches": parts}
    job.convert(list(_SIZES), targets, batch_formula(sizes, groups, parts))
    job.rename("num_iterations", "trainer.num_iterations")
    if parts > 1 and job.value("loss_type") in ("dapo", "cispo"):
        job.note(
            f"ms-swift divides {job.value('loss_type')} in each update by all tokens of the generation, so its "
            f"gradients are {parts} times smaller than here; AdamW evens that out, max_grad_norm does not"
        )
    per_epoch = None if rows is None else updates_per_epoch(rows, sizes)
    _last_epoch(job)
    return length(job, parts * sizes.num_iterations, per_epoch, "rows of the training data; --rows N")


def _last_epoch(job: Import) -> None:
    """Report the epoch after which ms-swift stops, whatever the schedule of the rate spans."""
    last, epochs = job.value("max_epochs"), job.value("num_train_epochs")
    if not job.unreadable(["max_epochs"]) and (last is None or (last >= epochs and job.value("max_steps") <= 0)):
        job.settle("max_epochs", "the run ends with num_train_epochs")
    else:
        job.refuse("max_epochs", "the schedule of the rate would end there too", "set trainer.max_epochs")


def _open(job: Import, sizes: TrlBatchSizes, world: int | None) -> Pace:
    """Write what can be said without the number of processes."""
    accumulation = sizes.gradient_accumulation_steps
    steps = sizes.steps_per_generation or accumulation
    parts = max(steps // accumulation, 1)
    job.convert(list(_SIZES), {"packer.groups_per_step": 1, "trainer.num_minibatches": parts}, "")
    if world is None:
        job.ask("packer.groups_per_step", f"completions of a generation ÷ {sizes.num_generations}; {_NO_WORLD}")
        if sizes.generation_batch_size is not None:
            job.ask("trainer.num_minibatches", f"updates per generation; {_NO_WORLD}")
    job.rename("num_iterations", "trainer.num_iterations")
    _last_epoch(job)
    return length(job, parts * sizes.num_iterations, None, _NO_WORLD)


def sampling(job: Import) -> None:
    """Write sampling and the lengths of rows."""
    aliases = [key for key in ("response_length", "max_new_tokens") if job.given.get(key)]
    used = aliases[0] if aliases else "max_completion_length"
    job.rename(used, "rollout.max_tokens")
    for key in ("max_completion_length", "max_new_tokens", "response_length"):
        job.settle(key, f"{used} decides")
    tokens = job.value(used)
    job.rename("temperature", "rollout.temperature")
    job.rename("top_p", "rollout.top_p")
    if job.value("top_k") is None or job.value("top_k") <= 0:
        job.convert("top_k", {"rollout.top_k": 0}, f"{job.value('top_k')}: all tokens")
    else:
        job.rename("top_k", "rollout.top_k")
    job.rename("min_p", "rollout.min_p", job.value("min_p") or 0.0)
    job.rename("repetition_penalty", "rollout.repetition_penalty", job.value("repetition_penalty") or 1.0)
    words = [] if job.unreadable(["stop_words"]) else [word for word in job.value("stop_words") or [] if word]
    if words or job.unreadable(["stop_words"]):
        text = "functions get the completion without the text here, and it counts as ended"
        job.rename("stop_words", "rollout.stop", words, text)
    job.settle("stop_words", "empty")
    job.refuse_unless("structured_outputs_regex", None, "requests carry no grammar here")
    limit, context = job.value("max_length"), job.value("vllm_max_model_len")
    if job.value("vllm_mode") == "server" or job.has("rollout"):
        # the trainer's key is not read where a server samples; that of the server's command is
        served = str(job.given.get("rollout.vllm_max_model_len"))
        context = int(served) if served.isdecimal() else None
    if limit is not None:
        total, text = limit + tokens, f"max_length {limit} + max_completion_length {tokens} = {limit + tokens}"
    elif context is not None and context > tokens:
        total, text = context, f"vllm_max_model_len {context}"
    else:
        total = tokens + ROOM
        text = f"max_completion_length {tokens} + {ROOM} for the prompt, which nothing limits = {total}"
    job.run.set("packer.sequence_len", total, text)


def objective(job: Import, pace: Pace) -> None:
    """Write loss, advantage, reference and corrections.

    Raises:
        ConfigError: ms-swift refuses the values too.
    """
    job.run.set("reward.on_error", "fail", "an error of a reward function ends the run")
    job.run.set("reward.none_as_zero", True, "a completion without any reward has 0")
    _loss(job)
    _advantage(job)
    _reference(job)
    moving_reference(job, pace)
    _correction(job)
    job.rename("top_entropy_quantile", "trainer.top_entropy_quantile", job.value("top_entropy_quantile") or 1e-9)
    if job.is_set("off_policy_sequence_mask_delta"):
        job.rename("off_policy_sequence_mask_delta", "trainer.off_policy_mask_threshold")
        job.run.set("trainer.loss.compat.off_policy_tokens", "leave", "as in ms-swift")
    job.settle("off_policy_sequence_mask_delta", "no mask")
    job.rename("overlong_filter", "reward.mask_truncated_completions")
    job.rename("dynamic_sample", "packer.dynamic_sampling")
    job.rename("max_resample_times", "packer.max_resample_times")
    for key, harmless, reason in (
        ("ref_model", None, "the reference is the first policy here"),
        ("ref_adapters", (None, []), "the reference is the first policy here"),
        ("advantage_reweight", None, "the teacher of rlsd reads another prompt; here it reads the policy's"),
        ("sdar_loss_coef", 0.0, "the teacher of sdar reads another prompt; here it reads the policy's"),
        ("teacher_model", None, "distillation next to rewards reads another advantage here"),
        ("teacher_model_server", None, "distillation next to rewards reads another advantage here"),
        ("loss_scale", (None, "default", "last_round"), "the loss is on all sampled tokens here"),
    ):
        job.refuse_unless(key, harmless, reason)


def _loss(job: Import) -> None:
    kind = job.value("loss_type")
    if kind not in _LOSSES:
        job.refuse("loss_type", f"no loss {kind} here; the run has grpo", "write a loss of type custom")
        job.run.set("trainer.loss.type", "grpo", f"{kind} in the origin")
        kind = "grpo"
    else:
        job.rename("loss_type", "trainer.loss.type")
    if kind == "bnpo":
        job.note(
            "loss_type bnpo is the mean over micro-batches of their token means; micro-batches are filled to "
            "packer.sequence_len tokens here, so that the weights of tokens differ. dapo has no such average"
        )
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
    delta = job.value("delta")
    if kind in _CLIPPED and (job.unreadable(["delta"]) or (delta is not None and delta > max(1 + cap, 1))):
        job.rename("delta", "trainer.loss.delta")
    elif delta is not None and kind in _CLIPPED:
        job.refuse("delta", f"must be above 1 + epsilon_high = {1 + cap:g} here", "raise it, or leave it out")
    job.settle("delta", f"loss {kind} does not read it")
    job.rename("importance_sampling_level", "trainer.loss.importance_sampling_level")
    for theirs, ours in (("tau_pos", "temperature_pos"), ("tau_neg", "temperature_neg")):
        if kind == "sapo":
            job.rename(theirs, f"trainer.loss.{ours}")
        job.settle(theirs, "only with loss_type sapo")


def _advantage(job: Import) -> None:
    estimator, scale = job.value("advantage_estimator"), job.value("scale_rewards")
    if estimator not in ("grpo", "rloo", "reinforce_plus_plus"):
        raise ConfigError(f"advantage_estimator: {estimator!r} must be grpo, rloo or reinforce_plus_plus")
    default = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}[estimator]
    words = {None: default, True: "group", False: "none", "true": "group", "false": "none"}
    scale = words.get(scale.lower() if isinstance(scale, str) else scale, scale)
    if scale not in ("group", "batch", "none", "gdpo"):
        raise ConfigError(f"scale_rewards: {scale!r} must be one of group, batch, none, gdpo")
    spread = {"std": "unbiased", "eps": 1e-4}
    if scale == "gdpo":
        found: dict[str, Any] = {"type": "gdpo", "std": "unbiased", "eps": 1e-8}
    elif estimator == "grpo":
        found = {"type": {"group": "zscore", "batch": "batch_std", "none": "mean"}[scale]}
        found |= {} if scale == "none" else spread
    else:
        name = "rloo" if estimator == "rloo" else "reinforce_pp"
        found = {"type": name, "scale": scale} | ({} if scale == "none" else spread)
        found |= {"std_of": "rewards"} if name == "rloo" and scale != "none" else {}
    targets = {f"reward.advantage.{key}": value for key, value in found.items()}
    job.convert(["scale_rewards", "advantage_estimator"], targets, f"{estimator} scaled by {scale} is {found['type']}")


def _reference(job: Import) -> None:
    beta, in_reward = job.value("beta"), job.value("kl_in_reward")
    if in_reward is None:
        # the default of rloo and reinforce_plus_plus is the KL in the reward
        in_reward = job.value("advantage_estimator") != "grpo"
    in_reward = in_reward if isinstance(in_reward, bool) else str(in_reward).lower() in ("true", "1")
    if not beta and not job.unreadable(["beta"]):
        job.settle("beta", "0: no reference")
        job.settle("kl_in_reward", "no reference")
        return
    job.rename("beta", "trainer.reference.beta")
    if in_reward:
        targets: dict[str, Any] = {"estimator": "k1", "place": "group_reward"}
    else:
        targets = {"estimator": "k3", "max_kl": 10.0, "switches": "apply"}
    text = "taken from the reward before the baseline" if in_reward else "added to the loss"
    for key, value in targets.items():
        job.run.set(f"trainer.reference.{key}", value, "ms-swift's KL")
    if "kl_in_reward" in job.given:
        job.convert("kl_in_reward", {f"trainer.reference.{key}": value for key, value in targets.items()}, text)


def _correction(job: Import) -> None:
    mode, key = job.value("rollout_importance_sampling_mode"), "rollout_importance_sampling_threshold"
    if mode is None or not job.value("use_vllm"):
        job.settle("rollout_importance_sampling_mode", "no correction" if mode is None else "only with use_vllm")
        job.settle(key, "no correction")
        return
    if mode not in _MODES:
        raise ConfigError(f"rollout_importance_sampling_mode: {mode!r} must be one of {', '.join(_MODES)}")
    action, level = _MODES[mode]
    targets: dict[str, Any] = {"trainer.correction.mode": action, "trainer.correction.level": level}
    if level == "sequence":
        targets["trainer.correction.sequence_ratio"] = "geometric_mean"
        targets["trainer.correction.sequence_weight"] = "token" if action == "mask" else "completion"
    job.convert("rollout_importance_sampling_mode", targets, f"{mode}: {action} by {level}")
    job.rename(key, "trainer.correction.high")


def evaluations(job: Import, pace: Pace, world: int | None) -> bool:
    """Write the evaluation, and return whether there is one.

    Raises:
        ConfigError: ms-swift refuses the numbers too.
    """
    keys = ("eval_strategy", "eval_steps", "eval_on_start", "num_generations_eval", "per_device_eval_batch_size")
    if not (job.value("val_dataset") or job.value("split_dataset_ratio")):
        no_evaluation(job, "without val_dataset and split_dataset_ratio nothing is evaluated", keys)
        return False
    # evaluation follows the checkpoints unless the command says otherwise
    job.defaults["eval_strategy"] = job.value("save_strategy")
    job.defaults["eval_steps"] = job.value("save_steps")
    if job.value("eval_strategy") == "no":
        no_evaluation(job, "eval_strategy no: nothing is evaluated", keys)
        return False
    completions = job.value("num_generations_eval") or job.value("num_generations")
    size = job.value("per_device_eval_batch_size") * (world or completions)
    if size % completions:
        text = (
            f"per_device_eval_batch_size: {size} completions of all processes must be a multiple of the {completions} "
            "generations of a prompt"
        )
        if any(key in job.given for key in ("val_dataset", "split_dataset_ratio", "per_device_eval_batch_size")):
            raise ConfigError(text)
        # the evaluation is a default of the time that the file is taken to be of
        no_evaluation(job, text, keys)
        return False
    evaluation(job, pace, completions, ("num_generations_eval", "per_device_eval_batch_size"))
    return True


def engine(job: Import, version: tuple[int, int], world: int | None) -> None:
    """Write the engine.

    Raises:
        ConfigError: ms-swift refuses the keys too.
    """
    mode = job.value("vllm_mode")
    has_server = job.is_set("vllm_server_host") or job.is_set("vllm_server_base_url")
    if job.value("use_vllm") and (job.has("rollout") or (has_server and version <= WITHOUT_MODE)):
        # a server that is named, or started by the script, counts more than the mode
        if mode == "colocate" and "vllm_mode" in job.given:
            job.note("vllm_mode colocate stands beside a server of swift rollout; the run has a server")
        mode = "server"
    if not job.value("use_vllm"):
        if "vllm_mode" in job.given and mode is not None:
            raise ConfigError("vllm_mode: ms-swift refuses it without use_vllm; set use_vllm true")
        embedded_engine(job)
        _rest(job, "only with use_vllm")
        return
    _check_mode(job, mode, version)
    job.convert("use_vllm", {"inference.engine.type": "vllm"}, "vLLM as a server of the run")
    if mode == "server":
        # the engine's keys stand in the command of the server, `swift rollout`
        if not (has_server or job.has("rollout")):
            raise ConfigError(
                "vllm_server_host: is missing; ms-swift needs it, or vllm_server_base_url, in mode server"
            )
        prefix = "rollout."
        job.settle("vllm_mode", "server: the run starts vLLM on GPUs of its own")
    elif _has_devices(job, world):
        prefix = ""
    else:
        prefix = ""
        job.convert("vllm_mode", {"up.colocate": True}, "trainer and vLLM share GPUs")
        size = job.value("vllm_tensor_parallel_size")
        if world is not None and world % size:
            raise ConfigError(f"vllm_tensor_parallel_size: {size} must divide the {world} processes")
        if world is not None and world > size:
            job.run.set("up.inference", world // size, f"{world} processes ÷ {size} per engine")
    _vllm(job, prefix)
    for key in ("vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_group_port"):
        job.refuse(key, "the server of swift rollout speaks another protocol", "the run starts vLLM itself")
    _rest(job, "belongs to the command of the server" if prefix else "without counterpart in the run's own server")


def _check_mode(job: Import, mode: Any, version: tuple[int, int]) -> None:
    """Refuse the modes that ms-swift refuses with use_vllm."""
    if mode not in ("colocate", "server"):
        raise ConfigError(f"vllm_mode: {mode!r}; with use_vllm ms-swift wants colocate or server")
    if mode == "colocate" and version >= (3, 5) and job.value("async_generate"):
        raise ConfigError("async_generate: ms-swift needs vllm_mode server with it; set vllm_mode, or leave it out")


def _has_devices(job: Import, world: int | None) -> bool:
    """Tell whether vLLM has GPUs that the processes of training do not have, and write the engines on them.

    Releases up to 3.4 named them; as many engines as processes shared the GPUs.
    """
    devices, workers = job.given.get("vllm_device"), job.given.get("num_infer_workers")
    if devices is None and workers is None:
        return False
    named = [one for one in str(devices or "auto").replace("[", "").replace("]", "").split() if one]
    number = int(str(workers)) if str(workers or "").isdigit() else len(named)
    processes = job.given.get("NPROC_PER_NODE") if str(job.given.get("NPROC_PER_NODE")).isdigit() else world
    if processes is not None and number >= int(processes) > 1:
        return False
    text = f"{number} engines on GPUs of their own" if number > 1 else "an engine on a GPU of its own"
    job.convert(["vllm_device", "num_infer_workers"], {"up.inference": number}, text)
    return True


def _vllm(job: Import, prefix: str) -> None:
    """Write the keys of the engine, from the trainer's command or from that of the server."""
    tokens, rank = job.run.get("rollout.max_tokens"), job.run.get("model.lora.rank")
    plain = {
        "vllm_gpu_memory_utilization": "gpu_memory_utilization",
        "vllm_tensor_parallel_size": "tensor_parallel_size",
        "vllm_data_parallel_size": "data_parallel_size",
        "vllm_enforce_eager": "enforce_eager",
        "vllm_enable_prefix_caching": "enable_prefix_caching",
        "vllm_quantization": "quantization",
    }
    for name, ours in plain.items():
        key = f"{prefix}{name}"
        job.defaults.setdefault(key, job.defaults[name])
        value = mapping(str(job.value(key)).lower()) if isinstance(job.value(key), str) else job.value(key)
        if value is not None and (not prefix or key in job.given):
            job.rename(key, f"inference.engine.{ours}", job.value(key) if name == "vllm_quantization" else value)
    key = f"{prefix}vllm_max_model_len"
    limit = job.given.get(key)
    limit = int(limit) if isinstance(limit, int | float | str) and str(limit).isdecimal() else None
    if limit is not None and isinstance(tokens, int) and limit > tokens:
        job.rename(key, "inference.engine.max_model_len", limit)
    elif limit is not None:
        job.refuse(key, f"leaves no room for a prompt and max_completion_length {tokens}", "raise it")
    key = f"{prefix}vllm_max_lora_rank"
    if isinstance(rank, int) and key in job.given and int(job.given[key]) >= rank:
        job.rename(key, "inference.engine.max_lora_rank", int(job.given[key]))
    job.settle(key, "follows from model.lora.rank")
    arguments: list[str] = []
    key = f"{prefix}vllm_max_num_seqs"
    used = [key] if job.given.get(key) is not None and not job.unreadable([key]) else []
    arguments += ["--max-num-seqs", str(job.given[key])] if used else []
    more = job.given.get(f"{prefix}vllm_engine_kwargs")
    more = mapping(more) if isinstance(more, str) else more
    if isinstance(more, dict):
        used.append(f"{prefix}vllm_engine_kwargs")
        for name, value in more.items():
            flag = f"--{str(name).replace('_', '-')}"
            arguments += [flag] if value is True else [] if value in (False, None) else [flag, str(value)]
    if arguments:
        job.convert(used, {"inference.engine.extra_args": arguments}, "arguments of vllm serve")


def _rest(job: Import, reason: str) -> None:
    for key in ("sleep_level", "offload_model", "offload_optimizer"):
        text = "engine and trainer never take turns on a GPU here"
        job.refuse_unless(key, (0, False), text, "lower vllm_gpu_memory_utilization")
    job.refuse_unless("vllm_pipeline_parallel_size", 1, "engines are split by tensors alone here")
    for key in [key for key in job.given if key.startswith(("vllm_", "rollout.", "move_model", "gc_collect"))]:
        job.settle(key, reason)


def spread(job: Import, inputs: Inputs, world: int | None) -> None:
    """Write the sharding of the model over the ranks."""
    text = "batch sizes of processes that share sequences are not converted"
    job.refuse_unless("sequence_parallel_size", 1, text, "remove it, and set trainer.context_parallel in the run")
    kind = job.value("deepspeed")
    file = inputs.folder / str(kind)
    stage: Any = None
    if job.unreadable(["deepspeed"]):
        job.rename("deepspeed", "trainer.sharding")
        return
    if kind is not None and file.is_file():
        stage = map_of(file).get("zero_optimization", {}).get("stage", 0)
    elif isinstance(kind, str) and (found := re.search(r"zero_?(?:stage)?_?([0-3])|z([0-3])", kind)):
        stage = int(found[1] or found[2])
    elif kind is not None:
        tree = mapping(kind) if isinstance(kind, str) else kind
        stage = tree.get("zero_optimization", {}).get("stage", 0) if isinstance(tree, dict) else 3
    keys = tuple(key for key in ("deepspeed", "fsdp") if job.is_set(key))
    if keys:
        is_sharded = bool(job.value("fsdp")) or (isinstance(stage, int) and stage >= 2)
        what = "FSDP" if stage is None else f"ZeRO stage {stage}"
        sharding(job, world, is_sharded, keys, f"{what} is {'fsdp' if is_sharded else 'none'}")
    for key in ("deepspeed", "fsdp", "zero_hpz_partition_size", "deepspeed_autotp_size"):
        job.settle(key, "each process has the whole model")
