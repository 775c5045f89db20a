"""Run length in epochs."""

import pytest

from actors.algorithms.run_length import checkpoint_interval, steps_of_epochs
from schemas.config.trainer import TrainerConfig


@pytest.mark.parametrize(
    ("num_examples", "groups_per_step", "num_epochs", "num_steps"),
    [(100, 8, 1, 12), (100, 8, 3, 36), (100, 8, 1.5, 18), (96, 8, 1, 12), (8, 8, 0.1, 1), (9, 2, 0.6, 3), (7, 8, 5, 0)],
)
def test_an_epoch_has_the_steps_that_its_examples_fill(num_examples, groups_per_step, num_epochs, num_steps):
    """Left-over examples make no step; a fraction of an epoch is rounded up to a step."""
    assert steps_of_epochs(num_examples, groups_per_step, num_epochs) == num_steps


@pytest.mark.parametrize(
    ("checkpoint", "interval"),
    [
        ({"interval": 7}, 7),
        ({"interval_share": 0.1}, 4),
        ({"interval_share": 0.01}, 1),
        ({"interval_share": 1.0}, 36),
        ({"interval_epochs": 1}, 12),
        ({"interval_epochs": 0.5}, 6),
        ({"interval_epochs": 0.01}, 1),
    ],
)
def test_checkpoints_are_so_many_steps_apart(checkpoint, interval):
    """Three epochs of 12 steps; a share is rounded up as in transformers, and no interval is below a step."""
    given = {"max_epochs": 3, "checkpoint": checkpoint}
    trainer = TrainerConfig.model_validate(given).model_copy(update={"max_steps": 36})
    assert checkpoint_interval(trainer) == interval
