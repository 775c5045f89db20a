"""From what functions returned to one reward per completion, by hand."""

import numpy as np
import pytest

from actors.algorithms.advantages.shaping import combine_rewards, shape, shape_functions
from schemas.config.data import ShapingConfig

NAN = float("nan")


def test_rewards_add_up_with_their_weights() -> None:
    """2 · 1 − 1 · 0.5 and 2 · 0 − 1 · 1."""
    combined = combine_rewards(np.array([[1.0, 0.0], [0.5, 1.0]]), np.array([2.0, -1.0]))
    assert combined.tolist() == [1.5, -1.0]


@pytest.mark.parametrize(("none_as_zero", "unscorable"), [(False, NAN), (True, 0.0)])
def test_a_function_that_returned_none_is_left_out_of_the_sum(none_as_zero: bool, unscorable: float) -> None:
    """It counts as nothing, not as 0 times its weight taken off a mean; where none applied, there is no reward."""
    rewards_FG = np.array([[1.0, NAN, NAN], [NAN, 0.25, NAN]])
    combined = combine_rewards(rewards_FG, np.array([1.0, 2.0]), none_as_zero=none_as_zero)
    np.testing.assert_array_equal(combined, [1.0, 0.5, unscorable])


def test_a_function_of_weight_zero_only_measures_but_makes_a_completion_scorable() -> None:
    """Its value adds nothing."""
    assert combine_rewards(np.array([[7.0]]), np.array([0.0])).tolist() == [0.0]


def test_bias_then_scale_then_clip() -> None:
    """AReaL's order: (0.5 − 0.5) · 10 = 0, (1 − 0.5) · 10 = 5 → 4, (0 − 0.5) · 10 = −5 → −4; None stays None."""
    shaped = shape(np.array([0.5, 1.0, 0.0, NAN]), ShapingConfig(bias=-0.5, scale=10.0, clip=4.0))
    np.testing.assert_array_equal(shaped, [0.0, 4.0, -4.0, NAN])


def test_each_function_has_its_own_shaping_and_none_by_default() -> None:
    """The first is doubled, the second stays."""
    shaped = shape_functions(np.array([[1.0, 2.0], [1.0, 2.0]]), [ShapingConfig(scale=2.0), ShapingConfig()])
    assert shaped.tolist() == [[2.0, 4.0], [1.0, 2.0]]
