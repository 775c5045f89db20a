"""Batches and lengths of TRL: one generation is one step."""

import math
from typing import Any

from actors.algorithms.batch_sizes import TrlBatchSizes, our_keys
from actors.imports.huggingface import (
    Pace,
    batch_formula,
    evaluation,
    generation_of,
    length,
    no_evaluation,
    rows,
    updates_per_epoch,
)
from actors.imports.job import Import
from schemas.errors import ConfigError

_SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
)
_WORLD = ("accelerate.num_processes", "num_processes")
_NO_WORLD = "trainer processes of the run (num_processes of accelerate); --world N"


def world_of(job: Import) -> int | None:
    """Write `trainer.num_ranks` and return it; None if no file says it."""
    keys = [key for key in _WORLD if key in job.given]
    kind = job.given.get("accelerate.distributed_type")
    if job.options.world is not None:
        job.run.set("trainer.num_ranks", job.options.world, "--world")
        for key in keys:
            job.settle(key, "--world decides")
        return job.options.world
    if str(kind).upper() == "NO" or kind is False:
        job.convert(
            [*keys, "accelerate.distributed_type"], {"trainer.num_ranks": 1}, "distributed_type NO: one process"
        )
        return 1
    named = str(job.given.get("accelerate_config", job.given.get("config_file", "")))
    if keys and job.given[keys[-1]] is not None and not job.unreadable(keys):
        world = int(job.given[keys[-1]])
        job.convert(keys[-1:], {"trainer.num_ranks": world}, f"{world} processes")
        for key in keys:
            job.settle(key, f"{keys[-1]} decides")
        return world
    if named in ("fsdp1", "fsdp2", "multi_gpu", "zero1", "zero2", "zero3"):
        job.run.set("trainer.num_ranks", 8, f"num_processes of TRL's accelerate_config {named}")
        return 8
    job.ask("trainer.num_ranks", _NO_WORLD)
    return None


def batches(job: Import, trainer: str, version: tuple[int, int], world: int | None) -> Pace:
    """Write groups, minibatches and the length of the run, and return the pace.

    Raises:
        ConfigError: TRL refuses the numbers too, or an update would straddle two generations.
    """
    if trainer == "async":
        return _async(job, world)
    sizes = _sizes(job, version, world or 1)
    completions = job.value("num_generations")
    if job.unreadable([*_SIZES, "num_generations"]) or world is None:
        return _open(job, sizes)
    ours = _our_keys(sizes, version)
    if version < (0, 17) and (sizes.per_device_train_batch_size * world) % completions and version >= (0, 15):
        raise ConfigError(
            f"num_generations: {completions} must divide per_device_train_batch_size "
            f"{sizes.per_device_train_batch_size} × {world} processes before TRL 0.17"
        )
    # one step for each generation, with its updates as minibatches: `old` stays at the sampling weights
    groups, parts = ours["packer.groups_per_step"], ours["trainer.num_minibatches"]
    job.rename("num_generations", "rollout.group_size")
    targets = {"packer.groups_per_step": groups, "trainer.num_minibatches": parts}
    keys = [key for key in _SIZES if key != "num_iterations"]
    job.convert(keys, targets, batch_formula(sizes, groups, parts))
    job.rename("num_iterations", "trainer.num_iterations")
    job.run.set("packer.max_async_level", 0, "generation and training alternate")
    generation = generation_of(sizes)
    _note_uneven(job, sizes, generation)
    number = rows(job)
    missing = "rows of the training data; --rows N"
    per_epoch = None if number is None else _per_epoch(number, sizes, version)
    return length(job, parts * sizes.num_iterations, per_epoch, missing)


def _sizes(job: Import, version: tuple[int, int], world: int) -> TrlBatchSizes:
    """Return the sizes.

    Raises:
        ConfigError: a number is not positive, or both sizes of a generation are given, which TRL always refuses.
    """
    values: dict[str, Any] = {key: job.value(key) for key in (*_SIZES, "num_generations")}
    for key, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{key}: must be 1 or more, got {value}")
    if values["generation_batch_size"] is not None and values["steps_per_generation"] is not None:
        raise ConfigError(
            "generation_batch_size: TRL refuses it together with steps_per_generation; leave one of them out"
        )
    # before 0.15 a device's batch counted prompts
    scale = values["num_generations"] if version < (0, 15) else 1
    return TrlBatchSizes(
        per_device_train_batch_size=values["per_device_train_batch_size"] * scale,
        num_generations=values["num_generations"],
        world_size=world,
        generation_batch_size=values["generation_batch_size"],
        steps_per_generation=values["steps_per_generation"],
        gradient_accumulation_steps=values["gradient_accumulation_steps"],
        num_iterations=values["num_iterations"],
    )


def _note_uneven(job: Import, sizes: TrlBatchSizes, generation: int) -> None:
    update = sizes.per_device_train_batch_size * sizes.world_size * sizes.gradient_accumulation_steps
    if update > generation:
        job.note(
            "steps_per_generation is below gradient_accumulation_steps: an update has several generations of the same "
            "weights, which are one step here"
        )


def _our_keys(sizes: TrlBatchSizes, version: tuple[int, int]) -> dict[str, Any]:
    """Return the keys here.

    Raises:
        ConfigError: TRL refuses the numbers too, with what they meant in the first release.
    """
    try:
        return our_keys(sizes)
    except ConfigError as error:
        is_plain = sizes.generation_batch_size is None and sizes.steps_per_generation is None
        if not is_plain or version < (0, 15) or sizes.num_generations < 2:
            raise
        hint = "; before TRL 0.15 per_device_train_batch_size counted prompts: --from-version 0.14"
        raise ConfigError(*(problem + hint for problem in error.problems)) from None


