"""grpo and its relatives: by hand, and against a reference in plain Python, whose gradient is a difference quotient."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs, LossOutput, compute_loss
from actors.algorithms.losses.metrics import metrics_of
from schemas.config.objective import ObjectiveConfig
from tests.actors.algorithms.losses.around_engine import random_inputs

MAX_LENGTH = 8


def of(loss: dict[str, Any], inputs: LossInputs, **modifiers: Any) -> tuple[LossOutput, list[float]]:
    """The output, and its gradient by token."""
    output = compute_loss(inputs, ObjectiveConfig(loss=loss, **modifiers))
    (grad_T,) = torch.autograd.grad(output.loss, inputs.logprobs_T)
    return output, grad_T.tolist()


def rows(
    log_ratios: Sequence[Sequence[float]], advantages: Sequence[Any], logprob: float = -1.0, **further: Any
) -> LossInputs:
    """A completion per row of log ratios to `old`; the engine's logprobs are `old`'s. All tokens are in the loss."""
    width = max(len(row) for row in log_ratios)
    padded = [[*row, *[0.0] * (width - len(row))] for row in log_ratios]
    old_BT = torch.tensor([[logprob - x for x in row] for row in padded], dtype=torch.float64)
    mask_BT = torch.tensor([[t < len(row) for t in range(width)] for row in log_ratios])
    leaf_BT = torch.full(old_BT.shape, logprob, dtype=torch.float64, requires_grad=True)
    return LossInputs.of_padded(
        leaf_BT, old_BT, advantages, mask_BT, old_logprobs_BT=old_BT, max_completion_length=MAX_LENGTH, **further
    )


def metrics(output: LossOutput) -> dict[str, float]:
    """Of one micro-batch."""
    return metrics_of({name: float(value) for name, value in output.sums.items()})


# --- by hand ---------------------------------------------------------------------------------------------------------

LN2 = math.log(2)
HAND = rows([[LN2, 0.0], [-LN2]], [1.0, -1.0])
"""Ratios 2 and 1 with advantage 1, clipped to 1.2 and 1; ratio ½ with advantage −1, clipped to 0.8: −1.2, −1, 0.8."""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"type": "grpo"}, (-1.1 + 0.8) / 2),
        ({"type": "bnpo"}, (-2.2 + 0.8) / 3),
        ({"type": "dapo"}, (-2.2 + 0.8) / 3),
        ({"type": "dr_grpo"}, (-2.2 + 0.8) / (2 * MAX_LENGTH)),
        # the ratio of completion 0 is √2, clipped to 1.2
        ({"type": "gspo"}, (-1.2 + 0.8) / 2),
        ({"type": "gspo_token"}, (-1.2 + 0.8) / 2),
        ({"type": "luspo"}, (2 * -1.2 + 0.8) / 2),
        ({"type": "luspo", "importance_sampling_level": "token"}, (-2.2 + 0.8) / 2),
        ({"type": "rloo"}, (-1.2 + 0.8) / 2),
        # clip-higher lets the 2 pass up to 1.5
        ({"type": "grpo", "epsilon_high": 0.5}, (-1.25 + 0.8) / 2),
        # −min(2, 5)·1·−1, −1·1·−1, −½·−1·−1
        ({"type": "cispo"}, (2 + 1 - 0.5) / 3),
        ({"type": "cispo", "epsilon_high": 1.5}, (1.5 + 1 - 0.5) / 3),
        # −4·sigmoid(1), −4·sigmoid(0), (4/1.05)·sigmoid(−0.525)
        ({"type": "sapo"}, (-(4 / (1 + math.exp(-1)) + 2) / 2 + 4 / 1.05 / (1 + math.exp(0.525))) / 2),
        # e^(0.4/2): the log ratio 0.693 is clipped to 0.4; e^(−0.4)
        ({"type": "gmpo"}, (-math.exp(0.2) + math.exp(-0.4)) / 2),
        # w = 2: e^(3 + 2·ln 2 − 6) · 1 · 1, twice; w = ½: e^(2 − 3·ln 2 − 1) · −1 · 1
        ({"type": "vespo"}, (2 * 4 * math.exp(-3) - math.e / 8) / 3),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_the_loss_of_the_hand_example(loss: dict[str, Any], expected: float) -> None:
    """Each formula at its defaults, and its average."""
    assert of(loss, HAND)[0].loss.item() == pytest.approx(expected, abs=1e-9)


def test_delta_caps_the_ratio_where_nothing_clips_it() -> None:
    """Ratio 2 with advantage −1 costs 2, with delta 1.5 it costs 1.5 and has no gradient."""
    inputs = rows([[LN2]], [-1.0])
    assert [of({"type": "grpo", "delta": d}, inputs)[0].loss.item() for d in (None, 1.5)] == pytest.approx([2.0, 1.5])
    assert of({"type": "grpo", "delta": 1.5}, inputs)[1] == [0.0]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    """Ratio 4 with advantage −0.5 costs 2, with c = 3 at most 1.5; a positive advantage is left alone."""
    inputs = rows([[2 * LN2], [2 * LN2]], [-0.5, 0.5])
    without, bounded = (of({"type": "grpo", "dual_clip": c}, inputs) for c in (None, 3.0))
    assert without[0].loss.item() == pytest.approx((2 - 0.6) / 2)
    assert bounded[0].loss.item() == pytest.approx((1.5 - 0.6) / 2)
    assert (bounded[1], without[1]) == ([0.0, 0.0], pytest.approx([1.0, 0.0]))


def test_cispo_keeps_the_gradient_above_its_cap() -> None:
    """−min(ρ, 1.5)·A ÷ 3 tokens."""
    assert of({"type": "cispo", "epsilon_high": 1.5}, HAND)[1] == pytest.approx([-0.5, -1 / 3, 0.5 / 3])


def test_sapo_has_the_policy_gradient_at_ratio_one_for_either_temperature() -> None:
    """(4/τ)·sigmoid′(0)·τ = 1."""
    inputs = rows([[0.0], [0.0]], [1.0, -1.0])
    for average in ("completion_means", "step_tokens"):
        loss = {"type": "sapo", "temperature_pos": 2.0, "temperature_neg": 0.5, "average": average}
        assert of(loss, inputs)[1] == pytest.approx([-0.5, 0.5])


def test_gmpo_clips_only_the_side_that_its_advantage_pushes_to() -> None:
    """A log ratio of 1 stays with A < 0, one of −1 with A > 0: no gradient is lost that would lead back."""
    inputs = rows([[1.0], [-1.0]], [-1.0, 1.0])
    output, grads = of({"type": "gmpo"}, inputs)
    assert output.loss.item() == pytest.approx((math.e - 1 / math.e) / 2)
    assert grads == pytest.approx([math.e / 2, -1 / math.e / 2])


def test_gspo_token_is_gspo_where_a_completion_has_one_advantage() -> None:
    """Value and gradient, at any clip; with advantages of its own each token keeps its own gradient."""
    inputs = rows([[0.3, -0.1, 0.05], [0.1, 0.0]], [1.0, -0.5])
    gspo, token = (of({"type": kind, "epsilon": 0.05}, inputs) for kind in ("gspo", "gspo_token"))
    assert token[0].loss.item() == pytest.approx(gspo[0].loss.item(), abs=1e-15)
    assert token[1] == pytest.approx(gspo[1], abs=1e-15)
    own = rows([[0.0, 0.0]], [[1.0, 0.0]])
    assert of({"type": "gspo_token"}, own)[1] == pytest.approx([-0.5, 0.0])
    assert of({"type": "gspo"}, own)[1] == pytest.approx([-0.25, -0.25])


def test_advantages_of_a_completion_may_be_averaged() -> None:
    """AReaL at level sequence: both tokens have (3 − 1) ÷ 2; token by token one is clipped and one is not."""
    inputs = rows([[LN2, LN2]], [[3.0, -1.0]])
    loss = {"type": "dapo", "importance_sampling_level": "sequence"}
    assert of(loss, inputs)[0].loss.item() == pytest.approx((-1.2 * 3 + 2) / 2)
    assert of(loss | {"compat": {"advantage_level": "completion"}}, inputs)[0].loss.item() == pytest.approx(-1.2)


def test_the_ratio_may_be_to_the_engine() -> None:
    """e^0.1 to the engine where that to the step's start is 1."""
    logprobs_BT = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs.of_padded(logprobs_BT, [[-1.1]], [1.0], [[True]])
    found = {
        old: of({"type": "grpo", "old_logprobs": old}, inputs)[0].loss.item() for old in ("step_start", "inference")
    }
    assert found == pytest.approx({"step_start": -1.0, "inference": -math.exp(0.1)})


