"""Trainer of prime-rl: model, adapters, optimizer, schedule, loss, checkpoints, GPUs, transfer of weights."""

import math
from typing import Any

from actors.imports.job import Import
from schemas.errors import ConfigError

ATTENTION = {
    "auto": "auto", "flash_attention_2": "flash", "flash_attention_3": "flash", "flash_attention_4": "flash",
    "fa4": "flash", "sdpa": "padded", "eager": "padded", "flex": "flex", "flex_attention": "flex",
}  # fmt: skip
LORA = "trainer.model.lora"


def shared(job: Import, *keys: str) -> Any:
    """Return the value of a key that several sections have: the first that is given, else the first's default.

    Raises:
        ConfigError: two of them have different values, which prime-rl refuses.
    """
    found = {job.name(key): job.given[key] for key in keys if job.given.get(key) is not None}
    if len(set(map(str, found.values()))) > 1:
        pairs = ", ".join(f"{key} {value}" for key, value in found.items())
        raise ConfigError(f"{next(iter(found))}: {pairs}: {job.system} refuses different values; give one of them")
    return next(iter(found.values()), job.defaults[keys[0]])


def rename_shared(job: Import, keys: tuple[str, ...], target: str) -> Any:
    """Write the value of a key that several sections have, and return the value. The first given key decides."""
    value = shared(job, *keys)
    first = next((key for key in keys if job.given.get(key) is not None), keys[0])
    job.rename(first, target)
    for key in keys:
        if key != first:
            job.settle(key, f"one key here, {target}, with this value" if job.given.get(key) == value else "empty")
    return value


def convert_model(job: Import) -> None:
    """Write path, attention, recomputation, compilation and adapters."""
    names = ("trainer.model.name", "model.name", "orchestrator.model.name", "inference.vllm.model")
    rename_shared(job, names, "model.path")
    job.run.set("model.dtype", "bfloat16", "computation in bfloat16, weights in float32, as there")
    trusts = ("trainer.model.trust_remote_code", "inference.vllm.trust_remote_code")
    if job.has(trusts[0]) or job.has(trusts[1]):
        trust = any(job.given.get(key) for key in trusts)
        job.convert(trusts, {"model.trust_remote_code": trust}, f"for trainer and engine: {trust}".lower())
    if job.has("trainer.model.attn"):
        attention = ATTENTION.get(job.given["trainer.model.attn"])
        if attention is None:
            job.refuse("trainer.model.attn", "no such attention here", "model.attention: auto is used")
        else:
            job.rename("trainer.model.attn", "model.attention", attention)
    _convert_switch(
        job, "trainer.model.ac", "model.gradient_checkpointing", also=job.has("trainer.model.ac_offloading")
    )
    if job.given.get("trainer.enable_router_replay") is True:
        job.rename("trainer.enable_router_replay", "trainer.router_replay")
    if job.given.get("inference.enable_fp32_lm_head") is True:
        job.convert("inference.enable_fp32_lm_head", {"model.head_dtype": "float32"}, "float32, in the trainer too")
    _convert_switch(job, "trainer.model.compile", "model.compile")
    divides = any(job.given.get(f"trainer.model.{way}", 1) not in (1, "auto") for way in ("tp", "ep"))
    if job.run.get("model.compile") and (divides or job.run.get("trainer.router_replay")):
        job.run.set("model.compile", False, "layers with divided weights or replayed experts are not compiled")
        job.note("layers are not compiled: they have divided weights (tp, ep), or replay the engine's experts")
    if job.has(LORA) and job.given.get(LORA, {}) is not None:
        _convert_lora(job)
    elif job.has(LORA):
        job.settle(LORA, "no adapters")
    job.refuse_unless(
        "trainer.model.optimization_dtype", "float32", "weights are trained in float32 here", "expect more memory"
    )


def _convert_switch(job: Import, section: str, target: str, also: bool = False) -> None:
    """Write a section whose presence switches something on; a null or false switches it off."""
    value = job.given.get(section, job.defaults[section])
    below = job.keys_below(section)
    is_on = bool(below) or also or (value is not None and value is not False and value not in ("None", "off"))
    text = "on" if is_on else "off"
    if not job.has(section):
        job.run.set(target, is_on, f"default of {job.report.origin}" if not also else "on with ac_offloading")
        return
    if is_on and job.given.get(f"{section}.mode") == "selective":
        job.convert([section, *below], {target: "selective"}, "selective")
        return
    job.convert([section, *below], {target: is_on}, text)


