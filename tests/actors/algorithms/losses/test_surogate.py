"""What one ratio per completion is divided by; all else of surogate is in tests/actors/algorithms/test_losses.py."""

import math
from dataclasses import replace

import pytest
import torch

from actors.algorithms.losses import LossInputs
from actors.algorithms.losses.metrics import metrics_of
from schemas.config.losses import SurogateLossConfig
from tests.actors.algorithms.losses.around_engine import computed, random_inputs


def hand_example() -> LossInputs:
    """Log ratios 0 and 0.5 of two tokens in one of the step's four micro-batches; the step has ten tokens."""
    return LossInputs(
        logprobs_T=torch.tensor([-0.2, -0.7], dtype=torch.float64, requires_grad=True),
        inference_logprobs_T=torch.tensor([-0.2, -1.2], dtype=torch.float64),
        advantages_T=torch.tensor([0.3, 1.1], dtype=torch.float64),
        loss_mask_T=torch.ones(2, dtype=torch.bool),
        completion_of_T=torch.zeros(2, dtype=torch.int64),
        num_completions=1,
        loss_tokens=10,
        num_micro_batches=4,
    )


@pytest.mark.parametrize(("normalizer", "divisor"), [("step_tokens", 2 * 10), ("micro_batches", 2 * 4)])
def test_sums_of_a_completion_are_divided_twice(normalizer: str, divisor: int) -> None:
    """By its two tokens, then by the step's ten (Surogate) or by its four micro-batches (prime-rl)."""
    config = SurogateLossConfig(ratio_type="sequence", compat={"sequence_normalizer": normalizer})
    output, grad = computed(hand_example(), config)
    assert output.loss.item() == pytest.approx(math.exp(0.5) * (0.3 * 0.2 + 1.1 * 0.7) / divisor)
    assert grad == pytest.approx([-math.exp(0.5) * 0.3 / divisor, -math.exp(0.5) * 1.1 / divisor])


def test_tokens_of_their_own_are_divided_by_those_of_the_step_alone() -> None:
    """Ratio type token."""
    _, grad = computed(hand_example(), SurogateLossConfig())
    assert grad == pytest.approx([-0.3 / 10, -math.exp(0.5) * 1.1 / 10])


def test_micro_batches_need_ratios_of_completions() -> None:
    """Otherwise the key would say nothing."""
    with pytest.raises(ValueError, match=r"compat.sequence_normalizer micro_batches needs ratio_type sequence"):
        SurogateLossConfig(compat={"sequence_normalizer": "micro_batches"})


def test_the_teacher_is_measured_even_where_it_does_not_pull() -> None:
    """The mean of logp − teacher over the loss mask."""
    inputs = random_inputs(1)
    metrics = metrics_of({name: float(value) for name, value in computed(inputs, SurogateLossConfig())[0].sums.items()})
    gaps = (inputs.logprobs_T - inputs.teacher_logprobs_T)[inputs.loss_mask_T]
    assert metrics["teacher_kl"] == pytest.approx(gaps.mean().item())


def test_a_missing_teacher_is_an_error() -> None:
    """Not a silent zero."""
    with pytest.raises(ValueError, match=r"set trainer\.teacher"):
        computed(replace(random_inputs(1), teacher_logprobs_T=None), SurogateLossConfig(teacher_tau=0.1))
