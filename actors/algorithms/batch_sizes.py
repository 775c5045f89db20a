"""Translation of batch sizes from the keys of TRL and ms-swift to the keys of this project.

A generation there is a step here, and completions are the unit there, groups here:
generation_batch_size = per_device_train_batch_size × world size × steps_per_generation.

    8 per device, 4 devices, 8 generations   128 per generation       packer.groups_per_step 16, rollout.group_size 8
    4 steps per generation                   32 per update            trainer.num_minibatches 4

As there, the ratio's `old` stays at the sampling weights in all four updates, and sampling and training alternate
(max_async_level 0).
"""

from dataclasses import dataclass

from schemas.errors import ConfigError


@dataclass(frozen=True)
class TrlBatchSizes:
    """Batch sizes under the keys of TRL and ms-swift.

    generation_batch_size and steps_per_generation give the same size; either may be left out. Without both, a
    generation is one optimizer update.
    """

    per_device_train_batch_size: int
    """Completions of a micro-batch on a device."""
    num_generations: int
    """Completions of a group."""
    world_size: int = 1
    """Devices that train."""
    generation_batch_size: int | None = None
    """Completions of a generation."""
    steps_per_generation: int | None = None
    """Micro-batches of a generation on each device."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of an optimizer update on each device."""
    num_iterations: int = 1
    """Passes over each generation (μ)."""


def our_keys(sizes: TrlBatchSizes) -> dict[str, int]:
    """Return the keys of a run's configuration that give the same batches, as `section.key` → value.

    Raises:
        ConfigError: the sizes do not divide each other; the message names the keys and the valid values.
    """
    per_pass = sizes.per_device_train_batch_size * sizes.world_size
    generation, update = _generation_batch_size(sizes, per_pass), per_pass * sizes.gradient_accumulation_steps
    # from 2 on: a group of one completion has no baseline
    valid = [number for number in range(2, generation + 1) if generation % number == 0]
    if sizes.num_generations not in valid:
        raise ConfigError(
            f"num_generations: {sizes.num_generations} must divide generation_batch_size {generation} and be 2 or "
            f"more; valid are {', '.join(map(str, valid)) or 'none'}"
        )
    # several updates per generation, or several generations accumulated in one update
    if generation % update and update % generation:
        raise ConfigError(
            f"generation_batch_size: {generation} must be a multiple of the {update} completions of an optimizer "
            "update, or divide them"
        )
    if update > generation and sizes.num_iterations > 1:
        raise ConfigError(
            f"num_iterations: {sizes.num_iterations} with {update // generation} generations in one optimizer "
            "step would use each of them several times in it; take num_iterations 1, or a larger generation"
        )
    return {
        "rollout.group_size": sizes.num_generations,
        # an update over several generations is a larger step here
        "packer.groups_per_step": max(generation, update) // sizes.num_generations,
        "packer.max_async_level": 0,
        "trainer.num_ranks": sizes.world_size,
        "trainer.num_iterations": sizes.num_iterations,
        "trainer.num_minibatches": max(generation // update, 1),
    }


def _generation_batch_size(sizes: TrlBatchSizes, per_pass: int) -> int:
    # TRL's default: steps_per_generation = gradient_accumulation_steps
    by_steps = per_pass * (sizes.steps_per_generation or sizes.gradient_accumulation_steps)
    given = sizes.generation_batch_size
    if given is None:
        return by_steps
    if given % per_pass:
        raise ConfigError(
            f"generation_batch_size: {given} is no multiple of per_device_train_batch_size × world size = {per_pass}"
        )
    if sizes.steps_per_generation is not None and given != by_steps:
        raise ConfigError(
            f"generation_batch_size: {given} contradicts steps_per_generation {sizes.steps_per_generation}, which "
            f"makes {by_steps}; leave one of them out"
        )
    return given