def _convert_lora(job: Import) -> None:
    job.rename(f"{LORA}.rank", "model.lora.rank")
    job.rename(f"{LORA}.alpha", "model.lora.alpha")
    job.rename(f"{LORA}.dropout", "model.lora.dropout")
    key = f"{LORA}.target_modules"
    modules = job.value(key)
    kept = [module for module in modules if isinstance(module, str) and module.isidentifier() and module != "experts"]
    if kept == modules:
        job.rename(key, "model.lora.target_modules")
    else:
        lost = ", ".join(str(module) for module in modules if module not in kept)
        job.convert(key, {"model.lora.target_modules": kept or "all-linear"}, f"without {lost}: names of layers only")
    if not job.has(key):
        job.note("adapters on stacked experts have no counterpart; a dense model has none in prime-rl either")
    job.refuse_unless(f"{LORA}.modules_to_save", ([],), "vLLM serves adapters alone", "set engine embedded")
    job.convert(LORA, {}, "adapters with the defaults of prime-rl")
    for name in ("rank", "alpha"):
        own, value = f"orchestrator.model.lora.{name}", job.value(f"{LORA}.{name}")
        if job.given.get(own) not in (None, value):
            raise ConfigError(f"{job.name(own)}: {job.given[own]} differs from {LORA}.{name} {value}; remove one")
        job.settle(own, "one key here, that of the trainer")


def convert_optimizer(job: Import) -> None:
    """Write optimizer, clipping and learning rate."""
    kind = job.value("trainer.optim.type")
    job.rename("trainer.optim.lr", "trainer.learning_rate")
    if kind in ("adamw", "muon"):
        job.rename("trainer.optim.type", "trainer.optimizer.type")
    elif kind in ("sgd", "sign_sgd"):
        job.refuse("trainer.optim.type", "not built here", "adamw is used: set trainer.optimizer and another rate")
        job.run.set("trainer.optimizer.type", "adamw", f"in the place of {kind}")
    else:
        raise ConfigError(f"{job.name('trainer.optim.type')}: {kind!r} is none of adamw, muon, sgd, sign_sgd")
    job.rename("trainer.optim.weight_decay", "trainer.optimizer.weight_decay")
    if job.value("trainer.optim.weight_decay"):
        job.note("weight decay acts on matrices only here, on norms and biases too in prime-rl")
    beta2 = job.given.get("trainer.optim.betas2", 0.95 if kind == "muon" else 0.999)
    if kind in ("adamw", "muon"):
        job.rename("trainer.optim.betas1", "trainer.optimizer.beta1")
        job.rename("trainer.optim.betas2", "trainer.optimizer.beta2", beta2)
    if kind == "muon":
        job.rename("trainer.optim.mu", "trainer.optimizer.momentum")
    job.sweep({}, {"trainer.optim.nesterov": "for sgd only", "trainer.optim.momentum": "for sgd only"})
    norm = job.value("trainer.optim.max_norm")
    if norm is not None and job.value("trainer.model.ep_comm_backend") == "deepep":
        job.note("prime-rl does not clip gradients with ep_comm_backend deepep")
        norm = None
    if norm is None:
        job.convert("trainer.optim.max_norm", {"trainer.max_grad_norm": None}, "no maximum")
    else:
        job.rename("trainer.optim.max_norm", "trainer.max_grad_norm")


