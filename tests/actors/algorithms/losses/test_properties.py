"""What holds for every policy loss there is, bare and with every modifier that may stand beside it."""

import math
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch

from actors.algorithms.losses import LOSSES, LossInputs, LossOutput, compute_loss
from actors.algorithms.losses.metrics import DENOMINATORS, NON_LINEAR
from schemas.config.losses import CustomLossConfig, LossConfig
from schemas.config.objective import ObjectiveConfig
from tests.actors.algorithms.losses.around_engine import random_inputs

NAMES = [config.model_fields["type"].default for config in LOSSES]
PER_MICRO_BATCH = {"bnpo", "m2po"}
"""Losses that judge or average inside a micro-batch, by definition."""
PER_TOKEN = [field.name for field in fields(LossInputs) if field.name.endswith("_T")]


def objective_of(name: str, modifiers: str) -> ObjectiveConfig:
    """A loss at its defaults, `bare` or with the modifiers it may have that do not look at the whole micro-batch."""
    config = next(config for config in LOSSES if config.model_fields["type"].default == name)()
    if modifiers == "bare":
        return ObjectiveConfig(loss=config)
    values: dict[str, Any] = {"reference": {"beta": 0.1, "bias_correction": True}, "entropy_coef": 0.1}
    if not config.weighs_from_engine:
        values["correction"] = {"mode": "mask", "level": "token", "low": 0.5, "high": 1.5}
    if name != "ref_kl":
        values["off_policy_mask_threshold"] = 0.05
    return ObjectiveConfig(loss=config, **values)


def inputs_of(seed: int, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Nine completions with all that any loss reads; one of them has no token in the loss."""
    inputs = random_inputs(seed)
    rng = torch.Generator().manual_seed(seed + 1000)
    size = inputs.logprobs_T.numel()
    changes = {
        "reference_logprobs_T": inputs.logprobs_T.detach() + torch.randn(size, generator=rng, dtype=torch.float64),
        "entropy_T": torch.rand(size, generator=rng, dtype=torch.float64),
        "loss_mask_T": inputs.loss_mask_T & (inputs.completion_of_T != 4),
        "step_completions": inputs.num_completions,
        "max_completion_length": 8,
    }
    inputs = replace(inputs, **changes)
    inputs = replace(inputs, loss_tokens=int(inputs.loss_mask_T.sum()))
    return changed(inputs, lambda name, values_T: values_T.to(dtype) if values_T.is_floating_point() else values_T)


def changed(inputs: LossInputs, change: Any) -> LossInputs:
    """Each array of tokens changed by its name; the logprobs are a new leaf."""
    arrays = {name: getattr(inputs, name) for name in PER_TOKEN}
    made = {name: change(name, values_T.detach()) for name, values_T in arrays.items() if values_T is not None}
    made["logprobs_T"] = made["logprobs_T"].clone().requires_grad_()
    return replace(inputs, **made)


def part_of(inputs: LossInputs, completions: list[int]) -> tuple[LossInputs, torch.Tensor]:
    """These completions, in this order, as a micro-batch of their own; and where its tokens were."""
    places = torch.cat([torch.nonzero(inputs.completion_of_T == b).flatten() for b in completions])
    part = changed(inputs, lambda _, values_T: values_T[places])
    lengths = torch.tensor([int((inputs.completion_of_T == b).sum()) for b in completions])
    completion_of_T = torch.repeat_interleave(torch.arange(len(completions)), lengths)
    return replace(part, completion_of_T=completion_of_T, num_completions=len(completions)), places


def computed(inputs: LossInputs, objective: ObjectiveConfig) -> tuple[LossOutput, torch.Tensor]:
    """The output, and the gradient by token."""
    output = compute_loss(inputs, objective)
    (grad_T,) = torch.autograd.grad(output.loss, inputs.logprobs_T)
    return output, grad_T


every_loss = pytest.mark.parametrize("name", NAMES)
bare_and_with_modifiers = pytest.mark.parametrize("modifiers", ["bare", "switches"])


def test_every_configured_loss_has_a_function() -> None:
    """One config class, one entry; `custom` is the user's."""
    union = get_args(get_args(LossConfig)[0])
    assert set(union) == {*LOSSES, CustomLossConfig}


@every_loss
@bare_and_with_modifiers
def test_every_sum_has_its_place_in_the_metrics(name: str, modifiers: str) -> None:
    """No number is computed for nobody, and every denominator is there."""
    sums = compute_loss(inputs_of(0), objective_of(name, modifiers)).sums
    used = {key for pair in DENOMINATORS.values() for key in pair} | {
        key for _, keys in NON_LINEAR.values() for key in keys
    }
    assert set(sums) <= used
    assert {bottom for top, bottom in DENOMINATORS.values() if top in sums} <= set(sums)
    assert {float(value) for value in sums.values()} >= {float(sums["tokens"])}


@every_loss
@bare_and_with_modifiers
def test_the_order_of_completions_changes_nothing(name: str, modifiers: str) -> None:
    """Loss, sums, and each token's gradient."""
    inputs, objective = inputs_of(1), objective_of(name, modifiers)
    whole, grad_T = computed(inputs, objective)
    other, places = part_of(inputs, [4, 8, 0, 3, 7, 1, 6, 2, 5])
    turned, turned_grad_T = computed(other, objective)
    assert turned.loss.item() == pytest.approx(whole.loss.item(), abs=1e-12)
    torch.testing.assert_close(turned_grad_T, grad_T[places], rtol=0, atol=1e-12)
    assert {name: float(value) for name, value in turned.sums.items()} == pytest.approx(
        {name: float(value) for name, value in whole.sums.items()}
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PER_MICRO_BATCH])
@bare_and_with_modifiers
def test_shares_of_micro_batches_add_up_to_the_step(name: str, modifiers: str) -> None:
    """Loss, sums and gradients, however the completions are split; one micro-batch has no token in the loss."""
    inputs, objective = inputs_of(2), objective_of(name, modifiers)
    whole, grad_T = computed(inputs, objective)
    total, sums = 0.0, dict.fromkeys(whole.sums, 0.0)
    for completions in ([5, 2], [7, 0, 3, 8], [4], [6, 1]):
        part, places = part_of(inputs, completions)
        share, share_grad_T = computed(part, objective)
        total += share.loss.item()
        torch.testing.assert_close(share_grad_T, grad_T[places], rtol=0, atol=1e-12)
        sums = {key: value + float(share.sums[key]) for key, value in sums.items()}
    assert total == pytest.approx(whole.loss.item(), abs=1e-12)
    assert sums == pytest.approx({key: float(value) for key, value in whole.sums.items()})
    assert abs(total) > 1e-6


