"""Run length in epochs."""

import pytest

from actors.algorithms.run_length import steps_of_epochs


@pytest.mark.parametrize(
    ("num_examples", "groups_per_step", "num_epochs", "num_steps"),
    [(100, 8, 1, 12), (100, 8, 3, 36), (100, 8, 1.5, 18), (96, 8, 1, 12), (8, 8, 0.1, 1), (9, 2, 0.6, 3), (7, 8, 5, 0)],
)
def test_an_epoch_has_the_steps_that_its_examples_fill(num_examples, groups_per_step, num_epochs, num_steps):
    """Left-over examples make no step; a fraction of an epoch is rounded up to a step."""
    assert steps_of_epochs(num_examples, groups_per_step, num_epochs) == num_steps