def convert_schedule(job: Import, max_steps: int | None) -> None:
    """Write warm-up and decay. prime-rl's linear schedule is constant between warm-up and the last decay_steps.

    Raises:
        ConfigError: prime-rl refuses the values too.
    """
    kind, rate = job.value("trainer.scheduler.type"), job.value("trainer.optim.lr")
    warmup, decay = job.value("trainer.scheduler.warmup_steps"), job.value("trainer.scheduler.decay_steps")
    keys = {name: f"trainer.scheduler.{name}" for name in ("type", "warmup_steps", "decay_steps", "min_lr")}
    if kind not in ("constant", "linear", "cosine"):
        raise ConfigError(f"{keys['type']}: {kind!r} is none of constant, linear, cosine")
    if kind == "constant":
        job.rename(keys["type"], "trainer.lr_scheduler")
        for name in ("warmup_steps", "decay_steps", "min_lr"):
            job.settle(keys[name], "without effect on a constant rate")
        return
    job.rename(keys["warmup_steps"], "trainer.warmup_steps")
    if kind == "linear" and decay == 0:
        job.convert(keys["type"], {"trainer.lr_scheduler": "constant"}, "linear with decay_steps 0 stays at its peak")
        job.settle(keys["decay_steps"], "no decay")
        job.settle(keys["min_lr"], "no decay")
        return
    # the rate of the first step is that before the warm-up
    job.run.set("trainer.lr_schedule.first", 0, f"{job.system} counts from 0")
    if kind == "linear":
        if max_steps is not None and warmup + decay > max_steps:
            raise ConfigError(
                f"{job.name(keys['decay_steps'])}: {decay} and warmup_steps {warmup} exceed max_steps {max_steps}, "
                f"which {job.system} refuses"
            )
        job.convert(
            keys["type"], {"trainer.lr_scheduler": "warmup_stable_decay"}, "constant up to the last decay_steps"
        )
        job.rename(keys["decay_steps"], "trainer.lr_schedule.decay_steps")
        job.run.set("trainer.lr_schedule.decay_type", "linear", f"{job.system}'s linear")
    else:
        job.rename(keys["type"], "trainer.lr_scheduler")
        job.settle(keys["decay_steps"], "cosine falls from the warm-up on")
    least = job.value(keys["min_lr"])
    if least > rate:
        raise ConfigError(f"{keys['min_lr']}: {least:g} is above trainer.optim.lr {rate:g}")
    ratio = least / rate if rate else 0.0
    start = "; the warm-up starts from 0 here, from min_lr there" if kind == "cosine" and least and warmup else ""
    job.convert(keys["min_lr"], {"trainer.min_lr_ratio": ratio}, f"{least:g} ÷ {rate:g} = {ratio:g}{start}")


LOSS = "trainer.loss"
LEGACY = ("ratio_type", "token_mask_low", "token_mask_high", "geo_mask_low", "geo_mask_high", "sequence_mask_low",
          "sequence_mask_high", "sequence_clip_high", "adv_tau", "kl_tau", "teacher_tau")  # fmt: skip


def convert_loss(job: Import, era: str) -> None:
    """Write the loss of the file's keys, or of the time."""
    kind = job.value(f"{LOSS}.type")
    given = {key.removeprefix(f"{LOSS}.") for key in job.keys_below(LOSS)}
    if kind == "custom":
        job.refuse(f"{LOSS}.type", "a custom loss has another signature here", "rewrite it (howto/custom-loss)")
        job.sweep({}, {f"{LOSS}.**": "part of the custom loss"})
        job.ask("trainer.loss", "the custom loss, rewritten; {type: custom, path: file.py:function}")
    elif kind == "ipo":
        threshold = job.value(f"{LOSS}.ipo_threshold")
        _set_type(job, "ipo", "prime-rl's ipo does not cap the ratio")
        job.convert(f"{LOSS}.ipo_threshold", dict.fromkeys(("trainer.loss.ipo_mask_low", "trainer.loss.ipo_mask_high"),
                    threshold), f"both bounds are {threshold:g}")  # fmt: skip
        job.run.set("trainer.loss.ratio_clip", None, "prime-rl does not cap the ratio")
        _rename_all(job, ("adv_tau", "kl_tau"))
    elif kind != "default":
        raise ConfigError(f"{LOSS}.type: {kind!r} is none of default, ipo, custom")
    elif {"dppo_mask_low", "dppo_mask_high"} & given or (
        era >= "2026-05" and not given - {"type", "adv_tau", "kl_tau"}
    ):
        _set_type(job, "dppo", "prime-rl's default loss")
        _rename_all(job, ("dppo_mask_low", "dppo_mask_high", "adv_tau", "kl_tau"))
    elif {"ipo_mask_low", "ipo_mask_high"} & given or era == "2026-03":
        _set_type(job, "ipo", "prime-rl's default loss of March 2026")
        _rename_all(job, ("ipo_mask_low", "ipo_mask_high", "adv_tau", "kl_tau", "teacher_tau"))
        job.run.set("trainer.loss.ratio_clip", None, "prime-rl does not cap the ratio")
    else:
        _set_type(job, "surogate", "prime-rl's default loss up to February 2026")
        if not job.has(f"{LOSS}.kl_tau"):
            job.defaults[f"{LOSS}.kl_tau"] = 0.0
        _rename_all(job, LEGACY)
        if job.value(f"{LOSS}.ratio_type") == "sequence":
            job.run.set("trainer.loss.compat.sequence_normalizer", "micro_batches", "prime-rl's second divisor")
    if job.run.get("trainer.loss.teacher_tau"):
        key = "orchestrator.teacher_model.model.name"
        if job.given.get(key):
            job.rename(key, "trainer.teacher.path")
        else:
            job.ask("trainer.teacher.path", "the teacher's model; teacher_tau reads it")


