"""ipo, dppo and ref_kl: by hand, and against one reference in plain Python."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs, compute_loss
from actors.algorithms.losses.metrics import metrics_of
from schemas.config.losses import DppoLossConfig, IpoLossConfig, RefKlLossConfig
from schemas.config.objective import ObjectiveConfig
from tests.actors.algorithms.losses.around_engine import computed, counts, inputs_of, random_inputs

P, Q = [0.5, 0.9, 0.1, 0.5], [0.4, 0.6, 0.4, 0.5]
"""Probabilities that moved by +0.1, +0.3, −0.3 and 0: ratios 1.25, 1.5, 0.25 and 1."""
TEACHER = torch.tensor([0.5, 0.45, 0.2, 0.25], dtype=torch.float64).log()
"""Twice as likely as P for the third token, half as likely for the second and fourth."""


# --- ipo by hand -----------------------------------------------------------------------------------------------------


def test_ipo_drops_what_moved_more_than_0_2_either_way() -> None:
    """−(1 · 1.25 + 2 · 1) ÷ 4; the tokens at +0.3 and −0.3 cost nothing, and count in the four."""
    output, grad = computed(inputs_of(P, Q, [1, 1, -1, 2]), IpoLossConfig(kl_tau=0))
    assert output.loss.item() == pytest.approx(-3.25 / 4)
    assert grad == pytest.approx([-1.25 / 4, 0, 0, -2 / 4])
    assert counts(output, "kept_tokens", "masked_tokens", "masked_low", "masked_high") == [2, 2, 1, 1]


def test_ipo_does_not_look_at_the_sign_of_the_advantage() -> None:
    """Turned round, the same tokens are dropped."""
    _, grad = computed(inputs_of(P, Q, [-1, -1, 1, -2]), IpoLossConfig(kl_tau=0))
    assert grad == pytest.approx([1.25 / 4, 0, 0, 2 / 4])


def test_the_ratio_clip_of_ipo_does_not_stop_the_gradient() -> None:
    """Capped at 1.2, token 0 weighs 1.2 instead of 1.25, in the value and in the gradient."""
    output, grad = computed(inputs_of(P, Q, [1, 1, -1, 2]), IpoLossConfig(kl_tau=0, ratio_clip=1.2))
    assert output.loss.item() == pytest.approx(-3.2 / 4)
    assert grad == pytest.approx([-1.2 / 4, 0, 0, -2 / 4])


def test_the_squared_log_ratio_stays_on_dropped_tokens() -> None:
    """0.1 · (ln 1.25² + ln 1.5² + ln 0.25²) ÷ 4 and no ½: the gradient is 2 · 0.1 · ln r ÷ 4."""
    output, grad = computed(inputs_of(P, Q, [0, 0, 0, 0]), IpoLossConfig(kl_tau=0.1))
    logs = [math.log(1.25), math.log(1.5), math.log(0.25), 0]
    assert output.loss.item() == pytest.approx(0.1 * sum(x * x for x in logs) / 4)
    assert grad == pytest.approx([0.2 * x / 4 for x in logs])


# --- dppo by hand ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("advantages", "kept"), [([1, 1, -1, 2], [0, 3]), ([-1, -1, 1, -2], [0, 1, 2, 3])])
def test_dppo_drops_a_token_that_went_too_far_the_way_it_is_pushed(advantages: list[float], kept: list[int]) -> None:
    """Up by 0.3 and pushed up, or down by 0.3 and pushed down; what is pushed back stays."""
    output, grad = computed(inputs_of(P, Q, advantages), DppoLossConfig(kl_tau=0))
    ratios = [1.25, 1.5, 0.25, 1]
    expected = [-advantages[t] * ratios[t] / 4 if t in kept else 0 for t in range(4)]
    assert grad == pytest.approx(expected)
    assert output.loss.item() == pytest.approx(sum(expected))


def test_a_zero_advantage_takes_the_low_branch_of_dppo() -> None:
    """Of +0.3 and −0.3 only the latter is dropped; a teacher then pulls at the former alone."""
    inputs = inputs_of(P, Q, [0, 0, 0, 0], teacher_logprobs_T=TEACHER)
    output, grad = computed(inputs, DppoLossConfig(kl_tau=0, teacher_tau=1))
    assert counts(output, "masked_low", "masked_high") == [1, 0]
    assert grad == pytest.approx([0, math.log(2) * 1.5 / 4, 0, math.log(2) / 4])


def test_dppo_does_not_clip_the_ratio() -> None:
    """A token of probability e^−2 that the engine gave e^−5 weighs e^3."""
    inputs = inputs_of([math.exp(-2)], [math.exp(-5)], [1])
    assert computed(inputs, DppoLossConfig(kl_tau=0))[1] == pytest.approx([-math.exp(3)])
    assert computed(inputs, IpoLossConfig(kl_tau=0))[1] == pytest.approx([-math.exp(2)])


# --- ref_kl by hand --------------------------------------------------------------------------------------------------


def test_ref_kl_pulls_towards_the_teacher_whatever_the_advantage() -> None:
    """Token 1: −ln ½ · 1.5 ÷ 4 although its advantage is high; token 2 fell by 0.3 and is dropped."""
    config = RefKlLossConfig(kl_tau=0)
    output, grad = computed(inputs_of(P, Q, [9, 9, 9, 9], teacher_logprobs_T=TEACHER), config)
    assert grad == pytest.approx([0, math.log(2) * 1.5 / 4, 0, math.log(2) / 4])
    assert output.loss.item() == pytest.approx(math.log(2) * 2.5 / 4)
    assert counts(output, "masked_tokens", "masked_low") == [1, 1]


def test_the_first_ref_kl_of_prime_rl_drops_by_the_sign_of_the_advantage() -> None:
    """With positive ones token 1, which rose by 0.3, is dropped, and token 2 learns: −ln 2 · 0.25 ÷ 4."""
    config = RefKlLossConfig(kl_tau=0, compat={"trust_region": "advantage"})
    _, grad = computed(inputs_of(P, Q, [9, 9, 9, 9], teacher_logprobs_T=TEACHER), config)
    assert grad == pytest.approx([0, 0, -math.log(2) * 0.25 / 4, math.log(2) / 4])


def test_the_teacher_kl_is_positive_where_the_teacher_finds_tokens_less_likely() -> None:
    """(0 + ln 2 − ln 2 + ln 2) ÷ 4."""
    output, _ = computed(inputs_of(P, Q, [0, 0, 0, 0], teacher_logprobs_T=TEACHER), RefKlLossConfig())
    metrics = metrics_of({name: float(value) for name, value in output.sums.items()})
    assert metrics["teacher_kl"] == pytest.approx(math.log(2) / 4)


@pytest.mark.parametrize("config", [RefKlLossConfig(), IpoLossConfig(teacher_tau=0.1), DppoLossConfig(teacher_tau=1)])
def test_a_missing_teacher_is_an_error(config: Any) -> None:
    """Not a silent zero."""
    with pytest.raises(ValueError, match=r"set trainer\.teacher"):
        computed(inputs_of(P, Q, [1, 1, 1, 1]), config)


@pytest.mark.parametrize(
    "config", [IpoLossConfig(), DppoLossConfig(), RefKlLossConfig(compat={"trust_region": "advantage"})]
)
def test_a_dropped_token_whose_ratio_overflows_costs_its_squared_log_ratio_alone(config: Any) -> None:
    """e^999 is infinite in any precision; 1e-3 · 999² is not."""
    inputs = inputs_of([1.0, 0.5], [1.0, 0.5], [1, 1], teacher_logprobs_T=torch.zeros(2, dtype=torch.float64))
    inputs = replace(inputs, inference_logprobs_T=torch.tensor([-999.0, math.log(0.5)], dtype=torch.float64))
    output, grad = computed(inputs, config)
    assert math.isfinite(output.loss.item())
    assert grad[0] == pytest.approx(2e-3 * 999 / 2)


# --- against the reference -------------------------------------------------------------------------------------------

Step = Callable[[float, float, float, float, float], tuple[bool, float, float]]
"""(p, q, ratio, advantage, teacher − logp) → is it dropped, what it is pushed by, its weight."""


def step_of(config: Any) -> Step:
    """ALGORITHMS 1.2, one token."""

    def step(p: float, q: float, r: float, a: float, gap: float) -> tuple[bool, float, float]:
        if isinstance(config, IpoLossConfig):
            outside = p - q > config.ipo_mask_high or p - q < -config.ipo_mask_low
            return outside, config.adv_tau * a + config.teacher_tau * gap, min(r, config.ratio_clip or math.inf)
        if isinstance(config, DppoLossConfig):
            outside = p - q > config.dppo_mask_high if a > 0 else p - q < -config.dppo_mask_low
            return outside, config.adv_tau * a + config.teacher_tau * gap, r
        if config.compat.trust_region == "advantage" and a > 0:
            return p - q > 0.2, gap, r
        return p - q < -0.2, gap, r

    return step


def reference(inputs: LossInputs, config: Any) -> tuple[float, list[float], int]:
    """(loss, gradient by token, kept tokens)."""
    step, loss, grads, kept = step_of(config), 0.0, [], 0
    for t, in_loss in enumerate(inputs.loss_mask_T.tolist()):
        logp, q = inputs.logprobs_T[t].item(), inputs.inference_logprobs_T[t].item()
        r, gap = math.exp(logp - q), inputs.teacher_logprobs_T[t].item() - logp
        dropped, push, weight = step(math.exp(logp), math.exp(q), r, inputs.advantages_T[t].item(), gap)
        keep = in_loss and not dropped
        kept += keep
        loss += in_loss * (config.kl_tau * (logp - q) ** 2 - keep * push * weight) / inputs.loss_tokens
        grads.append(in_loss * (2 * config.kl_tau * (logp - q) - keep * push * weight) / inputs.loss_tokens)
    return loss, grads, kept


CONFIGS = [
    IpoLossConfig(),
    IpoLossConfig(ipo_mask_low=0.15, ipo_mask_high=0.25, ratio_clip=1.1, adv_tau=0.7, kl_tau=0.3, teacher_tau=0.2),
    IpoLossConfig(ipo_mask_low=0.1, ipo_mask_high=0.1, ratio_clip=None),
    DppoLossConfig(),
    DppoLossConfig(dppo_mask_low=0.05, dppo_mask_high=0.3, adv_tau=0.7, kl_tau=0.3, teacher_tau=0.2),
    RefKlLossConfig(),
    RefKlLossConfig(compat={"trust_region": "advantage"}, kl_tau=0.05),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_loss_and_gradient_are_those_of_the_reference(config: Any, seed: int) -> None:
    """In float64; some tokens are kept, some dropped."""
    inputs = random_inputs(seed)
    output, grad = computed(inputs, config)
    loss, grads, kept = reference(inputs, config)
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert grad == pytest.approx(grads, abs=1e-12)
    assert counts(output, "kept_tokens") == [kept]
    assert 0 < kept < int(inputs.loss_mask_T.sum())


@pytest.mark.parametrize("config", [DppoLossConfig(kl_tau=0.3), IpoLossConfig(kl_tau=0.3, ratio_clip=None)])
def test_the_gradient_is_that_of_the_value(config: Any) -> None:
    """By finite differences; no token sits at a bound."""
    inputs = random_inputs(5)
    objective = ObjectiveConfig(loss=config)
    assert torch.autograd.gradcheck(
        lambda logprobs_T: compute_loss(replace(inputs, logprobs_T=logprobs_T), objective).loss, inputs.logprobs_T
    )