def _per_epoch(number: int, sizes: TrlBatchSizes, version: tuple[int, int]) -> int:
    """Return the optimizer updates of an epoch. Before 0.20 the sampler's length counted the rest of the data too."""
    if version >= (0, 20):
        return updates_per_epoch(number, sizes)
    per_pass = sizes.per_device_train_batch_size * sizes.world_size
    micro_steps = math.ceil(number * sizes.num_generations * sizes.num_iterations / per_pass)
    return max(1, math.ceil(micro_steps / sizes.gradient_accumulation_steps))


def _open(job: Import, sizes: TrlBatchSizes) -> Pace:
    """Write what can be said without the number of processes."""
    accumulation = sizes.gradient_accumulation_steps
    steps = sizes.steps_per_generation or accumulation
    is_known = sizes.generation_batch_size is None and not job.unreadable(_SIZES)
    if is_known and steps % accumulation and accumulation % steps:
        # as with any number of processes
        our_keys(sizes)
    job.rename("num_generations", "rollout.group_size")
    keys = [key for key in _SIZES if key != "num_iterations"]
    parts = max(steps // accumulation, 1)
    job.convert(keys, {"packer.groups_per_step": 1, "trainer.num_minibatches": parts}, "× processes ÷ completions")
    if not job.unreadable(keys):
        job.ask("packer.groups_per_step", f"completions of a generation ÷ {sizes.num_generations}; {_NO_WORLD}")
        if not is_known:
            job.ask("trainer.num_minibatches", f"updates per generation; {_NO_WORLD}")
    job.rename("num_iterations", "trainer.num_iterations")
    job.run.set("packer.max_async_level", 0, "generation and training alternate")
    updates = parts * sizes.num_iterations
    if is_known:
        return length(job, updates, None, _NO_WORLD)
    pace = length(job, updates, None, _NO_WORLD)
    if job.run.get("trainer.max_epochs") is None:
        job.ask("trainer.max_steps", f"steps of the run; {_NO_WORLD}")
    return pace


def _async(job: Import, world: int | None) -> Pace:
    per_device, accumulation = job.value("per_device_train_batch_size"), job.value("gradient_accumulation_steps")
    completions = job.value("num_generations")
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    job.rename("num_generations", "rollout.group_size")
    groups = math.ceil(per_device * (world or 1) * accumulation / completions)
    text = f"{per_device} per device × {world} processes × {accumulation} accumulated ÷ {completions} = {groups}"
    if per_device * (world or 1) * accumulation % completions:
        text += ", rounded up: a group stays in one step"
    job.convert(keys, {"packer.groups_per_step": groups}, text)
    if world is None:
        job.ask("packer.groups_per_step", _NO_WORLD)
    if (job.value("token_budget") or 1) > 0:
        job.note(
            "AsyncGRPOTrainer fills micro-batches up to token_budget, so the completions of its updates vary around "
            "this number"
        )
    number = rows(job)
    missing = _NO_WORLD if world is None else "rows of the training data; --rows N"
    epochs = job.value("num_train_epochs")
    if number is None or world is None or job.value("max_steps") > 0 or job.unreadable(["max_steps"]):
        return length(job, 1, None if number is None else math.ceil(number / groups), missing)
    # epochs end after a number of groups
    steps = math.ceil(math.ceil(epochs * number) / groups)
    job.convert(
        ["num_train_epochs", "max_steps"],
        {"trainer.max_steps": steps},
        f"⌈{epochs:g} epochs × {number} rows ÷ {groups} groups⌉ = {steps}",
    )
    return Pace(1, math.ceil(number / groups), steps, missing)


def evaluations(job: Import, pace: Pace, world: int | None, has_data: bool) -> bool:
    """Write the evaluation, and return whether there is one.

    Raises:
        ConfigError: transformers or TRL refuses the keys.
    """
    alias = "evaluation_strategy"
    if alias in job.given and "eval_strategy" not in job.given:
        job.defaults["eval_strategy"] = job.given[alias]
    strategy = job.value("eval_strategy")
    others = ("eval_steps", "eval_on_start", "num_generations_eval", "per_device_eval_batch_size", "do_eval", alias)
    for key in ("eval_strategy", "save_strategy"):
        if isinstance(job.value(key), bool):
            raise ConfigError(f'{key}: {job.value(key)} is no strategy; YAML reads a bare no as false, so write "no"')
    if strategy not in ("no", "steps", "epoch"):
        raise ConfigError(f"eval_strategy: {strategy!r} must be one of no, steps, epoch")
    if strategy == "no":
        no_evaluation(job, "eval_strategy no: nothing is evaluated", ("eval_strategy", *others))
        return False
    if not has_data:
        raise ConfigError(f"eval_strategy: {strategy}, but the script gives no eval_dataset; transformers refuses that")
    completions = job.defaults.get("num_generations_eval") or job.value("num_generations")
    if job.given.get("num_generations_eval") and not job.unreadable(["num_generations_eval"]):
        completions = job.given["num_generations_eval"]
    size = job.value("per_device_eval_batch_size") * (world or completions)
    if size % completions:
        raise ConfigError(
            f"per_device_eval_batch_size: {size} completions of all processes must be a multiple of the {completions} "
            "generations of a prompt"
        )
    evaluation(job, pace, completions, others if job.value("eval_steps") else (*others, "logging_steps"))
    return True
