"""Batch sizes in the words of TRL and ms-swift, in ours.

generation_batch_size = per_device_train_batch_size × world size × steps_per_generation, all in completions:

    8 per device, 4 devices, 8 generations   32 completions a step    packer.groups_per_step 4, rollout.group_size 8
    4 steps per generation                   128 per generation       packer.max_async_level 3

The last of those four steps trains on samples that are three versions old; so it may here.
"""

from dataclasses import dataclass

from schemas.errors import ConfigError


@dataclass(frozen=True)
class BatchWords:
    """What TRL and ms-swift are told. One of the two sizes of a generation may be left out, or both: one step."""

    per_device_train_batch_size: int
    num_generations: int
    world_size: int = 1
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    gradient_accumulation_steps: int = 1
    """Micro-batches of one optimizer step; a step here is an optimizer step."""
    num_iterations: int = 1


def our_keys(words: BatchWords) -> dict[str, int]:
    """The keys of a run's configuration with the same batches.

    Raises:
        ConfigError: names what does not divide, and the values that would.
    """
    per_pass = words.per_device_train_batch_size * words.world_size
    completions = per_pass * words.gradient_accumulation_steps
    generation = _generation_batch_size(words, per_pass)
    _check_divides("generation_batch_size", generation, words.num_generations)
    _check_divides("per_device_train_batch_size × world size × accumulation", completions, words.num_generations)
    if generation % completions:
        raise ConfigError(
            f"generation_batch_size: {generation} is no multiple of the {completions} completions of an optimizer step"
        )
    return {
        "rollout.group_size": words.num_generations,
        "packer.groups_per_step": completions // words.num_generations,
        "packer.max_async_level": generation // completions - 1,
        "trainer.num_ranks": words.world_size,
        "trainer.num_iterations": words.num_iterations,
    }


def _generation_batch_size(words: BatchWords, per_pass: int) -> int:
    by_steps = per_pass * (words.steps_per_generation or words.gradient_accumulation_steps)
    given = words.generation_batch_size
    if given is None:
        return by_steps
    if given % per_pass:
        raise ConfigError(
            f"generation_batch_size: {given} is no multiple of per_device_train_batch_size × world size = {per_pass}"
        )
    if words.steps_per_generation is not None and given != by_steps:
        raise ConfigError(
            f"generation_batch_size: {given} contradicts steps_per_generation {words.steps_per_generation}, which "
            f"makes {by_steps}; leave one of them out"
        )
    return given


def _check_divides(name: str, completions: int, group: int) -> None:
    valid = [number for number in range(2, completions + 1) if completions % number == 0]
    if group not in valid:
        raise ConfigError(
            f"num_generations: {group} must divide {name} {completions} and be 2 or more; valid are "
            f"{', '.join(map(str, valid)) or 'none'}"
        )
