"""The policy loss against numbers by hand, and against a reference in plain Python that shares no code with it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs, LossOutput, compute_loss
from actors.algorithms.losses.metrics import metrics_of
from schemas.config.losses import SurogateLossConfig
from schemas.config.objective import ObjectiveConfig

WIDE = {
    "token_mask_low": 0.0,
    "token_mask_high": math.inf,
    "geo_mask_low": 0.0,
    "geo_mask_high": math.inf,
    "sequence_mask_low": 0.0,
    "sequence_mask_high": math.inf,
}
"""Masks that let everything pass."""
HAND = {"token_mask_low": 0.5, "token_mask_high": 1.4, "geo_mask_high": 1000.0, "sequence_mask_high": 1000.0}


def config(**changes: Any) -> SurogateLossConfig:
    """Wide masks unless said otherwise."""
    return SurogateLossConfig(**WIDE | changes)


def compute(inputs: LossInputs, c: SurogateLossConfig) -> LossOutput:
    """The loss alone, without any switch."""
    return compute_loss(inputs, ObjectiveConfig(loss=c))


def hand_example(**changes: Any) -> LossInputs:
    """One completion of three tokens, the last not in the loss: log ratios 0, 0.5, 0."""
    inputs = LossInputs(
        logprobs_T=torch.tensor([-0.2, -0.7, -0.1], dtype=torch.float64, requires_grad=True),
        inference_logprobs_T=torch.tensor([-0.2, -1.2, -0.1], dtype=torch.float64),
        advantages_T=torch.tensor([0.3, 1.1, -0.2], dtype=torch.float64),
        loss_mask_T=torch.tensor([True, True, False]),
        completion_of_T=torch.zeros(3, dtype=torch.int64),
        num_completions=1,
        loss_tokens=2,
    )
    return replace(inputs, **changes)


def random_inputs(seed: int, num_completions: int = 7, with_teacher: bool = True) -> LossInputs:
    """Completions of 1 to 9 tokens, a third of them not in the loss, ratios on both sides of any bound."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (num_completions,), generator=rng)
    size = int(lengths.sum())
    logprobs = -3 * torch.rand(size, generator=rng, dtype=torch.float64)
    return LossInputs(
        logprobs_T=logprobs.requires_grad_(),
        inference_logprobs_T=logprobs.detach() + torch.randn(size, generator=rng, dtype=torch.float64),
        advantages_T=torch.randn(size, generator=rng, dtype=torch.float64),
        loss_mask_T=torch.rand(size, generator=rng) > 1 / 3,
        completion_of_T=torch.repeat_interleave(torch.arange(num_completions), lengths),
        num_completions=num_completions,
        loss_tokens=20,
        teacher_logprobs_T=-3 * torch.rand(size, generator=rng, dtype=torch.float64) if with_teacher else None,
    )


def reference(inputs: LossInputs, c: SurogateLossConfig) -> tuple[float, list[float], list[bool]]:
    """(loss, gradient by token, kept by token), written from ALGORITHMS 1.1 token by token."""
    logp, q = inputs.logprobs_T.tolist(), inputs.inference_logprobs_T.tolist()
    loss, grads, kept = 0.0, [], []
    for t in range(len(logp)):
        mine = [
            i
            for i in range(len(logp))
            if inputs.completion_of_T[i] == inputs.completion_of_T[t] and inputs.loss_mask_T[i]
        ]
        total = sum(logp[i] - q[i] for i in mine)
        ratios = [math.exp(logp[i] - q[i]) for i in mine]
        ratio, geo = math.exp(logp[t] - q[t]), math.exp(total / max(len(mine), 1))
        keep = bool(inputs.loss_mask_T[t]) and not (
            ratio < c.token_mask_low
            or ratio > c.token_mask_high
            or geo < c.geo_mask_low
            or geo > c.geo_mask_high
            or min(ratios) < c.sequence_mask_low
            or max(ratios) > c.sequence_mask_high
        )
        weight = ratio if c.ratio_type == "token" else min(math.exp(min(total, 10.0)), c.sequence_clip_high)
        advantage = c.adv_tau * float(inputs.advantages_T[t])
        if inputs.teacher_logprobs_T is not None:
            advantage += c.teacher_tau * (float(inputs.teacher_logprobs_T[t]) - logp[t])
        coeff = weight * (advantage - c.kl_tau * (logp[t] - q[t])) if keep else 0.0
        coeff /= len(mine) if keep and c.ratio_type == "sequence" else 1
        loss -= coeff * logp[t] / inputs.loss_tokens
        grads.append(-coeff / inputs.loss_tokens)
        kept.append(keep)
    return loss, grads, kept


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_the_hand_check_keeps_one_token_and_costs_0_03() -> None:
    """Token 1 has ratio e^0.5 = 1.65 > 1.4; of token 0, −0.3 · −0.2 ÷ 2 is left (ALGORITHMS 1.1)."""
    inputs = hand_example()
    output = compute(inputs, config(**HAND, kl_tau=0.2))
    assert output.loss.item() == pytest.approx(0.03, abs=1e-12)
    output.loss.backward()
    assert inputs.logprobs_T.grad.tolist() == pytest.approx([-0.15, 0.0, 0.0])
    counts = {name: int(output.sums[name]) for name in ("tokens", "kept_tokens", "masked_tokens", "masked_high")}
    assert counts == {"tokens": 2, "kept_tokens": 1, "masked_tokens": 1, "masked_high": 1}


