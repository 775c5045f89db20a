"""Trainer and engine compared by the age of the engine's weights: sums by hand, and which cause they tell."""

import math
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs
from actors.algorithms.losses.metrics import metrics_of
from actors.algorithms.mismatch import judged, mismatch_sums
from schemas.config.mismatch import MismatchConfig


def inputs(**changes: Any) -> LossInputs:
    """Six tokens of step 6, which starts from version 5; the fourth is not in the loss."""
    fields: dict[str, Any] = {
        "logprobs_T": torch.tensor([-1.0, -1.0, -2.0, -9.0, -1.0, -3.0], dtype=torch.float64),
        "inference_logprobs_T": torch.tensor([-1.1, -0.8, -3.5, 0.0, -1.0, -3.3], dtype=torch.float64),
        "advantages_T": torch.zeros(6),
        "loss_mask_T": torch.tensor([True, True, True, False, True, True]),
        "completion_of_T": torch.zeros(6, dtype=torch.int64),
        "num_completions": 1,
        "loss_tokens": 5,
        "versions_T": torch.tensor([5, 5, 4, 5, 3, 5]),
        "version": 5,
    }
    return LossInputs(**fields | changes)


def test_means_and_kl_are_apart_by_age_and_leave_masked_tokens_out() -> None:
    """Current: gaps 0.1, 0.2, 0.3 of three tokens; older: 1.5 and 0 of two; one of five tokens is far."""
    of = inputs()
    sums = {name: float(value) for name, value in mismatch_sums(of).items()} | {"tokens": 5.0}
    metrics = metrics_of(sums)
    assert metrics["mismatch_abs"] == pytest.approx(2.1 / 5)
    assert metrics["mismatch_far"] == pytest.approx(1 / 5)
    assert metrics["mismatch_abs_current"] == pytest.approx(0.6 / 3)
    assert metrics["mismatch_abs_older"] == pytest.approx(1.5 / 2)
    by_hand = [math.exp(x) - x - 1 for x in (0.1, -0.2, 0.3)]
    assert metrics["mismatch_kl_current"] == pytest.approx(sum(by_hand) / 3, rel=1e-6)
    assert metrics["mismatch_kl_older"] == pytest.approx((math.exp(1.5) - 2.5) / 2, rel=1e-6)
    assert sums["mismatch_max"] == pytest.approx(1.5)


def test_inputs_without_versions_tell_no_ages() -> None:
    """Arrays that a user brings need not have any."""
    assert set(mismatch_sums(inputs(versions_T=None))) == {"abs_log_ratio", "far_tokens", "mismatch_max"}


@pytest.mark.parametrize(
    ("current", "older", "cause", "stops"),
    [
        (0.05, 0.09, None, False),
        (0.02, 0.4, "staleness", False),
        (0.02, 0.8, "staleness", True),
        (0.2, 0.25, "numerics", False),
        (0.5, None, "model", False),
        (1.1, 1.2, "model", True),
        (None, 0.3, "unknown", False),
        (None, 0.9, "unknown", True),
        (None, None, None, False),
    ],
)
def test_cause_follows_from_the_age_at_which_they_differ(
    current: float | None, older: float | None, cause: str | None, stops: bool
) -> None:
    """Means per token over ten tokens of each age, against the default limits 0.1 and 0.7."""
    sums: dict[str, float] = {}
    for age, mean in (("current", current), ("older", older)):
        sums |= {f"tokens_{age}": 10.0, f"abs_log_ratio_{age}": 10.0 * mean} if mean is not None else {}
    found = judged(sums, MismatchConfig())
    assert (found.cause if found else None) == cause
    if found is not None:
        assert found.stops == stops
        assert ("trainer.mismatch.stop 0.7" if stops else "trainer.mismatch.warn 0.1") in found.words


def test_limit_that_stops_before_it_warns_is_refused() -> None:
    """`stop` below `warn`."""
    with pytest.raises(ValueError, match=r"stop: 0\.05 is below warn: 0\.1"):
        MismatchConfig(stop=0.05)
    assert judged({"tokens_current": 1.0, "abs_log_ratio_current": 9.0}, MismatchConfig(stop=None)).stops is False  # type: ignore[union-attr]
