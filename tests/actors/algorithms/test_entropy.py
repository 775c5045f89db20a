"""Adaptive entropy control, by hand."""

import math

import pytest

from actors.algorithms.entropy import EntropyControl, acting_coef, controlled
from schemas.config.objective import AdaptiveEntropyConfig


def test_the_coefficient_follows_the_entropy_and_acts_below_the_target() -> None:
    """Entropies 0.5, 0.2, 0.1, 0.3 at target 0.2 and steps of 0.1; nothing acts before an entropy has been seen."""
    config = AdaptiveEntropyConfig(delta=0.1)
    control, acting = EntropyControl(0.3), []
    for entropy in (0.5, 0.2, 0.1, 0.3):
        acting.append(acting_coef(control, config))
        control = controlled(control, config, entropy)
    assert acting == pytest.approx([0.0, 0.0, 0.3, 0.4])
    assert control == EntropyControl(pytest.approx(0.3), 0.3)


@pytest.mark.parametrize(("entropy", "expected"), [(0.1, 0.35), (0.9, 0.25)])
def test_the_coefficient_stays_within_its_bounds(entropy: float, expected: float) -> None:
    """Steps of 0.1 from 0.3 end at the bounds."""
    config = AdaptiveEntropyConfig(delta=0.1, min_coef=0.25, max_coef=0.35)
    assert controlled(EntropyControl(0.3), config, entropy).coef == expected


def test_defaults_are_those_of_trl() -> None:
    """Skywork-OR1's control in TRL 1.16."""
    config = AdaptiveEntropyConfig()
    assert (config.target, config.delta, config.min_coef, config.max_coef) == (0.2, 0.005, 0.0, 1.0)
    assert EntropyControl(0.0).entropy == math.inf


def test_bounds_out_of_order_are_refused() -> None:
    """No coefficient would do."""
    with pytest.raises(ValueError, match=r"min_coef 2\.0 must not exceed max_coef 1\.0"):
        AdaptiveEntropyConfig(min_coef=2.0)
