"""Keys of transformers' TrainingArguments, shared by TRL and ms-swift: length, learning rate, optimizer, checkpoints.

transformers counts optimizer updates; a step here has `Pace.updates` of them.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.algorithms.batch_sizes import TrlBatchSizes
from actors.imports.job import Import
from schemas.errors import ConfigError

ALL = 1_000_000
"""Stands for "all" and "never" where a key here wants a number."""
NO_CLIPPING = 1e9
"""Norm that no gradient reaches."""

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
    """What is missing for the two counts, and the option that gives it."""

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
    """Write `trainer.max_steps` and return the pace.

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
    if per_epoch is None:
        job.convert(keys, {"trainer.max_steps": 1}, f"{epochs:g} epochs")
        job.ask("trainer.max_steps", f"steps of {epochs:g} epochs; {missing}")
        return Pace(updates, None, None, missing)
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
    name, ratio, used = _schedule(kind, {key.partition(".")[2]: value for key, value in options.items()}, job)
    keys = ["lr_scheduler_type", *(key for key in options if key.partition(".")[2] in used)]
    if name is None:
        job.refuse(
            "lr_scheduler_type",
            f"no schedule {kind} here; the rate stays constant after the warm-up",
            "set trainer.lr_scheduler",
        )
    elif kind == name:
        job.rename("lr_scheduler_type", "trainer.lr_scheduler")
    else:
        text = f"{kind} is {name}" + (f" with min_lr_ratio {ratio:g}" if ratio else "")
        targets = {"trainer.lr_scheduler": name} | ({"trainer.min_lr_ratio": ratio} if ratio else {})
        job.convert(keys, targets, text)
    for key in options:
        if not job.report.has(key):
            job.refuse(key, f"no parameter of schedule {kind} has a counterpart here")
    job.settle("lr_scheduler_kwargs", "empty")
    _warm_up(job, pace, kind)


def _schedule(kind: str, options: dict[str, Any], job: Import) -> tuple[str | None, float, set[str]]:
    """Return the schedule here, its min_lr_ratio, and the parameters that it follows from."""
    rate = job.value("learning_rate") or job.defaults["learning_rate"]
    if kind in ("constant", "linear", "cosine"):
        return kind, 0.0, {"num_cycles"} if options.get("num_cycles") == 0.5 else set()
    if kind == "constant_with_warmup":
        return "constant", 0.0, set()
    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and not options.get("warmup_lr_rate"):
        if "min_lr_rate" in options:
            return "cosine", float(options["min_lr_rate"]), {"min_lr_rate"}
        if "min_lr" in options:
            return "cosine", float(options["min_lr"]) / rate, {"min_lr"}
    # one cycle of cosine with restarts, and a polynomial of power 1, are the schedules that exist here
    if kind == "cosine_with_restarts" and options.get("num_cycles", 1) == 1:
        return "cosine", 0.0, {"num_cycles"}
    if kind == "polynomial" and options.get("power", 1.0) == 1:
        return "linear", float(options.get("lr_end", 1e-7)) / rate, {"power", "lr_end"}
    return None, 0.0, set()


def _warm_up(job: Import, pace: Pace, kind: str) -> None:
    keys = ["warmup_steps", "warmup_ratio"]
    if kind == "constant":
        for key in keys:
            job.settle(key, "transformers' constant has no warm-up; constant_with_warmup has")
        return
    steps, ratio = job.value("warmup_steps") or 0, job.value("warmup_ratio") or 0.0
    # transformers 5 reads a number below 1 as a share of all updates
    share = steps if 0 < steps < 1 else 0.0 if steps else ratio
    if not (steps or ratio):
        if any(key in job.given for key in keys):
            job.convert(keys, {"trainer.warmup_steps": 0}, "no warm-up")
        return
    if share and pace.total is None:
        job.convert(keys, {"trainer.warmup_steps": 0}, f"{share:g} of all updates")
        job.ask("trainer.warmup_steps", f"{share:g} of the steps; {pace.missing}")
        return
    updates = math.ceil(share * (pace.total or 0)) if share else int(steps)
    ours = pace.steps(updates) if updates else 0
    text = f"⌈{share:g} × {pace.total}⌉ = {updates}" if share else f"{updates}"
    job.convert(keys, {"trainer.warmup_steps": ours}, pace.formula(text, ours))


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
        job.convert("max_grad_norm", {"trainer.max_grad_norm": NO_CLIPPING}, f"{norm} is no clipping")


