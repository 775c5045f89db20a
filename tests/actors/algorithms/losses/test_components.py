"""Weights of tokens and several losses in one, by hand (prime-rl, Surogate)."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs, compute_loss
from actors.algorithms.losses.components import Component, mixed_loss, opd_weights, replayed
from schemas.config.objective import ObjectiveConfig

LOGPROBS = [0.5, 0.4, 0.25, 0.8]
ENGINE = [0.5, 0.5, 0.25, 0.4]
ADVANTAGES = [1.0, -1.0, 2.0, 1.0]
TEACHER = [0.9, 0.2, 0.5, 0.8]
DPPO = ObjectiveConfig(loss={"type": "dppo", "kl_tau": 0.5})


def inputs_of(mask: list[int], loss_tokens: float) -> LossInputs:
    """One completion of four tokens whose probabilities are LOGPROBS, ENGINE and TEACHER."""
    return LossInputs(
        logprobs_T=torch.tensor(LOGPROBS, dtype=torch.float64).log().requires_grad_(),
        inference_logprobs_T=torch.tensor(ENGINE, dtype=torch.float64).log(),
        teacher_logprobs_T=torch.tensor(TEACHER, dtype=torch.float64).log(),
        advantages_T=torch.tensor(ADVANTAGES, dtype=torch.float64),
        loss_mask_T=torch.tensor(mask, dtype=torch.bool),
        completion_of_T=torch.zeros(4, dtype=torch.int64),
        num_completions=1,
        loss_tokens=loss_tokens,
    )


def gradient(loss: torch.Tensor, inputs: LossInputs) -> list[float]:
    """By token."""
    (grad_T,) = torch.autograd.grad(loss, inputs.logprobs_T)
    return grad_T.tolist()


def component(weights: list[float], tokens: float) -> Component:
    """Of these weights."""
    return Component(torch.tensor(weights, dtype=torch.float64), tokens)


def test_a_weight_scales_a_tokens_loss_and_zero_takes_it_out() -> None:
    """Token 1: ratio .8, A = −1, KL (ln .8)²; its weight is 3. The first token has 0, the last is too far (.4 > .2)."""
    inputs = replace(inputs_of([1, 1, 1, 1], 3), weights_T=torch.tensor([0.0, 3.0, 1.0, 2.0], dtype=torch.float64))
    output = compute_loss(inputs, DPPO)
    kl = math.log(0.8) ** 2, math.log(2) ** 2
    assert output.loss.item() == pytest.approx((3 * (0.8 + 0.5 * kl[0]) + (-2.0) + 2 * 0.5 * kl[1]) / 3)
    assert gradient(output.loss, inputs) == pytest.approx(
        [0.0, 3 * (0.8 + math.log(0.8)) / 3, -2 / 3, 2 * math.log(2) / 3]
    )
    assert output.sums["tokens"].item() == 3


def test_components_are_divided_by_their_own_tokens() -> None:
    """rl on tokens 1 and 2 of five in the step, ce on 0 and 3 of four, ref_kl on 0 (of ten), which is masked."""
    inputs = inputs_of([0, 1, 1, 0], 99)
    rl = component([1.0, 1.0, 0.5, 1.0], 5)
    ce, ref_kl = component([1.0, 0.0, 0.0, 0.25], 4), component([2.0, 0.0, 0.0, 0.0], 10)
    output = mixed_loss(inputs, DPPO, rl, ce, ref_kl)
    of_rl = (0.8 + 0.5 * math.log(0.8) ** 2 - 0.5 * 2.0) / 5
    of_ce = -(math.log(0.5) + 0.25 * math.log(0.8)) / 4
    of_ref_kl = -2 * math.log(0.9 / 0.5) / 10
    assert output.loss.item() == pytest.approx(of_rl + of_ce + of_ref_kl)
    assert gradient(output.loss, inputs) == pytest.approx(
        [-1 / 4 - 2 * math.log(1.8) / 10, (0.8 + math.log(0.8)) / 5, -1 / 5, -0.25 / 4]
    )
    assert output.sums["sft_tokens"].item() == 2


def test_without_components_the_loss_is_that_of_the_objective() -> None:
    """An absent rl is weight 1 on the whole loss mask."""
    inputs = inputs_of([1, 1, 1, 1], 4)
    assert mixed_loss(inputs, DPPO).loss.item() == compute_loss(inputs, DPPO).loss.item()


@pytest.mark.parametrize("empty", ["rl", "ce", "ref_kl"])
def test_an_empty_component_adds_nothing_and_nothing_is_divided_by_zero(empty: str) -> None:
    """All weights 0, no token of it in the step."""
    inputs = inputs_of([1, 1, 1, 1], 4)
    nothing: dict[str, Any] = {empty: component([0.0] * 4, 0)}
    output = mixed_loss(inputs, DPPO, **nothing)
    expected = 0.0 if empty == "rl" else compute_loss(inputs, DPPO).loss.item()
    assert output.loss.item() == pytest.approx(expected)
    assert all(math.isfinite(value) for value in gradient(output.loss, inputs))


def test_hindsight_pulls_where_it_finds_a_token_likelier() -> None:
    """opd_tau .5, opd_beta 2, probabilities .6 with and .3 without: sigmoid(2 ln 2) = 4/5, so .4; of four tokens."""
    weights_T = opd_weights(
        torch.tensor([0.6, 0.6, 1e-9], dtype=torch.float64).log(),
        torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64).log(),
        torch.tensor([True, True, False]),
        opd_tau=0.5,
        opd_beta=2.0,
    )
    assert weights_T.tolist() == pytest.approx([0.5 * 4 / 5, 0.25, 0.0])
    inputs = inputs_of([1, 1, 1, 1], 4)
    ce = Component(torch.tensor([0.0, 0.4, 0.0, 0.0], dtype=torch.float64), inputs.loss_tokens)
    found = gradient(mixed_loss(inputs, DPPO, ce=ce).loss, inputs)
    plain = gradient(compute_loss(inputs, DPPO).loss, inputs)
    assert [after - before for after, before in zip(found, plain, strict=True)] == pytest.approx([0, -0.4 / 4, 0, 0])


def test_replayed_tokens_follow_what_was_done_and_have_no_policy_loss() -> None:
    """replay_tau .05 and factor 2 on token 1; the other three keep their loss, and all are divided by four."""
    inputs = inputs_of([1, 1, 1, 1], 4)
    replay_T = torch.tensor([False, True, False, False])
    factors_T = torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    rl, ce = replayed(inputs, replay_T, 0.05, factors_T)
    found = gradient(mixed_loss(inputs, DPPO, rl, ce).loss, inputs)
    assert found == pytest.approx([-1 / 4, -0.1 / 4, -2 / 4, math.log(2) / 4])
    rl, ce = replayed(inputs, replay_T, 0.05)
    assert ce.weights_T.tolist() == [0.0, 0.05, 0.0, 0.0]