@every_loss
@bare_and_with_modifiers
@pytest.mark.parametrize("wild", [1e30, -1e30])
def test_what_is_outside_the_loss_mask_is_not_looked_at(name: str, modifiers: str, wild: float) -> None:
    """Any finite value there leaves loss, sums and gradients as they are, to the bit."""
    inputs, objective = inputs_of(3), objective_of(name, modifiers)
    whole, grad_T = computed(inputs, objective)

    def spoil(array: str, values_T: torch.Tensor) -> torch.Tensor:
        spoiled = values_T.is_floating_point()
        return (
            values_T.masked_fill(~inputs.loss_mask_T, wild if array != "logprobs_T" else -wild) if spoiled else values_T
        )

    output, spoiled_grad_T = computed(changed(inputs, spoil), objective)
    assert output.loss.item() == whole.loss.item()
    assert torch.equal(spoiled_grad_T, grad_T)
    assert {key: float(value) for key, value in output.sums.items()} == {
        key: float(value) for key, value in whole.sums.items()
    }


@every_loss
@bare_and_with_modifiers
def test_without_a_token_in_the_loss_mask_all_is_zero(name: str, modifiers: str) -> None:
    """No division by zero, no NaN."""
    inputs = replace(inputs_of(4), loss_mask_T=torch.zeros_like(inputs_of(4).loss_mask_T), loss_tokens=1)
    output, grad_T = computed(inputs, objective_of(name, modifiers))
    assert output.loss.item() == 0.0
    assert torch.equal(grad_T, torch.zeros_like(grad_T))
    assert {float(value) for value in output.sums.values()} == {0.0}


@every_loss
@bare_and_with_modifiers
@pytest.mark.parametrize("seed", range(3))
def test_log_ratios_of_fifty_do_not_overflow_float32(name: str, modifiers: str, seed: int) -> None:
    """Loss, gradients and sums are finite where trainer, engine and reference lie e^50 apart, for either sign of A."""
    inputs = inputs_of(seed, torch.float32)
    rng = torch.Generator().manual_seed(seed)

    def apart(array: str, values_T: torch.Tensor) -> torch.Tensor:
        if not array.endswith("logprobs_T") or array == "logprobs_T":
            return values_T
        sign_T = torch.randint(0, 2, values_T.shape, generator=rng) * 2 - 1
        return inputs.logprobs_T.detach() + 50.0 * sign_T

    output, grad_T = computed(changed(inputs, apart), objective_of(name, modifiers))
    assert math.isfinite(output.loss.item())
    assert bool(grad_T.isfinite().all())
    assert all(math.isfinite(float(value)) for value in output.sums.values())


@every_loss
def test_padding_changes_nothing(name: str) -> None:
    """Rows with a gap and any padding give what the flat tokens give."""
    logprobs_BT = torch.tensor([[-0.5, -1.0, -0.2], [-0.9, -0.3, -2.0]], dtype=torch.float64)
    mask_BT = torch.tensor([[True, False, True], [True, True, False]])

    def padded(width: int, pad: float) -> tuple[float, list[float]]:
        def to(values_BT: torch.Tensor) -> torch.Tensor:
            return torch.cat([values_BT, torch.full((2, width), pad, dtype=values_BT.dtype)], 1)

        leaf_BT = to(logprobs_BT).requires_grad_()
        inputs = LossInputs.of_padded(
            leaf_BT,
            to(logprobs_BT + torch.tensor([[0.1], [-0.3]])),
            [1.0, -0.5],
            torch.cat([mask_BT, torch.zeros(2, width, dtype=torch.bool)], 1),
            max_completion_length=3,
            old_logprobs_BT=to(logprobs_BT - 0.05),
            teacher_logprobs_BT=to(logprobs_BT + 0.2),
        )
        loss = compute_loss(inputs, ObjectiveConfig(loss={"type": name})).loss
        (grad_BT,) = torch.autograd.grad(loss, leaf_BT)
        return loss.item(), grad_BT[:, :3].flatten().tolist() + grad_BT[:, 3:].abs().sum().reshape(1).tolist()

    bare, wide = padded(0, 0.0), padded(4, float("nan"))
    assert wide == bare
    assert bare[1][1] == bare[1][5] == bare[1][6] == 0.0
    assert bare[1][0] != 0.0