def checkpoints(job: Import, pace: Pace) -> None:
    """Write the interval of checkpoints and their number."""
    strategy, save_steps = str(job.value("save_strategy")), job.value("save_steps")
    keys = ["save_strategy", "save_steps"]
    target = "trainer.checkpoint.interval"
    max_steps = job.run.get("trainer.max_steps")
    interval: int | None = None
    # a number below 1 is a share of the run
    if strategy == "steps" and save_steps >= 1:
        interval = pace.steps(int(save_steps))
        job.convert(["save_steps"], {target: interval}, pace.formula(f"{int(save_steps)}", interval))
        job.settle("save_strategy", "save_steps counts")
    elif strategy == "steps" and pace.total is not None:
        updates = math.ceil(save_steps * pace.total)
        interval = pace.steps(updates)
        job.convert(keys, {target: interval}, pace.formula(f"⌈{save_steps:g} × {pace.total}⌉ = {updates}", interval))
    elif strategy == "epoch" and pace.per_epoch is not None:
        interval = pace.steps(pace.per_epoch)
        job.convert("save_strategy", {target: interval}, pace.formula(f"an epoch has {pace.per_epoch}", interval))
    elif strategy == "no" and isinstance(max_steps, int):
        interval = max_steps
        job.convert("save_strategy", {target: interval}, "no is never; here the last step is saved in any case")
    elif strategy in ("steps", "epoch", "no"):
        job.convert(keys, {target: 1}, f"by {strategy}")
        job.ask(target, f"steps between two checkpoints, {_words(strategy, save_steps)}; {pace.missing}")
    else:
        job.refuse("save_strategy", f"no strategy {strategy} here", "set trainer.checkpoint.interval")
    job.settle("save_steps", f"save_strategy {strategy} decides")
    _kept(job, strategy, interval)


def _words(strategy: str, share: float) -> str:
    return {"epoch": "one epoch", "no": "the whole run"}.get(strategy, f"{share:g} of the run")


def _kept(job: Import, strategy: str, interval: int | None) -> None:
    limit = job.value("save_total_limit")
    if strategy == "no":
        job.settle("save_total_limit", "nothing is saved before the end")
    elif not job.unreadable(["save_total_limit"]) and (limit is None or limit <= 0):
        # HF keeps all
        if interval is not None:
            job.convert(
                "save_total_limit", {"trainer.checkpoint.keep_interval": interval}, f"{limit}: all checkpoints are kept"
            )
        else:
            job.convert("save_total_limit", {"trainer.checkpoint.keep_interval": 1}, f"{limit}: all are kept")
    elif limit == 1:
        job.convert("save_total_limit", {"trainer.checkpoint.keep_last": 2}, "1; the least number here is 2")
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


def lora_targets(job: Import, model: Any) -> list[str] | None:
    """Return peft's modules where no file names them, by the family in a model's name; None if it is not known."""
    name = Path(str(model)).name.lower()
    families = ("qwen2", "qwen-2", "llama", "mistral", "gemma-2b", "gemma-7b", "gemma-2", "gemma-3-1b", "smollm2")
    is_qwen3 = "qwen3" in name and not any(other in name for other in ("moe", "-a3b", "-a22b", "qwen3.", "next", "vl"))
    if (is_qwen3 or any(family in name for family in families)) and "-vl" not in name:
        return ["q_proj", "v_proj"]
    return None


def sharding(job: Import, world: int | None, is_sharded: bool, keys: tuple[str, ...], text: str) -> None:
    """Write whether the model is sharded, after optimizer and quantisation, which may forbid it."""
    if not is_sharded:
        for key in keys:
            job.convert(key, {"trainer.sharding": "none"}, text)
        return
    blocked = [
        name
        for name, found in (
            ("trainer.optimizer adamw_8bit", job.run.get("trainer.optimizer.type") == "adamw_8bit"),
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
