"""Batch sizes of TRL and ms-swift in our keys, and what does not divide."""

from typing import Any

import pytest

from actors.algorithms.batch_words import BatchWords, our_keys
from schemas.errors import ConfigError


def keys(**given: Any) -> tuple[int, ...]:
    """groups_per_step, group_size, max_async_level, num_ranks, num_iterations."""
    found = our_keys(BatchWords(**{"per_device_train_batch_size": 8, "num_generations": 8} | given))
    names = ("packer.groups_per_step", "rollout.group_size", "packer.max_async_level", "trainer.num_ranks")
    return *(found[name] for name in names), found["trainer.num_iterations"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 8, 0, 1, 1)),
        ({"world_size": 4}, (4, 8, 0, 4, 1)),
        ({"world_size": 4, "steps_per_generation": 4}, (4, 8, 3, 4, 1)),
        ({"world_size": 4, "generation_batch_size": 128}, (4, 8, 3, 4, 1)),
        ({"world_size": 4, "generation_batch_size": 128, "steps_per_generation": 4}, (4, 8, 3, 4, 1)),
        ({"gradient_accumulation_steps": 4}, (4, 8, 0, 1, 1)),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 8}, (4, 8, 1, 1, 1)),
        ({"num_iterations": 2, "steps_per_generation": 2}, (1, 8, 1, 1, 2)),
    ],
)
def test_their_sizes_are_these_keys(given: dict[str, int], expected: tuple[int, ...]) -> None:
    """128 completions per generation on 4 devices of 8 are 4 steps, the last one three versions late."""
    assert keys(**given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_generations": 3}, r"num_generations: 3 must divide generation_batch_size 8 .*valid are 2, 4, 8$"),
        ({"num_generations": 1}, r"num_generations: 1 .*valid are 2, 4, 8$"),
        ({"num_generations": 16, "steps_per_generation": 2}, r"num_generations: 16 .*valid are 2, 4, 8$"),
        ({"generation_batch_size": 20}, r"generation_batch_size: 20 is no multiple of .* = 8$"),
        (
            {"generation_batch_size": 32, "steps_per_generation": 2},
            r"generation_batch_size: 32 contradicts steps_per_generation 2, which makes 16",
        ),
        (
            {"gradient_accumulation_steps": 2, "generation_batch_size": 24},
            r"generation_batch_size: 24 is no multiple of the 16 completions",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_values_that_would(given: dict[str, int], message: str) -> None:
    """And two sizes that contradict each other are, where ms-swift lets one of them win."""
    with pytest.raises(ConfigError, match=message):
        keys(**given)
