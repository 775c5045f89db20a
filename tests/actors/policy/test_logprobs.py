"""Logprobs of chosen tokens, with numbers to check by hand."""

import math

import pytest
import torch

from actors.policy.logprobs import chosen_logprobs, logprobs_and_entropy

LOGITS = torch.tensor([[math.log(1), math.log(2), math.log(5)]])
"""Probabilities 1/8, 2/8, 5/8."""


def test_logprob_is_that_of_the_softmax() -> None:
    """2 of 8."""
    logprobs, entropy = logprobs_and_entropy(LOGITS, torch.tensor([1]), torch.ones(1))
    assert math.exp(float(logprobs)) == pytest.approx(2 / 8)
    assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)))


def test_logprob_is_that_at_the_temperature_of_sampling() -> None:
    """Temperature 0.5 squares the weights: 4 of 1 + 4 + 25."""
    logprobs = chosen_logprobs(LOGITS, torch.tensor([1]), torch.tensor([0.5]))
    assert math.exp(float(logprobs)) == pytest.approx(4 / 30)


def test_each_token_has_its_own_temperature_and_greedy_means_untempered() -> None:
    """Rows at 0.5, 0 (greedy) and 1."""
    logprobs = chosen_logprobs(LOGITS.expand(3, 3), torch.tensor([2, 2, 0]), torch.tensor([0.5, 0.0, 1.0]))
    assert logprobs.exp().tolist() == pytest.approx([25 / 30, 5 / 8, 1 / 8])


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    """The result has float32's precision: the probabilities of all tokens sum to 1."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    logprobs = chosen_logprobs(logits.expand(1000, 1000), torch.arange(1000), torch.ones(1000))
    assert logprobs.dtype == torch.float32
    assert float(logprobs.exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_the_same_with_entropy_and_without(temperature: float) -> None:
    """Bit by bit, so that a ratio of the two is exactly 1."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    arguments = (logits, torch.arange(5), torch.full((5,), temperature))
    assert torch.equal(chosen_logprobs(*arguments), logprobs_and_entropy(*arguments, entropy_gradient=True)[0])


def test_entropy_has_a_gradient_where_it_is_asked_for() -> None:
    """dH/dz_i = −p_i (log p_i + H), at temperature 0.5 twice that of the tempered logits; else there is none."""
    logits = LOGITS.clone().requires_grad_()
    arguments = (logits, torch.tensor([1]), torch.tensor([0.5]))
    assert not logprobs_and_entropy(*arguments)[1].requires_grad
    logprobs_and_entropy(*arguments, entropy_gradient=True)[1].sum().backward()
    p = [1 / 30, 4 / 30, 25 / 30]
    entropy = -sum(x * math.log(x) for x in p)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-2 * x * (math.log(x) + entropy) for x in p], abs=1e-6)