def test_bnpo_averages_the_means_of_its_micro_batches() -> None:
    """(−2.2 + 0.8) ÷ 3 tokens, of two micro-batches."""
    inputs = rows([[LN2, 0.0], [-LN2]], [1.0, -1.0], num_micro_batches=2)
    assert of({"type": "bnpo"}, inputs)[0].loss.item() == pytest.approx(-1.4 / 3 / 2)


def test_dr_grpo_says_what_it_divides_by() -> None:
    """Nobody knows a length that is not given."""
    inputs = LossInputs.of_padded(torch.zeros(1, 1), [[0.0]], [1.0], [[True]])
    with pytest.raises(ValueError, match="max_completion_length: this loss divides by it"):
        compute_loss(inputs, ObjectiveConfig(loss={"type": "dr_grpo"}))


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_clip_fractions_are_of_tokens_or_of_completions() -> None:
    """Of the hand example: one token of three each; at level sequence one completion of two each."""
    tokens, completions = metrics(of({"type": "grpo"}, HAND)[0]), metrics(of({"type": "gspo"}, HAND)[0])
    assert [tokens[f"clip_fraction_{side}"] for side in ("low", "high")] == pytest.approx([1 / 3, 1 / 3])
    assert [completions[f"clip_fraction_{side}_completions"] for side in ("low", "high")] == [0.5, 0.5]
    assert "clip_fraction_low" not in completions
    assert metrics(of({"type": "cispo", "epsilon_high": 1.5}, HAND)[0])["clip_fraction_high"] == pytest.approx(1 / 3)