def _set_type(job: Import, kind: str, text: str) -> None:
    job.run.set("trainer.loss.type", kind, text)
    job.convert([f"{LOSS}.type", LOSS], {}, f"trainer.loss.type {kind}: {text}")


def _rename_all(job: Import, names: tuple[str, ...]) -> None:
    for name in names:
        if name != "teacher_tau" or job.has(f"{LOSS}.{name}"):
            job.rename(f"{LOSS}.{name}", f"trainer.loss.{name}")


def convert_checkpoints(job: Import) -> None:
    """Write the interval of checkpoints, and how many are kept."""
    section = "ckpt" if job.has("ckpt") else "trainer.ckpt"
    interval, last = job.value(f"{section}.interval"), job.value(f"{section}.keep_last")
    own = f"{section}.keep_interval"
    if interval is None:
        text = "at the end only" if job.has(section) else "no [ckpt]: at the end only"
        target = {"trainer.checkpoint.interval_share": 1.0}
        job.convert([section, f"{section}.interval"], target, text)
    else:
        job.rename(f"{section}.interval", "trainer.checkpoint.interval")
    if last is not None:
        job.rename(f"{section}.keep_last", "trainer.checkpoint.keep_last")
    elif interval is not None and job.value(own) is None:
        targets = {"trainer.checkpoint.keep_last": None}
        job.convert([f"{section}.keep_last", own], targets, "keep_last is empty, so all are kept")
    job.settle(f"{section}.keep_last", "only the last step is saved")
    if job.value(own) is not None:
        job.rename(own, "trainer.checkpoint.keep_interval")
    if not job.is_reported(own):
        job.settle(own, "empty")


