"""aipo: by hand, and against a reference in plain Python."""

import math

import pytest
import torch

from schemas.config.losses import AipoLossConfig
from tests.actors.algorithms.losses.around_engine import computed, counts, inputs_of, random_inputs


@pytest.mark.parametrize(("above_cap", "second"), [("stop", 0.0), ("weigh", -8.0)])
def test_the_ratio_is_capped_at_eight(above_cap: str, second: float) -> None:
    """Ratios 1.25 and 9: −(1.25 + 8) ÷ 2; above the cap the gradient is nothing, or that of a weight of 8."""
    output, grad = computed(inputs_of([0.5, 0.9], [0.4, 0.1], [1, 1]), AipoLossConfig(compat={"above_cap": above_cap}))
    assert output.loss.item() == pytest.approx(-9.25 / 2)
    assert grad == pytest.approx([-1.25 / 2, second / 2])
    assert counts(output, "capped_tokens") == [1]


def test_the_cap_holds_for_negative_advantages_too() -> None:
    """Unlike PPO's clip, which lets them grow: (1.25 + 8) ÷ 2."""
    output, _ = computed(inputs_of([0.5, 0.9], [0.4, 0.1], [-1, -1]), AipoLossConfig())
    assert output.loss.item() == pytest.approx(9.25 / 2)


@pytest.mark.parametrize("above_cap", ["stop", "weigh"])
def test_a_ratio_that_overflows_is_capped_and_its_gradient_finite(above_cap: str) -> None:
    """e^999 is infinite, its cap is 8."""
    inputs = inputs_of([1.0], [1.0], [1], inference_logprobs_T=torch.tensor([-999.0], dtype=torch.float64))
    output, grad = computed(inputs, AipoLossConfig(compat={"above_cap": above_cap}))
    assert output.loss.item() == pytest.approx(-8)
    assert grad == pytest.approx([0.0 if above_cap == "stop" else -8.0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("above_cap", ["stop", "weigh"])
def test_loss_and_gradient_are_those_of_the_reference(above_cap: str, seed: int) -> None:
    """−min(r, δ)·A over the tokens of the step, δ low enough to be met."""
    inputs, cap = random_inputs(seed), 1.3
    loss, grads, capped = 0.0, [], 0
    for t, in_loss in enumerate(inputs.loss_mask_T.tolist()):
        r = math.exp(inputs.logprobs_T[t].item() - inputs.inference_logprobs_T[t].item())
        value = -min(r, cap) * inputs.advantages_T[t].item() * in_loss / inputs.loss_tokens
        loss, capped = loss + value, capped + (in_loss and r > cap)
        grads.append(0.0 if r > cap and above_cap == "stop" else value)
    output, grad = computed(inputs, AipoLossConfig(token_mask_high=cap, compat={"above_cap": above_cap}))
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert grad == pytest.approx(grads, abs=1e-12)
    assert counts(output, "capped_tokens") == [capped]
    assert capped > 0