def test_effective_sample_size_and_advantages_of_the_hand_example() -> None:
    """(2 + 1 + ½)² ÷ (3·(4 + 1 + ¼)); advantages 1, 1, −1: mean ⅓, deviation √(1 − 1/9)."""
    found = metrics(of({"type": "grpo"}, HAND)[0])
    assert found["ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert found["advantage_mean"] == pytest.approx(1 / 3)
    assert found["advantage_std"] == pytest.approx(math.sqrt(8 / 9))


def test_vespo_tells_its_mean_weight() -> None:
    """Over completions: (4·e⁻³ + e/8) ÷ 2."""
    found = metrics(of({"type": "vespo"}, HAND)[0])
    assert found["vespo_weight"] == pytest.approx((4 * math.exp(-3) + math.e / 8) / 2)


# --- against the reference -------------------------------------------------------------------------------------------


def reference(loss: dict[str, Any], inputs: LossInputs, logp: list[float], frozen: list[float]) -> float:
    """The loss at `logp`, token by token; what the formulas detach is taken at `frozen`."""
    assert inputs.old_logprobs_T is not None
    old, given = inputs.old_logprobs_T.tolist(), inputs.advantages_T.tolist()
    mask, owner = inputs.loss_mask_T.tolist(), inputs.completion_of_T.tolist()
    means, sums, tokens = 0.0, 0.0, sum(mask)
    for b in range(inputs.num_completions):
        mine = [t for t in range(len(logp)) if owner[t] == b and mask[t]]
        if mine:
            values = _values(loss, [logp[t] for t in mine], [frozen[t] for t in mine], [old[t] for t in mine],
                             [given[t] for t in mine])  # fmt: skip
            means, sums = means + sum(values) / len(mine), sums + sum(values)
    by_completion = {"grpo", "gspo", "gspo_token", "sapo", "gmpo", "rloo"}
    if loss["type"] in by_completion and loss.get("average") != "step_tokens":
        return means / inputs.num_completions
    if loss["type"] == "luspo":
        return sums / inputs.num_completions
    return sums / (inputs.num_completions * MAX_LENGTH if loss["type"] == "dr_grpo" else tokens)


def _values(loss: dict[str, Any], logp: Any, frozen: Any, old: Any, advantages: Any) -> list[float]:
    """Of one completion, from lists over its tokens."""
    n, kind = len(logp), loss["type"]
    level = {"gspo": "sequence", "gspo_token": "sequence_token", "luspo": "sequence"}.get(kind, "token")
    level = loss.get("importance_sampling_level", level)
    log_ratios = [x - y for x, y in zip(logp, old, strict=True)]
    before = [x - y for x, y in zip(frozen, old, strict=True)]
    if kind == "gmpo":
        clipped = [min(x, 0.4) if a > 0 else max(x, -0.4) for x, a in zip(log_ratios, advantages, strict=True)]
        return [-a * math.exp(sum(clipped) / n) for a in advantages]
    if kind == "vespo":
        w = math.exp(sum(before))
        weigh = [(2, 3) if a >= 0 else (3, 2) for a in advantages]
        phi = [math.exp(decay) * w**k * math.exp(-decay * w) for k, decay in weigh]
        return [-p * a * x for p, a, x in zip(phi, advantages, logp, strict=True)]
    if level == "token":
        ratios, detached = [math.exp(x) for x in log_ratios], [math.exp(x) for x in before]
    elif level == "sequence":
        ratios, detached = [math.exp(sum(log_ratios) / n)] * n, [math.exp(sum(before) / n)] * n
    else:
        ratios = [math.exp(sum(before) / n + x - y) for x, y in zip(logp, frozen, strict=True)]
    if kind == "rloo":
        ratios = [math.exp(sum(log_ratios))] * n
    if kind == "cispo":
        return [-min(r, 1.1) * a * x for r, a, x in zip(detached, advantages, logp, strict=True)]
    if kind == "sapo":
        tau = [1.0 if a > 0 else 1.05 for a in advantages]
        return [-a * 4 / t / (1 + math.exp(-t * (r - 1))) for a, t, r in zip(advantages, tau, ratios, strict=True)]
    return [_clipped(loss, r, a) for r, a in zip(ratios, advantages, strict=True)]


def _clipped(loss: dict[str, Any], ratio: float, advantage: float) -> float:
    capped = min(ratio, loss.get("delta") or math.inf)
    value = -min(capped * advantage, max(0.8, min(ratio, 1 + loss.get("epsilon_high", 0.2))) * advantage)
    return min(value, loss["dual_clip"] * abs(advantage)) if advantage < 0 and "dual_clip" in loss else value


CASES: list[dict[str, Any]] = [
    {"type": "grpo"},
    {"type": "grpo", "epsilon_high": 0.28, "delta": 1.5},
    {"type": "bnpo", "dual_clip": 1.3},
    {"type": "dr_grpo"},
    {"type": "dapo", "importance_sampling_level": "sequence_token"},
    {"type": "gspo", "delta": 1.3},
    {"type": "gspo_token"},
    {"type": "luspo"},
    {"type": "luspo", "importance_sampling_level": "token"},
    {"type": "cispo", "epsilon_high": 1.1},
    {"type": "cispo", "epsilon_high": 1.1, "importance_sampling_level": "sequence"},
    {"type": "sapo"},
    {"type": "sapo", "importance_sampling_level": "sequence", "average": "step_tokens"},
    {"type": "gmpo"},
    {"type": "rloo"},
    {"type": "vespo"},
]


@pytest.mark.parametrize("loss", CASES, ids=lambda loss: "-".join(map(str, loss.values())))
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_reference(loss: dict[str, Any], seed: int) -> None:
    """In float64; the reference's gradient is a central difference, good to 1e-7."""
    inputs = random_inputs(seed)
    inputs = LossInputs(
        **{name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
        | {"max_completion_length": MAX_LENGTH, "loss_tokens": int(inputs.loss_mask_T.sum())}
    )
    output, grads = of(loss, inputs)
    logp = inputs.logprobs_T.tolist()
    assert output.loss.item() == pytest.approx(reference(loss, inputs, logp, logp), abs=1e-12)
    step = 1e-6
    for t, grad in enumerate(grads):
        moved = [reference(loss, inputs, [x + s * (i == t) for i, x in enumerate(logp)], logp) for s in (step, -step)]
        assert grad == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-7)
    assert max(map(abs, grads)) > 1e-3