def convert_machines(job: Import, is_whole: bool) -> None:
    """Write trainer processes and engines."""
    key = {name: f"deployment.{name}" for name in ("type", "gpus_per_node", "num_train_gpus", "num_infer_gpus")}
    per_node, tensor = job.value(key["gpus_per_node"]), job.value("inference.vllm.tensor_parallel_size")
    if not is_whole and not job.has("deployment"):
        _apart(job)
        return
    if tensor < 1:
        raise ConfigError(f"{job.name('inference.vllm.tensor_parallel_size')}: {tensor} is below 1")
    if job.value(key["type"]) == "multi_node":
        nodes = (job.given.get("deployment.num_train_nodes"), job.given.get("deployment.num_infer_nodes"))
        if nodes[0] is None:
            raise ConfigError("deployment.num_train_nodes: is required with deployment.type multi_node")
        servers = (nodes[1] or 1) * job.value("deployment.num_infer_replicas")
        trainers, copies = nodes[0] * per_node, max(1, per_node // tensor)
        text = (
            f"{nodes[0]} nodes · {per_node} GPUs = {trainers} ranks; {servers} servers of {per_node} ÷ {tensor} copies"
        )
        keys = [name for name in job.given if name.startswith("deployment.num_")]
        job.note("several machines: prime-rl starts them by Slurm; here start `actors run` on each (several machines)")
    elif job.value(key["type"]) == "single_node":
        trainers, infer = _single_node(job, per_node)
        if infer % tensor:
            raise ConfigError(f"{key['num_infer_gpus']}: {infer} is not divisible by the tensor parallel size {tensor}")
        servers, copies = 1, infer // tensor
        text = f"{trainers} GPUs train; {infer} ÷ {tensor} = {copies} copies of the model"
        keys = [key["num_train_gpus"], key["num_infer_gpus"], "trainer_gpu_ids", "inference_gpu_ids"]
    else:
        raise ConfigError(f"deployment.type: {job.value(key['type'])!r} is none of single_node, multi_node")
    _set_ranks(job, trainers, text)
    job.convert([*keys, key["type"], key["gpus_per_node"]], {}, text)
    job.rename("inference.vllm.tensor_parallel_size", "inference.engine.tensor_parallel_size")
    given, target = "inference.vllm.data_parallel_size", "inference.engine.data_parallel_size"
    if job.given.get(given) == copies:
        job.rename(given, target)
    else:
        replaced = f"; prime-rl replaces {job.given[given]}" if job.has(given) else ""
        job.convert(given, {target: copies}, text + replaced)
    if servers > 1:
        job.run.set("up.inference", servers, "one server a node")


def _apart(job: Import) -> None:
    """Write ranks and copies where each process has its own file: no file has the number of ranks."""
    if job.options.world is None:
        job.ask("trainer.num_ranks", "trainer processes (torchrun --nproc-per-node); --world N")
        for letter in ("cp", "tp", "ep"):
            if job.given.get(f"trainer.model.{letter}", 1) not in (1, "auto"):
                key = f"trainer.model.{letter}"
                job.refuse_unless(key, 1, "of an unknown number of trainer processes", "give --world N")
    else:
        _set_ranks(job, job.options.world, "--world")
    job.rename("inference.vllm.tensor_parallel_size", "inference.engine.tensor_parallel_size")
    job.rename("inference.vllm.data_parallel_size", "inference.engine.data_parallel_size")


def _set_ranks(job: Import, ranks: int, text: str) -> None:
    job.run.set("trainer.num_ranks", ranks, text)
    job.run.set("trainer.sharding", "fsdp" if ranks > 1 else "none", "prime-rl always shards")
    for letter, key in {"cp": "context_parallel", "tp": "tensor_parallel", "ep": "expert_parallel"}.items():
        if job.given.get(f"trainer.model.{letter}", 1) not in (1, "auto"):
            job.rename(f"trainer.model.{letter}", f"trainer.{key}")


def _single_node(job: Import, per_node: int) -> tuple[int, int]:
    """Return GPUs of the trainer and of inference."""
    train, infer = (
        len(job.given[key]) if job.given.get(key) else job.value(f"deployment.{name}")
        for key, name in (("trainer_gpu_ids", "num_train_gpus"), ("inference_gpu_ids", "num_infer_gpus"))
    )
    if train + infer > per_node:
        raise ConfigError(
            f"deployment: {train} GPUs for training and {infer} for inference exceed gpus_per_node {per_node}"
        )
    return train, infer


def convert_transfer(job: Import, era: str) -> None:
    """Write the channel of the weights."""
    keys = ("weight_broadcast.type", "trainer.weight_broadcast.type", "orchestrator.weight_broadcast.type")
    kind = shared(job, *keys)
    has_lora = job.has(LORA) and job.given.get(LORA, {}) is not None
    if kind in ("nccl", "nixl") and has_lora:
        raise ConfigError(f"weight_broadcast.type: {kind} does not carry adapters in prime-rl; use filesystem")
    if kind is None:
        by_file = era < "2026-08" or has_lora or not job.has("inference")
        kind, text = ("filesystem" if by_file else "nccl"), f"default of {job.report.origin}"
    else:
        text = f"{kind}" if kind == "filesystem" else f"{kind}: broadcast, here through host memory"
    if kind not in ("filesystem", "nccl", "nixl"):
        raise ConfigError(f"weight_broadcast.type: {kind!r} is none of filesystem, nccl, nixl")
    channel = "filesystem" if kind == "filesystem" else "rendezvous"
    job.convert(keys, {"weights.channel": channel}, text)


def finite_steps(job: Import) -> int | None:
    """Write the number of steps, and return the number. Without one prime-rl has no end, and the user is asked."""
    keys = ("max_steps", "trainer.max_steps", "orchestrator.max_steps")
    steps: int | None = shared(job, *keys)
    if steps is None:
        job.ask("trainer.max_steps", f"number of steps; {job.system} runs without end where no file says it")
        for key in keys:
            job.settle(key, "empty: without end")
        return None
    if steps < 1:
        raise ConfigError(f"max_steps: {steps} is below 1")
    rename_shared(job, keys, "trainer.max_steps")
    return steps


def ceiling(value: int, divisor: int) -> int:
    """Return value ÷ divisor, rounded up, at least 1."""
    return max(1, math.ceil(value / divisor))