def test_the_geometric_mean_of_the_hand_check_is_1_2840254() -> None:
    """e^(0.5 ÷ 2), over the two tokens in the loss: a bound just below drops it, one just above does not."""
    loss = {bound: compute(hand_example(), config(geo_mask_high=bound)).loss.item() for bound in (1.284025, 1.284026)}
    assert loss[1.284025] == 0.0
    assert loss[1.284026] != 0.0


def test_the_sequence_ratio_of_the_hand_check_is_1_6487213() -> None:
    """e^0.5 weighs both tokens: 1.6487213 · (0.3 · 0.2 + (1.1 − 0.2 · 0.5) · 0.7) ÷ 2 tokens ÷ 2 of the step."""
    c = config(ratio_type="sequence", kl_tau=0.2)
    assert compute(hand_example(), c).loss.item() == pytest.approx(1.6487213 * 0.19, abs=1e-7)


def test_the_sequence_ratio_is_capped() -> None:
    """At 1.5: 1.5 · 0.19 (ALGORITHMS 1.1, sequence_clip_high)."""
    c = config(ratio_type="sequence", kl_tau=0.2, sequence_clip_high=1.5)
    assert compute(hand_example(), c).loss.item() == pytest.approx(0.285, abs=1e-12)


def test_the_sum_of_log_ratios_is_capped_at_ten_before_the_exponential() -> None:
    """Three tokens of log ratio 4: e^10, not e^12."""
    inputs = hand_example(
        inference_logprobs_T=torch.tensor([-4.2, -4.7, -4.1], dtype=torch.float64),
        loss_mask_T=torch.tensor([True, True, True]),
        advantages_T=torch.ones(3, dtype=torch.float64),
    )
    loss = compute(inputs, config(ratio_type="sequence", sequence_clip_high=1e9)).loss.item()
    assert loss == pytest.approx(math.exp(10) * (0.2 + 0.7 + 0.1) / 3 / 2)


@pytest.mark.parametrize("mask", ["token_mask", "geo_mask", "sequence_mask"])
def test_a_ratio_exactly_at_a_bound_is_kept(mask: str) -> None:
    """All ratios are exactly 1; the comparisons are strict, one part in a billion further drops all."""
    inputs = hand_example(inference_logprobs_T=torch.tensor([-0.2, -0.7, -0.1], dtype=torch.float64))
    at = [{f"{mask}_low": 1.0, f"{mask}_high": 2.0}, {f"{mask}_low": 0.5, f"{mask}_high": 1.0}]
    past = [{f"{mask}_low": 1 + 1e-9, f"{mask}_high": 2.0}, {f"{mask}_low": 0.5, f"{mask}_high": 1 - 1e-9}]
    assert [int(compute(inputs, config(**bounds)).sums["kept_tokens"]) for bounds in at] == [2, 2]
    assert [int(compute(inputs, config(**bounds)).sums["kept_tokens"]) for bounds in past] == [0, 0]


