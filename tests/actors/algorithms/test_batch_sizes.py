"""Batch sizes of TRL and ms-swift in our keys, and what does not divide."""

from typing import Any

import pytest

from actors.algorithms.batch_sizes import TrlBatchSizes, our_keys
from schemas.errors import ConfigError


def keys(**given: Any) -> tuple[int, ...]:
    """groups_per_step, num_minibatches, group_size, num_ranks, num_iterations."""
    found = our_keys(TrlBatchSizes(**{"per_device_train_batch_size": 8, "num_generations": 8} | given))
    assert found["packer.max_async_level"] == 0
    names = ("packer.groups_per_step", "trainer.num_minibatches", "rollout.group_size", "trainer.num_ranks")
    return *(found[name] for name in names), found["trainer.num_iterations"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 1, 8, 1, 1)),
        ({"world_size": 4}, (4, 1, 8, 4, 1)),
        ({"world_size": 4, "steps_per_generation": 4}, (16, 4, 8, 4, 1)),
        ({"world_size": 4, "generation_batch_size": 128}, (16, 4, 8, 4, 1)),
        ({"world_size": 4, "generation_batch_size": 128, "steps_per_generation": 4}, (16, 4, 8, 4, 1)),
        ({"gradient_accumulation_steps": 4}, (4, 1, 8, 1, 1)),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 8}, (8, 2, 8, 1, 1)),
        ({"num_iterations": 2, "steps_per_generation": 2}, (2, 2, 8, 1, 2)),
        ({"num_generations": 16, "steps_per_generation": 2}, (1, 2, 16, 1, 1)),
        # fewer passes in a generation than in an update: four generations of the same weights, one update
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1}, (4, 1, 8, 1, 1)),
        # an update of 4 completions is half a group
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, (1, 2, 8, 1, 1)),
    ],
)
def test_a_generation_of_theirs_is_a_step_of_ours(given: dict[str, int], expected: tuple[int, ...]) -> None:
    """128 completions per generation on 4 devices of 8 are one step with four updates; `old` is of its start."""
    assert keys(**given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_generations": 3}, r"num_generations: 3 must divide generation_batch_size 8 .*valid are 2, 4, 8$"),
        ({"num_generations": 1}, r"num_generations: 1 .*valid are 2, 4, 8$"),
        ({"num_generations": 16}, r"num_generations: 16 .*valid are 2, 4, 8$"),
        ({"generation_batch_size": 20}, r"generation_batch_size: 20 is no multiple of .* = 8$"),
        (
            {"generation_batch_size": 32, "steps_per_generation": 2},
            r"generation_batch_size: 32 contradicts steps_per_generation 2, which makes 16",
        ),
        (
            {"gradient_accumulation_steps": 2, "generation_batch_size": 24},
            r"generation_batch_size: 24 must be a multiple of the 16 completions of an optimizer update, or divide",
        ),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2},
            r"num_iterations: 2 with 2 generations in one optimizer step",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_values_that_would(given: dict[str, int], message: str) -> None:
    """And two sizes that contradict each other are, where ms-swift lets one of them win."""
    with pytest.raises(ConfigError, match=message):
        keys(**given)
