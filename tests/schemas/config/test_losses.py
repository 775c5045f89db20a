"""Losses whose keys contradict each other, or the objective's."""

from typing import Any

import pytest

from schemas.config.losses import (
    AipoLossConfig,
    DapoLossConfig,
    DecoupledLossConfig,
    DppoLossConfig,
    IpoLossConfig,
    M2poLossConfig,
    RefKlLossConfig,
    RejectionConfig,
    SurogateLossConfig,
)
from schemas.config.objective import CorrectionConfig, ObjectiveConfig, ReferenceConfig

CORRECTION = CorrectionConfig(mode="mask")
FROM_ENGINE = [
    SurogateLossConfig(),
    IpoLossConfig(),
    DppoLossConfig(),
    AipoLossConfig(),
    RefKlLossConfig(),
    DecoupledLossConfig(),
    M2poLossConfig(),
    DapoLossConfig(old_logprobs="inference"),
]


@pytest.mark.parametrize("loss", FROM_ENGINE, ids=lambda loss: loss.type)
def test_a_correction_of_a_ratio_to_the_engine_is_refused(loss: Any) -> None:
    """The way from the engine would count twice; both keys are named."""
    with pytest.raises(ValueError, match=f"correction: loss.type {loss.type} already weighs tokens by the ratio"):
        ObjectiveConfig(loss=loss, correction=CORRECTION)


def test_a_correction_of_a_ratio_to_the_step_start_is_allowed() -> None:
    """That is what it is for."""
    assert ObjectiveConfig(loss=DapoLossConfig(), correction=CORRECTION).correction == CORRECTION


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold: depends on the advantage, which loss"),
        ({"reference": ReferenceConfig(beta=0.1, place="reward")}, "reference.place reward: loss.type ref_kl reads no"),
    ],
)
def test_switches_on_advantages_are_refused_for_a_loss_that_reads_none(keys: dict[str, Any], words: str) -> None:
    """Distillation follows the teacher alone."""
    with pytest.raises(ValueError, match=words):
        ObjectiveConfig(loss=RefKlLossConfig(), **keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"action": "clamp", "metric": "kl_k3"}, "action clamp needs metric ratio, not kl_k3"),
        ({"agg": "max"}, "agg max needs level sequence, not token"),
        ({"upper": 1.0}, "upper 1.0 must be above 1.0 with metric ratio"),
        ({"metric": "kl_k2", "upper": 0.0}, "upper 0.0 must be above 0.0 with metric kl_k2"),
        ({"lower": 6.0}, "lower 6.0 must not exceed upper 5.0"),
        ({"lower": 0.0}, "lower 0.0 must be above 0 with metric ratio"),
    ],
)
def test_rejection_that_would_judge_nothing_or_everything_is_refused(keys: dict[str, Any], words: str) -> None:
    """As in AReaL, which only warns of `agg`."""
    with pytest.raises(ValueError, match=words):
        RejectionConfig(**keys)


def test_a_kl_of_either_sign_may_have_any_bounds() -> None:
    """k1 is the log ratio itself."""
    assert RejectionConfig(metric="kl_k1", upper=-0.1, lower=-0.5).upper == -0.1
