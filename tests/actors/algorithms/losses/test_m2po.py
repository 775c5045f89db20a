"""m2po: which tokens its second moment drops, and what is left of the decoupled loss."""

import math
from dataclasses import replace

import pytest
import torch

from actors.algorithms.losses.m2po import second_moment_below
from schemas.config.losses import DecoupledLossConfig, M2poLossConfig, RejectionConfig
from tests.actors.algorithms.losses.around_engine import computed, counts, inputs_of, random_inputs


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(4.7, [0, 1, 2]), (4.6, [1, 2]), (2.6, [1, 2]), (2.5, [1]), (1.1, [1]), (0.5, [1])],
)
def test_the_largest_squares_go_until_the_mean_of_the_rest_is_below(threshold: float, kept: list[int]) -> None:
    """Of 9, 1, 4: means 4.667, 2.5 and 1 of three, two and one; strictly below, and the smallest always stays."""
    squares_T = torch.tensor([9.0, 1.0, 4.0], dtype=torch.float64)
    keep_T = second_moment_below(squares_T, torch.ones(3, dtype=torch.bool), threshold)
    assert keep_T.nonzero().flatten().tolist() == kept


def test_tokens_outside_the_loss_mask_neither_count_nor_stay() -> None:
    """The 100 outside does not raise the mean, and the 0 outside does not lower it."""
    squares_T = torch.tensor([100.0, 4.0, 0.0, 1.0])
    mask_T = torch.tensor([False, True, False, True])
    assert second_moment_below(squares_T, mask_T, 2.6).tolist() == mask_T.tolist()
    assert second_moment_below(squares_T, mask_T, 2.4).tolist() == [False, False, False, True]


def test_nothing_is_kept_of_nothing() -> None:
    """A micro-batch of a dummy."""
    nothing = torch.zeros(2, dtype=torch.bool)
    assert second_moment_below(torch.ones(2), nothing, 0.1).tolist() == [False, False]


def test_dropped_tokens_leave_the_normaliser() -> None:
    """Ratios 1.1, 1, 0.9 and squares (ln 2)², 0, 0: without the first, −(1 + 0.9) ÷ 2, not ÷ 3."""
    old_T = torch.tensor([0.4, 0.5, 0.5], dtype=torch.float64).log()
    inputs = inputs_of([0.44, 0.5, 0.45], [0.2, 0.5, 0.5], [1, 1, 1], old_logprobs_T=old_T)
    output, grad = computed(inputs, M2poLossConfig())
    assert output.loss.item() == pytest.approx(-1.9 / 2)
    assert grad == pytest.approx([0, -1 / 2, -0.9 / 2])
    assert counts(output, "masked_m2", "masked_tokens") == [1, 1]


def test_a_micro_batch_weighs_in_the_step_what_it_had() -> None:
    """Three of the step's six tokens, one of them dropped: half of the mean of the other two."""
    old_T = torch.tensor([0.4, 0.5, 0.5], dtype=torch.float64).log()
    inputs = inputs_of([0.44, 0.5, 0.45], [0.2, 0.5, 0.5], [1, 1, 1], old_logprobs_T=old_T, loss_tokens=6)
    assert computed(inputs, M2poLossConfig())[0].loss.item() == pytest.approx(-1.9 / 2 / 2)


def test_what_rejection_drops_besides_stays_in_the_normaliser() -> None:
    """M2PO leaves two of three; of these rejection drops one: −1 ÷ 2."""
    old_T = torch.tensor([0.4, 0.5, 0.5], dtype=torch.float64).log()
    inputs = inputs_of([0.44, 0.5, 0.45], [0.2, 0.5, 0.45], [1, 1, 1], old_logprobs_T=old_T)
    config = M2poLossConfig(rejection_sampling=RejectionConfig(upper=1.05))
    output, _ = computed(inputs, config)
    assert output.loss.item() == pytest.approx(-1 / 2)
    assert counts(output, "masked_m2", "rejected_tokens", "masked_tokens") == [1, 1, 2]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threshold", [0.04, 0.2])
def test_loss_and_gradient_are_those_of_the_reference(seed: int, threshold: float) -> None:
    """Sort, drop from the top, then the decoupled loss on the rest, with the rest as its normaliser."""
    inputs = random_inputs(seed)
    squares = (inputs.inference_logprobs_T - inputs.old_T).square().tolist()
    kept = sorted(torch.nonzero(inputs.loss_mask_T).flatten().tolist(), key=lambda t: squares[t])
    size = len(kept)
    while len(kept) > 1 and math.fsum(squares[t] for t in kept) / len(kept) >= threshold:
        kept.pop()
    keep_T = torch.zeros_like(inputs.loss_mask_T)
    keep_T[kept] = True
    rest = replace(inputs, loss_mask_T=keep_T, loss_tokens=len(kept))
    expected, grads = computed(rest, DecoupledLossConfig())
    output, grad = computed(inputs, M2poLossConfig(m2_threshold=threshold))
    share = size / inputs.loss_tokens
    assert output.loss.item() == pytest.approx(share * expected.loss.item(), abs=1e-12)
    assert grad == pytest.approx([share * x for x in grads], abs=1e-12)
    assert 0 < counts(output, "masked_m2")[0] == size - len(kept)