def test_masks_of_a_completion_do_not_touch_its_neighbour() -> None:
    """Completion 0 is dropped by its largest ratio, e^0.5; completion 1 stays whole."""
    inputs = hand_example(
        loss_mask_T=torch.tensor([True, True, True]), completion_of_T=torch.tensor([0, 0, 1]), num_completions=2
    )
    output = compute(inputs, config(sequence_mask_high=1.5))
    output.loss.backward()
    assert inputs.logprobs_T.grad.tolist() == pytest.approx([0.0, 0.0, 0.1])
    assert int(output.sums["masked_sequence"]) == 2


def test_tokens_outside_the_loss_mask_do_not_count_anywhere() -> None:
    """The third token's ratio of e^50 neither drops the completion nor weighs in any mean."""
    wild = hand_example(inference_logprobs_T=torch.tensor([-0.2, -1.2, -50.1], dtype=torch.float64))
    c = config(sequence_mask_high=2.0, geo_mask_high=2.0)
    assert compute(wild, c).loss.item() == compute(hand_example(), c).loss.item() != 0.0
    assert compute(wild, c).sums["kl"].item() == compute(hand_example(), c).sums["kl"].item()


def test_a_completion_without_loss_tokens_costs_nothing() -> None:
    """Its sums are empty: no division by zero, no mask counted."""
    output = compute(hand_example(loss_mask_T=torch.zeros(3, dtype=torch.bool)), config(ratio_type="sequence"))
    assert output.loss.item() == 0.0
    assert {float(value) for value in output.sums.values()} == {0.0}


def test_dropped_tokens_stay_in_the_normaliser() -> None:
    """Twice the loss tokens halve the loss, whatever the trust region dropped."""
    c = config(**HAND)
    halves = [compute(hand_example(loss_tokens=n), c).loss.item() for n in (2, 4)]
    assert halves[0] == 2 * halves[1]


def test_the_teacher_pulls_with_its_factor() -> None:
    """Token 0: 0.3 + 0.5 · (−0.1 + 0.2) = 0.35; token 1, ratio e^0.5: 1.1 + 0.5 · (−0.9 + 0.7) = 1.0."""
    inputs = hand_example(teacher_logprobs_T=torch.tensor([-0.1, -0.9, 0.0], dtype=torch.float64))
    compute(inputs, config(teacher_tau=0.5)).loss.backward()
    assert inputs.logprobs_T.grad.tolist() == pytest.approx([-0.35 / 2, -math.exp(0.5) / 2, 0.0])


def test_a_dropped_token_whose_ratio_overflows_leaves_loss_and_gradient_finite() -> None:
    """e^999 is infinite; the token is dropped, not multiplied by zero."""
    inputs = hand_example(
        logprobs_T=torch.tensor([-1.0, -0.7, -0.1], requires_grad=True),
        inference_logprobs_T=torch.tensor([-1000.0, -0.7, -0.1]),
        advantages_T=torch.tensor([1.0, 1.0, 1.0]),
    )
    loss = compute(inputs, config(token_mask_high=8.0)).loss
    loss.backward()
    assert loss.item() == pytest.approx(0.35)
    assert inputs.logprobs_T.grad.tolist() == [0.0, -0.5, 0.0]


# --- against the reference -------------------------------------------------------------------------------------------

TIGHT = {
    "token_mask_low": 0.3,
    "token_mask_high": 3.0,
    "geo_mask_low": 0.6,
    "geo_mask_high": 1.8,
    "sequence_mask_low": 0.05,
    "sequence_mask_high": 8.0,
}


