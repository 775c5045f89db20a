"""Keys of transformers' TrainingArguments, shared by TRL and ms-swift: length, learning rate, optimizer, checkpoints.

transformers counts optimizer updates; a step here has `Pace.updates` of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.algorithms.batch_sizes import TrlBatchSizes
from actors.imports.job import Import
from schemas.errors import ConfigError

ALL = 1_000_000
"""Stands for "all" and "never" where a key here wants a number."""
UNBOUNDED = 1e9
"""Bound that no ratio reaches."""
TEMPLATES = (".jinja", ".jinja2", ".j2")
"""Ends of files with a chat template."""
ROOM = 2048
"""Tokens for the prompt where no file limits it."""
ATTENTION = {
    **dict.fromkeys(("flash_attention_2", "flash_attention_3", "flash_attn"), "flash"),
    **dict.fromkeys(("flex_attention", "flex"), "flex"),
    **dict.fromkeys(("sdpa", "eager"), "padded"),
}
"""Values of `model.attention` by transformers' names."""

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_npu_fused")
_ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit")


@dataclass(frozen=True)
class Pace:
    """Translation of optimizer updates to steps."""

    updates: int
    """Optimizer updates of a step here: minibatches × iterations."""
    per_epoch: int | None
    """Optimizer updates of an epoch; None: not known."""
    total: int | None
    """Optimizer updates of the run; None: not known."""
    missing: str = ""
    """Missing value for the two counts, and the option that gives it."""

    def steps(self, updates: int) -> int:
        """Return steps for a number of updates, rounded down, at least 1."""
        return max(1, updates // self.updates)

    def formula(self, updates: str, steps: int) -> str:
        """Return the formula of a number of updates that became steps."""
        return f"{updates} updates ÷ {self.updates} per step = {steps}" if self.updates > 1 else f"{updates} steps"


def generation_of(sizes: TrlBatchSizes) -> int:
    """Return the completions of a generation."""
    per_pass = sizes.per_device_train_batch_size * sizes.world_size
    return sizes.generation_batch_size or per_pass * (sizes.steps_per_generation or sizes.gradient_accumulation_steps)


def batch_formula(sizes: TrlBatchSizes, groups: int, parts: int) -> str:
    """Return the formula of groups and minibatches with its numbers."""
    world = sizes.world_size
    per_pass = f"{sizes.per_device_train_batch_size} per device × {world} processes"
    accumulation = sizes.gradient_accumulation_steps
    if sizes.generation_batch_size is not None:
        completions = f"generation_batch_size {sizes.generation_batch_size}"
        steps = sizes.generation_batch_size // (sizes.per_device_train_batch_size * world)
    else:
        steps = sizes.steps_per_generation or accumulation
        completions = f"{per_pass} × {steps} steps per generation"
    if steps < accumulation:
        completions = f"{per_pass} × {accumulation} accumulated, of {accumulation // steps} generations,"
    text = f"{completions} ÷ {sizes.num_generations} = {groups} groups"
    return f"{text}; {steps} ÷ {accumulation} accumulated = {parts} updates" if parts > 1 else text


def updates_per_epoch(number: int, sizes: TrlBatchSizes) -> int:
    """Return the optimizer updates of an epoch.

    The sampler gives whole generations, each `num_iterations × steps_per_generation` times, and drops the rest.

    Raises:
        ConfigError: the rows do not fill a generation.
    """
    generation = generation_of(sizes)
    prompts = generation // sizes.num_generations
    if number < prompts:
        raise ConfigError(
            f"--rows: {number} rows are fewer than the {prompts} prompts of a generation; the origin would not train"
        )
    per_pass = sizes.per_device_train_batch_size * sizes.world_size
    micro_steps = number // prompts * sizes.num_iterations * (generation // per_pass)
    return max(1, math.ceil(micro_steps / sizes.gradient_accumulation_steps))


def run_name(job: Import) -> None:
    """Write the name of the run, with other signs than letters, digits, `_`, `.` and `-` as dashes."""
    name = str(job.value("run_name"))
    clean = "".join(letter if letter.isalnum() or letter in "_.-" else "-" for letter in name)
    if clean != name and not job.unreadable(["run_name"]):
        job.convert("run_name", {"name": clean}, "letters, digits, _ . and - only")
    elif job.is_set("run_name"):
        job.rename("run_name", "name")
    job.settle("run_name", "empty")


def embedded_engine(job: Import) -> None:
    """Write the engine of a run without vLLM, after the lengths and the size of groups."""
    job.run.set("inference.engine.type", "embedded", "use_vllm false: transformers samples")
    job.run.set("inference.engine.max_sequence_len", job.run.get("packer.sequence_len"), "packer.sequence_len")
    group = job.run.get("rollout.group_size")
    # the engine's default is 256, and a group is sampled at once
    if isinstance(group, int) and group > 256:
        job.run.set("inference.engine.max_sequences", group, "a group at once")
    job.run.set("up.colocate", True, "sampling and training share the GPU")
    job.settle("use_vllm", "false: engine embedded")


def function_of_option(job: Import, name: str, number: int) -> str | None:
    """Return the function that `--reward` gives for a reward of the origin.

    Args:
        job: the import.
        name: the reward.
        number: rewards that no file gives. FILE.py:F is for one of them, FILE.py for all by their names.
    """
    option = job.options.reward
    if option is None or ":" in option:
        return option if number == 1 else None
    return f"{option}:{name}" if name.isidentifier() else None


def rows(job: Import) -> int | None:
    """Return the number of training rows, as `--rows` says or counted in `--data`; None if neither is there."""
    if job.options.rows is not None or job.options.data is None or not job.options.data.is_file():
        return job.options.rows
    with job.options.data.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def length(job: Import, updates: int, per_epoch: int | None, missing: str) -> Pace:
    """Write `trainer.max_steps`, or `trainer.max_epochs` where the rows are not known, and return the pace.

    Args:
        job: the import.
        updates: optimizer updates of a step here.
        per_epoch: optimizer updates of an epoch, if known.
        missing: what is missing for `per_epoch`.
    """
    max_steps, epochs = job.value("max_steps"), job.value("num_train_epochs")
    if job.unreadable(["max_steps"]):
        job.convert("max_steps", {"trainer.max_steps": 1}, "")
        job.settle("num_train_epochs", "max_steps decides")
        return Pace(updates, per_epoch, None, "--max_steps VALUE")
    if max_steps is not None and max_steps > 0:
        steps = math.ceil(max_steps / updates)
        formula = f"⌈{max_steps} updates ÷ {updates} per step⌉ = {steps}" if updates > 1 else ""
        job.convert("max_steps", {"trainer.max_steps": steps}, formula)
        job.settle("num_train_epochs", "max_steps decides")
        return Pace(updates, per_epoch, max_steps, missing)
    keys = ["num_train_epochs", "max_steps"]
    if per_epoch is None and epochs > 0:
        # passes over the data need no count of the rows
        job.convert(
            keys, {"trainer.max_epochs": epochs}, f"{epochs:g} epochs, the steps of which are counted at the start"
        )
        return Pace(updates, None, None, missing)
    if per_epoch is None or epochs <= 0:
        raise ConfigError(f"num_train_epochs: {epochs:g} must be above 0; a run of no epochs trains nothing")
    total = math.ceil(epochs * per_epoch)
    steps = math.ceil(total / updates)
    formula = f"⌈{epochs:g} epochs × {per_epoch} updates⌉ = {total} updates"
    job.convert(keys, {"trainer.max_steps": steps}, f"{formula}, ⌈÷ {updates} per step⌉ = {steps}")
    return Pace(updates, per_epoch, total, missing)


def schedule(job: Import, pace: Pace) -> None:
    """Write learning rate, schedule and warm-up."""
    if job.is_set("learning_rate"):
        job.rename("learning_rate", "trainer.learning_rate")
    else:
        rate = job.defaults["learning_rate"]
        job.convert("learning_rate", {"trainer.learning_rate": rate}, f"empty: {rate:g}")
    kind = str(job.value("lr_scheduler_type"))
    options = {key: job.given[key] for key in job.given if key.startswith("lr_scheduler_kwargs.")}
    values = {key.partition(".")[2]: value for key, value in options.items()}
    targets, used = _schedule(kind, values, job)
    keys = ["lr_scheduler_type", *(key for key in options if key.partition(".")[2] in used)]
    if not targets:
        job.refuse(
            "lr_scheduler_type",
            f"no schedule {kind} here; the rate stays constant after the warm-up",
            "set trainer.lr_scheduler",
        )
    elif targets == {"trainer.lr_scheduler": kind} and not used:
        job.rename("lr_scheduler_type", "trainer.lr_scheduler")
    else:
        shown = [f"{kind} is {targets['trainer.lr_scheduler']}"]
        shown += [f"{key.removeprefix('trainer.')} {value}" for key, value in list(targets.items())[1:]]
        job.convert(keys, targets, ", ".join(shown))
    for key in options:
        if not job.is_reported(key):
            job.refuse(key, f"no parameter of schedule {kind} has a counterpart here")
    job.settle("lr_scheduler_kwargs", "empty")
    has_warm_up = _warm_up(job, kind)
    if has_warm_up or kind not in ("constant", "constant_with_warmup"):
        # transformers counts updates, from 0
        job.run.set("trainer.lr_schedule.unit", "update", "each update has a rate of its own")
        job.run.set(
            "trainer.lr_schedule.first", int(kind == _FROM_ONE), f"transformers counts from {int(kind == _FROM_ONE)}"
        )


_FROM_ONE = "cosine_warmup_with_min_lr"
"""Schedule of transformers that counts updates from 1."""


def _schedule(kind: str, options: dict[str, Any], job: Import) -> tuple[dict[str, Any], set[str]]:
    """Return the keys here, and the parameters that they follow from; no keys if there is no such schedule."""
    rate = job.value("learning_rate") or job.defaults["learning_rate"]
    own = {"trainer.lr_scheduler": kind}
    # half a wave is the default of all cosines
    half = {"num_cycles"} if options.get("num_cycles") == 0.5 else set()
    if kind in ("constant", "constant_with_warmup", "linear", "inverse_sqrt"):
        has_scale = kind == "inverse_sqrt" and options.get("timescale") is not None
        found = {"trainer.lr_schedule.timescale": int(options["timescale"])} if has_scale else {}
        return own | found, {"timescale"} if has_scale else set()
    if kind == "cosine":
        return own, half
    if kind in ("cosine_with_min_lr", _FROM_ONE) and not options.get("warmup_lr_rate"):
        name = "min_lr_rate" if options.get("min_lr_rate") is not None else "min_lr"
        if options.get(name) is None:
            return {}, set()
        ratio = float(options[name]) if name == "min_lr_rate" else float(options[name]) / rate
        return {"trainer.lr_scheduler": "cosine", "trainer.min_lr_ratio": ratio}, half | {name, "warmup_lr_rate"}
    if kind == "cosine_with_restarts":
        cycles = int(options.get("num_cycles", 1))
        return own | ({"trainer.lr_schedule.num_cycles": cycles} if cycles != 1 else {}), {"num_cycles"}
    if kind == "polynomial":
        power, end = options.get("power", 1.0), float(options.get("lr_end", 1e-7))
        found = {"trainer.min_lr_ratio": end / rate} | ({"trainer.lr_schedule.power": power} if power != 1 else {})
        return own | found, {"power", "lr_end"}
    if kind == "warmup_stable_decay":
        return _stable(options, half)
    return {}, set()


def _stable(options: dict[str, Any], half: set[str]) -> tuple[dict[str, Any], set[str]]:
    """Return the keys of a schedule that falls at the end of the run alone, and the parameters they follow from."""
    decay, shape = options.get("num_decay_steps"), options.get("decay_type", "cosine")
    is_plain = options.get("warmup_type", "linear") == "linear" and "num_stable_steps" not in options
    if not decay or not is_plain or shape not in ("cosine", "linear", "1-sqrt"):
        return {}, set()
    found = {"trainer.lr_scheduler": "warmup_stable_decay", "trainer.lr_schedule.decay_steps": int(decay)}
    found |= {"trainer.lr_schedule.decay_type": shape, "trainer.min_lr_ratio": float(options.get("min_lr_ratio", 0.0))}
    return found, half | {"num_decay_steps", "decay_type", "min_lr_ratio", "warmup_type"}


def _warm_up(job: Import, kind: str) -> bool:
    """Write the warm-up in updates or as a share of the run, and return whether there is one."""
    keys = ["warmup_steps", "warmup_ratio"]
    if kind == "constant":
        for key in keys:
            job.settle(key, "transformers' constant has no warm-up; constant_with_warmup has")
        return False
    if job.unreadable(keys):
        job.convert(keys, {"trainer.warmup_steps": 0}, "")
        return True
    steps, ratio = job.value("warmup_steps") or 0, job.value("warmup_ratio") or 0.0
    # transformers 5 reads a number below 1 as a share of all updates
    if 0 < steps < 1 or (ratio and not steps):
        used, share = ("warmup_steps", steps) if steps else ("warmup_ratio", ratio)
        if not 0 <= share <= 1:
            raise ConfigError(f"{used}: {share:g} must be between 0 and 1; it is a share of all updates")
        job.rename(used, "trainer.warmup_ratio", float(share), f"{share:g} of all updates, rounded up")
    elif steps:
        job.rename("warmup_steps", "trainer.warmup_steps", int(steps), "counted in updates, as there")
    elif any(key in job.given for key in keys):
        job.convert(keys, {"trainer.warmup_steps": 0}, "no warm-up")
    for key in keys:
        job.settle(key, "the other key of the warm-up counts" if steps or ratio else "no warm-up")
    return bool(steps or ratio)


def optimizer(job: Import, key: str = "optim") -> None:
    """Write the optimizer, its parameters, and the limit of gradients."""
    kind = str(job.value(key))
    if kind in _ADAMW or kind in _ADAMW_8BIT:
        ours = "adamw" if kind in _ADAMW else "adamw_8bit"
        job.convert(key, {"trainer.optimizer.type": ours}, f"{kind} is {ours}")
    else:
        job.refuse(key, f"no optimizer {kind} here; the run has AdamW", "set trainer.optimizer")
    for theirs, here in (("adam_beta1", "beta1"), ("adam_beta2", "beta2"), ("adam_epsilon", "eps")):
        job.rename(theirs, f"trainer.optimizer.{here}")
    job.rename("weight_decay", "trainer.optimizer.weight_decay")
    norm = job.value("max_grad_norm")
    if norm:
        job.rename("max_grad_norm", "trainer.max_grad_norm")
    else:
        job.convert("max_grad_norm", {"trainer.max_grad_norm": None}, f"{norm}: no maximum")


def checkpoints(job: Import, pace: Pace) -> None:
    """Write the interval of checkpoints and their number."""
    strategy, save_steps = str(job.value("save_strategy")), job.value("save_steps")
    section = "trainer.checkpoint"
    if strategy == "steps" and save_steps >= 1:
        interval = pace.steps(int(save_steps))
        job.convert(["save_steps"], {f"{section}.interval": interval}, pace.formula(f"{int(save_steps)}", interval))
        job.settle("save_strategy", "save_steps counts")
    elif strategy == "steps" and save_steps > 0:
        job.rename(
            "save_steps", f"{section}.interval_share", float(save_steps), "a number below 1 is a share of the run"
        )
        job.settle("save_strategy", "save_steps counts")
    elif strategy in ("steps", "no"):
        text = f"{strategy}: nothing is saved before the end" if strategy == "no" else "save_steps 0: at the end alone"
        job.convert(["save_strategy", "save_steps"], {f"{section}.interval_share": 1.0}, text)
    elif strategy == "epoch" and job.run.get("trainer.max_epochs") is not None:
        job.convert("save_strategy", {f"{section}.interval_epochs": 1.0}, "by epoch")
    elif strategy == "epoch" and pace.per_epoch is not None:
        interval = pace.steps(pace.per_epoch)
        text = pace.formula(f"an epoch has {pace.per_epoch}", interval)
        job.convert("save_strategy", {f"{section}.interval": interval}, text)
    elif strategy == "epoch":
        job.convert("save_strategy", {f"{section}.interval": 1}, "by epoch")
        job.ask(f"{section}.interval", f"steps between two checkpoints, one epoch; {pace.missing}")
    else:
        job.refuse("save_strategy", f"no strategy {strategy} here", "set trainer.checkpoint.interval")
    job.settle("save_steps", f"save_strategy {strategy} decides")
    _kept(job, strategy)


def _kept(job: Import, strategy: str) -> None:
    limit = job.value("save_total_limit")
    if strategy == "no":
        job.settle("save_total_limit", "nothing is saved before the end")
    elif not job.unreadable(["save_total_limit"]) and (limit is None or limit <= 0):
        job.convert("save_total_limit", {"trainer.checkpoint.keep_last": None}, f"{limit}: all checkpoints are kept")
    else:
        job.rename("save_total_limit", "trainer.checkpoint.keep_last")


def no_evaluation(job: Import, reason: str, keys: tuple[str, ...]) -> None:
    """Write that nothing is evaluated, which is not the default here."""
    job.run.set("eval.num_prompts", 0, reason)
    for key in keys:
        job.settle(key, reason)


def evaluation(job: Import, pace: Pace, completions: int, keys: tuple[str, ...]) -> None:
    """Write an evaluation on the whole held-out split, sampled as in training.

    Args:
        job: the import.
        pace: updates and steps.
        completions: completions of each prompt.
        keys: keys that are decided with the strategy and need no entry of their own.
    """
    strategy, given = str(job.value("eval_strategy")), job.value("eval_steps")
    # transformers evaluates as often as it logs where eval_steps is left out
    updates = given or job.value("logging_steps")
    targets: dict[str, Any] = {
        "eval.num_prompts": ALL,
        "eval.completions_per_prompt": completions,
        "eval.temperature": job.value("temperature"),
        "eval.at_start": bool(job.value("eval_on_start")),
        "eval.at_end": False,
        "eval.exact_match": None,
    }
    missing = False
    if strategy == "epoch":
        missing = pace.per_epoch is None
        every = 1 if pace.per_epoch is None else pace.steps(pace.per_epoch)
    elif updates < 1:
        missing = pace.total is None
        every = 1 if pace.total is None else pace.steps(math.ceil(updates * pace.total))
    else:
        every = pace.steps(int(updates))
    job.convert(
        ["eval_strategy", "eval_steps", "eval_on_start", *keys],
        targets | {"eval.every_steps": every},
        f"by {strategy}: every {every} steps, all held-out rows, {completions} completions each at the temperature of "
        "training",
    )
    if missing:
        job.ask("eval.every_steps", f"steps between two evaluations; {pace.missing}")


def moving_reference(job: Import, pace: Pace) -> None:
    """Write the moves of the reference towards the policy. Call after the keys of reference and adapter."""
    keys = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    if not (job.value("sync_ref_model") or job.unreadable(["sync_ref_model"])):
        job.irrelevant("sync_ref_model", "switched off")
    elif job.run.get("trainer.reference.beta") is None:
        job.irrelevant("sync_ref_model", "beta 0: no reference")
    elif job.run.get("model.lora.rank") is not None:
        job.refuse("sync_ref_model", "with an adapter the reference is the base model, which stays as it is")
    else:
        updates = int(job.value(keys[0]))
        steps = pace.steps(updates)
        text = f"every {pace.formula(str(updates), steps)}"
        job.convert(["sync_ref_model", keys[0]], {"trainer.reference.sync.every_steps": steps}, text)
        job.rename(keys[1], "trainer.reference.sync.alpha")
    for key in keys:
        job.settle(key, "only with sync_ref_model")


def adapter_forms(job: Import, names: Mapping[str, str], has_server: bool) -> None:
    """Write scale, direction, initial values and whole modules of adapters. Call after the rank.

    Args:
        job: the import.
        names: keys of the origin by those of peft: use_rslora, use_dora, init_lora_weights, modules_to_save.
        has_server: whether a server of vLLM samples, which serves plain adapters alone.
    """
    key = names["use_rslora"]
    if key in job.given and job.given[key] is not False:
        job.rename(key, "model.lora.rslora", text="scale alpha ÷ √rank")
    job.settle(key, "switched off")
    reason = "vLLM serves none here, and the run has plain adapters"
    for theirs, ours, off in (
        ("use_dora", "dora", (False, None)),
        ("modules_to_save", "modules_to_save", (None, [], "")),
    ):
        key = names.get(theirs, "")
        value = job.given.get(key)
        if key in job.given and not job.unreadable([key]) and value in off:
            job.irrelevant(key, "switched off")
        elif has_server:
            job.refuse(key, reason, f"set inference.engine.type embedded and model.lora.{ours}")
        elif key in job.given:
            job.rename(key, f"model.lora.{ours}", [value] if isinstance(value, str) else value)
    _initial_values(job, names["init_lora_weights"])


def _initial_values(job: Import, key: str) -> None:
    kind, rank = job.given.get(key, True), job.run.get("model.lora.rank")
    if str(kind).lower() in ("true", "default"):
        job.settle(key, "kaiming, the default here too")
    elif kind == "gaussian" or (kind == "orthogonal" and isinstance(rank, int) and rank % 2 == 0):
        job.rename(key, "model.lora.init", kind)
    else:
        job.refuse(key, "adapters start as kaiming, gaussian or orthogonal (with an even rank) here", "kaiming is used")


def prompt_limit(job: Import, key: str, treatment: str, text: str) -> None:
    """Write the longest prompt of each environment. Call after the environments.

    Args:
        job: the import.
        key: key of the origin with the number of tokens.
        treatment: value of `long_prompts`.
        text: what the origin does with longer prompts.
    """
    limit = job.value(key)
    if limit is None and not job.unreadable([key]):
        job.settle(key, "empty: no limit")
        return
    numbers = [number for number in range(64) if job.run.get(f"environments.{number}.type") is not None]
    job.convert(key, {f"environments.{number}.max_prompt_tokens": limit for number in numbers}, text)
    for number in numbers:
        job.run.set(f"environments.{number}.long_prompts", treatment, text)


def chat_variables(job: Import, prefix: str, target: str) -> None:
    """Write variables of the chat template, `PREFIX.NAME`, for the prompts of an environment."""
    for key in job.keys_below(prefix):
        if not job.is_reported(key):
            job.rename(key, f"{target}.chat_template_kwargs.{key.removeprefix(prefix + '.')}")
    job.settle(prefix, "empty")


def lora_targets(job: Import, model: Any) -> list[str] | None:
    """Return peft's modules where no file names them, by the family in a model's name; None if it is not known."""
    name = Path(str(model)).name.lower()
    families = ("qwen2", "qwen-2", "llama", "mistral", "gemma-2b", "gemma-7b", "gemma-2", "gemma-3-1b", "smollm2")
    is_qwen3 = "qwen3" in name and not any(other in name for other in ("moe", "-a3b", "-a22b", "qwen3.", "next", "vl"))
    if (is_qwen3 or any(family in name for family in families)) and "-vl" not in name:
        return ["q_proj", "v_proj"]
    return None


def sharding(job: Import, world: int | None, is_sharded: bool, keys: tuple[str, ...], text: str) -> None:
    """Write whether the model is sharded, after quantisation, which may forbid it."""
    if not is_sharded:
        for key in keys:
            job.convert(key, {"trainer.sharding": "none"}, text)
        return
    blocked = [
        name
        for name, found in (
            ("model.quantization", job.run.get("model.quantization.type") is not None),
            ("trainer.sft", job.run.get("trainer.sft.path") is not None),
        )
        if found
    ]
    if blocked:
        text += f"; {' and '.join(blocked)} can't be sharded here: each rank has the whole model"
    elif world == 1:
        text += "; one process has nothing to shard"
    ours = "none" if blocked or world == 1 else "fsdp"
    job.convert(list(keys), {"trainer.sharding": ours}, text)
