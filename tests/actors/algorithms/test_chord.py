"""CHORD: schedule, φ, the supervised loss, the mix, and which examples a step learns."""

import math
from typing import Any

import pytest
import torch

from actors.algorithms.chord import mixed, mu, phi, sft_indices, sft_share
from schemas.config.objective import ObjectiveConfig
from schemas.config.sft import SftConfig


def config(**changes: Any) -> SftConfig:
    """Up to 0.9 in four steps, down to 0.1 in eight."""
    keys = {"path": "x.jsonl", "batch_size": 2, "mu_peak": 0.9, "mu_valley": 0.1} | changes
    return SftConfig(**{"mu_warmup_steps": 4, "mu_decay_steps": 8} | keys)


@pytest.mark.parametrize(
    ("steps_done", "weight"),
    [
        *[(0, 0.0), (1, 0.225), (3, 0.675)],  # linear
        *[(4, 0.9), (6, 0.1 + 0.4 * (1 + math.sqrt(0.5))), (8, 0.5), (11, 0.1304482)],  # cosine
        *[(12, 0.1), (1000, 0.1)],
    ],
)
def test_mu_rises_to_the_peak_and_falls_to_the_valley(steps_done: int, weight: float) -> None:
    """Half-way down, at 4 + 8 ÷ 2, it is half-way between 0.9 and 0.1."""
    assert mu(steps_done, config()) == pytest.approx(weight, abs=1e-7)


def test_without_decay_the_valley_follows_the_warm_up() -> None:
    """The peak is only approached."""
    assert [mu(s, config(mu_decay_steps=0)) for s in (3, 4, 5)] == pytest.approx([0.675, 0.1, 0.1])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    """Or, without either, the valley."""
    assert mu(0, config(mu_warmup_steps=0)) == pytest.approx(0.9)
    assert mu(0, config(mu_warmup_steps=0, mu_decay_steps=0)) == 0.1


def test_phi_is_greatest_where_the_policy_is_unsure() -> None:
    """p·(1 − p) at ½, 0.9, 1 and 0, and no gradient."""
    nll_T = torch.tensor([math.log(2), -math.log(0.9), 0.0, 200.0], dtype=torch.float64, requires_grad=True)
    found_T = phi(nll_T)
    assert found_T.tolist() == pytest.approx([0.25, 0.09, 0, 0])
    assert not found_T.requires_grad


def test_the_supervised_loss_is_divided_by_the_number_of_weights_and_not_by_their_sum() -> None:
    """(0.5 · ln 2 + 1 · ln 4) ÷ 2, where the sum of weights is 1.5; a weight of 0 is a prompt's."""
    logprobs_T = torch.tensor([math.log(0.5), math.log(0.25), -9.0], dtype=torch.float64, requires_grad=True)
    loss = sft_share(logprobs_T, torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64), 2, with_phi=False)
    assert loss.item() == pytest.approx(2.5 * math.log(2) / 2)
    (grad,) = torch.autograd.grad(loss, logprobs_T)
    assert grad.tolist() == pytest.approx([-0.5 / 2, -1 / 2, 0])


def test_phi_weighs_the_gradient_of_each_token() -> None:
    """−φ ÷ 2, φ = ¼ and 3⁄16: the probability itself is not differentiated."""
    logprobs_T = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64, requires_grad=True)
    loss = sft_share(logprobs_T, torch.ones(2, dtype=torch.float64), 2, with_phi=True)
    assert loss.item() == pytest.approx((0.25 * math.log(2) + 3 / 16 * math.log(4)) / 2)
    (grad,) = torch.autograd.grad(loss, logprobs_T)
    assert grad.tolist() == pytest.approx([-0.25 / 2, -3 / 16 / 2])


def test_shares_add_up_to_the_supervised_loss_of_the_step() -> None:
    """However it is cut into micro-batches."""
    logprobs_T = -torch.arange(1, 6, dtype=torch.float64)
    weights_T = torch.tensor([1, 1, 0, 1, 1], dtype=torch.float64)
    whole = sft_share(logprobs_T, weights_T, 4, with_phi=True)
    parts = [sft_share(logprobs_T[part], weights_T[part], 4, with_phi=True) for part in (slice(0, 2), slice(2, 5))]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_a_micro_batch_of_prompts_costs_nothing_and_has_a_gradient() -> None:
    """An infinite logprob outside does not poison it."""
    logprobs_T = torch.tensor([-math.inf, -1.0], requires_grad=True)
    loss = sft_share(logprobs_T, torch.zeros(2), 0, with_phi=True)
    (grad,) = torch.autograd.grad(loss, logprobs_T)
    assert (loss.item(), grad.tolist()) == (0.0, [0.0, 0.0])


def test_the_mix_is_of_both_losses() -> None:
    """(1 − 0.25) · 2 + 0.25 · 4 = 2.5; at 0 and 1 one of them alone."""
    policy, sft = torch.tensor(2.0), torch.tensor(4.0)
    assert [mixed(policy, sft, weight).item() for weight in (0.25, 0.0, 1.0)] == [2.5, 2.0, 4.0]


def test_each_pass_has_every_example_once_in_an_order_of_its_own() -> None:
    """Ten examples, four a step: five steps are two passes."""
    drawn = [index for step in range(1, 6) for index in sft_indices(10, 4, seed=3, step=step).tolist()]
    first, second = drawn[:10], drawn[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert len({tuple(first), tuple(second), tuple(range(10))}) == 3


def test_a_step_draws_the_same_again_and_another_seed_others() -> None:
    """Replay asks for one step alone."""
    again = [sft_indices(100, 8, seed=3, step=7).tolist() for _ in range(2)]
    assert again[0] == again[1] != sft_indices(100, 8, seed=4, step=7).tolist()


def test_a_batch_may_be_larger_than_the_data() -> None:
    """Three examples, seven a step: two whole passes and one more."""
    drawn = sft_indices(3, 7, seed=0, step=1).tolist()
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == [0, 1, 2]
    assert len(drawn) == 7


def test_no_examples_are_an_error() -> None:
    """With the key."""
    with pytest.raises(ValueError, match=r"trainer\.sft\.path: has no examples"):
        sft_indices(0, 1, seed=0, step=1)


def test_sft_is_off_unless_configured_and_has_no_default_schedule() -> None:
    """ms-swift has none either; φ is off."""
    assert ObjectiveConfig().sft is None
    assert config().phi is False
    with pytest.raises(ValueError, match="mu_peak"):
        SftConfig.model_validate({"path": "x.jsonl", "batch_size": 2})