@pytest.mark.parametrize("ratio_type", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_those_of_the_reference(ratio_type: str, seed: int) -> None:
    """Autograd of the implementation against −coeff · keep ÷ loss_tokens, in float64."""
    inputs = random_inputs(seed, num_completions=12)
    c = config(**TIGHT, ratio_type=ratio_type, kl_tau=0.3, teacher_tau=0.2, adv_tau=0.7, sequence_clip_high=2.0)
    output = compute(inputs, c)
    output.loss.backward()
    loss, grads, kept = reference(inputs, c)
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert inputs.logprobs_T.grad.tolist() == pytest.approx(grads, abs=1e-12)
    assert int(output.sums["kept_tokens"]) == sum(kept)
    assert 0 < sum(kept) < int(output.sums["tokens"])


def test_the_inputs_of_the_reference_meet_every_mask() -> None:
    """Otherwise the comparison above would say nothing of that mask."""
    totals = [compute(random_inputs(seed, 12), config(**TIGHT)).sums for seed in range(4)]
    for cause in ("low", "high", "geo", "sequence"):
        assert sum(int(sums[f"masked_{cause}"]) for sums in totals) > 0


@pytest.mark.parametrize("ratio_type", ["token", "sequence"])
def test_splitting_and_reordering_completions_changes_nothing(ratio_type: str) -> None:
    """Shares of micro-batches add up to the loss of the step, and so do all metric sums, in whatever order."""
    inputs = random_inputs(9, num_completions=8)
    c = config(**TIGHT, ratio_type=ratio_type, kl_tau=0.1)
    whole = compute(inputs, c)
    shares = [compute(part_of(inputs, picked), c) for picked in ([5, 2], [7, 0, 3], [6], [1, 4])]
    assert sum(share.loss.item() for share in shares) == pytest.approx(whole.loss.item(), abs=1e-12)
    for name, value in whole.sums.items():
        assert sum(float(share.sums[name]) for share in shares) == pytest.approx(float(value), abs=1e-9)


def part_of(inputs: LossInputs, completions: list[int]) -> LossInputs:
    """These completions, in this order, as a micro-batch of their own."""
    places = torch.cat([torch.nonzero(inputs.completion_of_T == b).flatten() for b in completions])
    lengths = [int((inputs.completion_of_T == b).sum()) for b in completions]
    return replace(
        inputs,
        logprobs_T=inputs.logprobs_T[places],
        inference_logprobs_T=inputs.inference_logprobs_T[places],
        advantages_T=inputs.advantages_T[places],
        loss_mask_T=inputs.loss_mask_T[places],
        teacher_logprobs_T=None if inputs.teacher_logprobs_T is None else inputs.teacher_logprobs_T[places],
        completion_of_T=torch.repeat_interleave(torch.arange(len(completions)), torch.tensor(lengths)),
        num_completions=len(completions),
    )


def test_the_coefficient_carries_no_gradient() -> None:
    """The gradient is −coeff alone; a coefficient that were differentiated too would add −logp · d coeff."""
    inputs = hand_example()
    compute(inputs, config()).loss.backward()
    assert inputs.logprobs_T.grad.tolist() == pytest.approx([-0.15, -1.1 * math.exp(0.5) / 2, 0.0])


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_mismatch_kl_of_the_hand_check() -> None:
    """r − lr − 1 is 0 and e^0.5 − 1.5 = 0.1487213: mean 0.0743606, kept 0, dropped 0.1487213."""
    sums = compute(hand_example(), config(**HAND)).sums
    metrics = metrics_of({name: float(value) for name, value in sums.items()})
    assert metrics["mismatch_kl"] == pytest.approx(0.0743606, abs=1e-7)
    assert metrics["mismatch_kl_kept"] == 0.0
    assert metrics["mismatch_kl_masked"] == pytest.approx(0.1487213, abs=1e-7)
    assert (metrics["masked_fraction"], metrics["masked_fraction_high"]) == (0.5, 0.5)
    assert {metrics[f"masked_fraction_{cause}"] for cause in ("low", "geo", "sequence")} == {0.0}


def test_a_metric_without_a_denominator_is_zero() -> None:
    """Nothing was masked, so there is nothing to average; a metric whose sum is absent is left out."""
    assert metrics_of({"kl_masked": 0.0, "masked_tokens": 0.0, "tokens": 0.0}) == {
        "mismatch_kl_masked": 0.0,
        "masked_fraction": 0.0,
    }


@pytest.mark.parametrize("mask", ["token_mask", "geo_mask", "sequence_mask"])
def test_bounds_out_of_order_are_refused(mask: str) -> None:
    """Nothing would ever be trained."""
    with pytest.raises(ValueError, match=f"{mask}_low 2.0 must be below {mask}_high 1.0"):
        SurogateLossConfig(**{f"{mask}_low": 2.0, f"{mask}_high": 1.0})
