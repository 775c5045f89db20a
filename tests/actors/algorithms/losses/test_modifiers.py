"""The modifiers, each by hand, and the conventions in which the origins differ."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs, LossOutput, compute_loss
from actors.algorithms.losses.metrics import metrics_of
from actors.algorithms.losses.modifiers import correction_weights, discounted_sums, kl_in_reward
from schemas.config.objective import ObjectiveConfig

LN2 = math.log(2)
MASK = [[True, True], [True, False]]
DAPO = {"type": "dapo"}


def inputs_of(
    logprobs: Any = (-1.0, -1.0, -1.0),
    inference: Any = (-1.0, -1.0, -1.0),
    advantages: Any = (1.0, -1.0),
    num_micro_batches: int = 1,
    loss_tokens: int | None = None,
    **further: Any,
) -> LossInputs:
    """Completions of two and one tokens, from one list each; the ratio to the step's start is 1."""

    def rows(values: Any) -> torch.Tensor:
        return torch.tensor([[*values[:2]], [values[2], 0.0]], dtype=torch.float64)

    return LossInputs.of_padded(
        rows(logprobs).requires_grad_(),
        rows(inference),
        list(advantages),
        MASK,
        num_micro_batches=num_micro_batches,
        loss_tokens=loss_tokens,
        **{f"{name}_BT": rows(values) for name, values in further.items()},
    )


def computed(inputs: LossInputs, loss: dict[str, Any] = DAPO, **modifiers: Any) -> tuple[LossOutput, list[float]]:
    """The output, and its gradient by token."""
    output = compute_loss(inputs, ObjectiveConfig(loss=loss, **modifiers))
    (grad_T,) = torch.autograd.grad(output.loss, inputs.logprobs_T)
    return output, grad_T.tolist()


def metric(output: LossOutput, name: str) -> float:
    """Of one micro-batch."""
    return metrics_of({key: float(value) for key, value in output.sums.items()})[name]


# --- correction ------------------------------------------------------------------------------------------------------

OFF = inputs_of(inference=(-1 - LN2, -1 - LN2, -1 + LN2))
"""Weights exp(old − inference) of 2, 2 and ½: by completion 4 or, as geometric mean, 2; and ½."""


@pytest.mark.parametrize(
    ("correction", "weights", "fraction"),
    [
        ({"mode": "truncate", "high": 1.5}, [1.5, 1.5, 0.5], 2 / 3),
        ({"mode": "truncate", "low": 0.8, "high": 3.0}, [2, 2, 0.8], 1 / 3),
        ({"mode": "mask", "high": 1.5}, [0, 0, 0.5], 2 / 3),
        ({"mode": "mask", "low": 0.8, "high": 3.0}, [2, 2, 0], 1 / 3),
        ({"mode": "truncate", "level": "sequence", "high": 3.0}, [3, 3, 0.5], 2 / 3),
        ({"mode": "mask", "level": "sequence", "high": 3.0}, [0, 0, 0.5], 2 / 3),
        ({"mode": "mask", "level": "sequence", "high": 5.0}, [4, 4, 0.5], 0),
        ({"mode": "mask", "level": "sequence", "high": 5.0, "sequence_weight": "token"}, [2, 2, 0.5], 0),
        ({"mode": "mask", "level": "sequence", "sequence_ratio": "geometric_mean", "high": 3.0}, [2, 2, 0.5], 0),
    ],
)
def test_the_correction_weighs_the_gradient(correction: dict[str, Any], weights: list[float], fraction: float) -> None:
    """−A·weight ÷ 3 tokens; the fraction is of tokens outside the bounds."""
    output, grads = computed(OFF, correction=correction)
    signs = [-1.0, -1.0, 1.0]
    assert grads == pytest.approx([s * w / 3 for s, w in zip(signs, weights, strict=True)])
    assert metric(output, "correction_fraction") == pytest.approx(fraction)


@pytest.mark.parametrize(("mode", "log_w"), [("truncate", 2 * math.log(1.5)), ("mask", 2 * math.log(1e-8))])
def test_vespo_takes_the_correction_into_its_weight(mode: str, log_w: float) -> None:
    """Weights 1.5 each after the clamp; tokens that are masked count as 1e-8, and log w is at least the log of that."""
    w = math.exp(max(log_w, math.log(1e-8)))
    _, grads = computed(OFF, {"type": "vespo"}, correction={"mode": mode, "high": 1.5})
    phi = [math.exp(3) * w**2 * math.exp(-3 * w), math.exp(2) * 0.5**3 * math.exp(-1)]
    assert grads == pytest.approx([-phi[0] / 3, -phi[0] / 3, phi[1] / 3], abs=1e-12)


def test_vespo_refuses_weights_of_whole_completions() -> None:
    """Its own weight is one."""
    with pytest.raises(ValueError, match=r"correction\.level sequence: loss vespo"):
        ObjectiveConfig(loss={"type": "vespo"}, correction={"mode": "mask", "level": "sequence"})


def test_gmpo_knows_neither_correction_nor_off_policy_mask() -> None:
    """As in TRL: the output is that without them, metrics included."""
    plain = computed(OFF, {"type": "gmpo"})
    told = computed(OFF, {"type": "gmpo"}, correction={"mode": "mask", "high": 0.1}, off_policy_mask_threshold=0.1)
    assert told == plain


# --- off-policy mask -------------------------------------------------------------------------------------------------


def test_the_off_policy_mask_drops_what_the_engine_found_likelier_and_was_bad() -> None:
    """Means of inference − logp: −ln 2 and ln 2; only completion 1 is above 0.5, and its advantage is below 0."""
    output, grads = computed(OFF, off_policy_mask_threshold=0.5)
    assert grads == pytest.approx([-1 / 3, -1 / 3, 0])
    assert metric(output, "off_policy_fraction") == pytest.approx(1 / 3)
    assert computed(OFF, off_policy_mask_threshold=0.7)[1] == pytest.approx([-1 / 3, -1 / 3, 1 / 3])
    turned = inputs_of(inference=(-1 + LN2, -1 + LN2, -1 + LN2), advantages=(1.0, 0.0))
    assert computed(turned, off_policy_mask_threshold=0.5)[1] == pytest.approx([-1 / 3, -1 / 3, 0])


@pytest.mark.parametrize(("tokens", "divisor"), [("count", 3), ("leave", 2)])
def test_dropped_completions_may_leave_the_normaliser_of_bnpo(tokens: str, divisor: int) -> None:
    """TRL counts them, ms-swift does not."""
    _, grads = computed(OFF, {"type": "bnpo", "compat": {"off_policy_tokens": tokens}}, off_policy_mask_threshold=0.5)
    assert grads == pytest.approx([-1 / divisor, -1 / divisor, 0])


# --- entropy ---------------------------------------------------------------------------------------------------------


def test_only_tokens_of_high_entropy_carry_the_loss() -> None:
    """The median of 0.1, 0.5, 0.9 is 0.5, and what reaches it stays."""
    output, grads = computed(inputs_of(entropy=(0.1, 0.5, 0.9)), top_entropy_quantile=0.5)
    assert grads == pytest.approx([0, -1 / 3, 1 / 3])
    assert metric(output, "low_entropy_fraction") == pytest.approx(1 / 3)


def test_gmpo_takes_its_mean_over_tokens_of_high_entropy() -> None:
    """Of the first completion the second token alone: e^0.2 instead of e^((0.1 + 0.2)/2)."""
    inputs = inputs_of(entropy=(0.1, 0.5, 0.9), old_logprobs=(-1.1, -1.2, -1.0))
    output, grads = computed(inputs, {"type": "gmpo"}, top_entropy_quantile=0.5)
    assert output.loss.item() == pytest.approx((-math.exp(0.2) + 1) / 2)
    assert grads == pytest.approx([0, -math.exp(0.2) / 2, 0.5])


MICRO_BATCHES = {"entropy_average": "micro_batch_tokens"}


def entropy_gradient(compat: dict[str, str], **keys: Any) -> tuple[float, list[float], LossOutput]:
    """Loss, gradient by token's entropy, and output, where nothing but the entropy makes a loss."""
    inputs = inputs_of(advantages=(0.0, 0.0), entropy=(0.1, 0.5, 0.9), num_micro_batches=2, loss_tokens=12)
    assert inputs.entropy_T is not None
    inputs.entropy_T.requires_grad_()
    objective = ObjectiveConfig(loss={"type": "luspo", "compat": compat}, entropy_coef=0.6, **keys)
    output = compute_loss(inputs, objective)
    (grad_T,) = torch.autograd.grad(output.loss, inputs.entropy_T)
    return output.loss.item(), grad_T.tolist(), output


@pytest.mark.parametrize(
    ("compat", "keys", "loss", "grads"),
    [
        # three of the step's twelve tokens, whatever the average of the policy loss is
        ({}, {}, -0.6 * 1.5 / 12, [-0.05, -0.05, -0.05]),
        # a mean of 0.5 in one of two micro-batches
        (MICRO_BATCHES, {}, -0.6 * 0.5 / 2, [-0.1, -0.1, -0.1]),
        # the mean of the two that are kept, 0.7
        ({}, {"top_entropy_quantile": 0.5}, -0.6 * 0.7 * 3 / 12, [0, -0.075, -0.075]),
        (MICRO_BATCHES, {"top_entropy_quantile": 0.5}, -0.6 * 0.7 / 2, [0, -0.15, -0.15]),
    ],
)
def test_the_entropy_bonus_is_a_mean_over_tokens(
    compat: dict[str, str], keys: dict[str, Any], loss: float, grads: list[float]
) -> None:
    """−coefficient × mean entropy."""
    found, gradient, output = entropy_gradient(compat, **keys)
    assert found == pytest.approx(loss)
    assert gradient == pytest.approx(grads)
    assert metric(output, "entropy_regularised") == pytest.approx(0.7 if "top_entropy_quantile" in keys else 0.5)


@pytest.mark.parametrize(
    ("modifiers", "message"),
    [
        ({"top_entropy_quantile": 0.5}, "entropy_T: top_entropy_quantile"),
        ({"entropy_coef": 0.5}, "entropy_T: entropy_coef"),
        ({"reference": {"beta": 0.1}}, "reference_logprobs_T: objective.reference"),
        ({"reference": {"beta": 0.1, "place": "reward"}}, "reference_logprobs_T: objective.reference"),
    ],
)
def test_what_a_switch_needs_must_be_there(modifiers: dict[str, Any], message: str) -> None:
    """Nothing is left out silently."""
    with pytest.raises(ValueError, match=message):
        computed(inputs_of(), **modifiers)


# --- reference KL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "kl", "slope"), [("k1", LN2, 1), ("k2", LN2**2 / 2, LN2), ("k3", LN2 - 0.5, 0.5)]
)
def test_the_estimators_of_the_kl(estimator: str, kl: float, slope: float) -> None:
    """At d = ln 2: k3 is ½ − 1 + ln 2, with slope 1 − ½."""
    inputs = inputs_of(advantages=(0.0, 0.0), reference_logprobs=(-1 - LN2, -1 - LN2, -1 - LN2))
    output, grads = computed(inputs, reference={"beta": 0.3, "estimator": estimator})
    assert output.loss.item() == pytest.approx(0.3 * kl)
    assert grads == pytest.approx([0.1 * slope] * 3)
    assert metric(output, "reference_kl") == pytest.approx(kl)


def test_bias_correction_multiplies_by_the_ratio_and_keeps_its_gradient() -> None:
    """Ratio 2, k1 = ln 2: d(2 · ln 2) = 2 · ln 2 + 2."""
    inputs = inputs_of(
        advantages=(0.0, 0.0), old_logprobs=(-1 - LN2,) * 3, reference_logprobs=(-1 - LN2, -1 - LN2, -1 - LN2)
    )
    reference = {"beta": 0.3, "estimator": "k1", "bias_correction": True}
    output, grads = computed(inputs, reference=reference)
    assert output.loss.item() == pytest.approx(0.3 * 2 * LN2)
    assert grads == pytest.approx([0.1 * (2 * LN2 + 2)] * 3)
    assert computed(inputs, {"type": "gmpo"}, reference=reference)[0].loss.item() == pytest.approx(0.3 * LN2)


def test_the_kl_of_a_token_may_be_cut() -> None:
    """k3 at d = −3 is e³ − 4 = 16.1: cut at 10, and without gradient."""
    inputs = inputs_of(advantages=(0.0, 0.0), reference_logprobs=(2.0, -1.0, -1.0))
    output, grads = computed(inputs, reference={"beta": 0.3, "max_kl": 10.0})
    assert output.loss.item() == pytest.approx(1.0)
    assert grads == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("modifiers", "kl"), [("escape", [0.1, 0.1, 0.1]), ("apply", [0.0, 0.0, 0.05])])
def test_the_kl_escapes_correction_and_mask_or_not(modifiers: str, kl: list[float]) -> None:
    """k1 has slope 1; the correction drops completion 0 and halves completion 1 (weights 2, 2, ½, bound 1.5)."""
    further = {"reference_logprobs": (-2.0, -2.0, -2.0), "inference": (-1 - LN2, -1 - LN2, -1 + LN2)}
    reference = {"beta": 0.3, "estimator": "k1", "switches": modifiers}
    correction = {"mode": "mask", "high": 1.5}
    _, grads = computed(inputs_of(advantages=(1.0, 0.0), **further), reference=reference, correction=correction)
    assert grads == pytest.approx(kl)
    inputs = inputs_of(advantages=(0.0, -1.0), **further)
    _, grads = computed(inputs, reference=reference, off_policy_mask_threshold=0.5)
    assert grads == pytest.approx([0.1, 0.1, 0.1 if modifiers == "escape" else 0.0])


def test_the_kl_in_the_reward_is_of_this_and_all_later_tokens() -> None:
    """KL 1, 2 and 4 times β = 0.1, in completions of two tokens and one; that is all the loss has of it."""
    inputs = inputs_of(old_logprobs=(-1.0, -2.0, -3.0), reference_logprobs=(-2.0, -4.0, -7.0))
    objective = ObjectiveConfig(loss=DAPO, reference={"beta": 0.1, "estimator": "k1", "place": "reward"})
    penalised_T = kl_in_reward(inputs, objective)
    assert penalised_T.tolist() == pytest.approx([1 - 0.3, 1 - 0.2, -1 - 0.4])
    by_hand = compute_loss(replace(inputs, advantages_T=penalised_T), ObjectiveConfig(loss=DAPO))
    assert compute_loss(inputs, objective).loss.item() == by_hand.loss.item()


def test_the_kl_in_the_reward_is_discounted_as_the_reward_is() -> None:
    """KLs .2 and .4, then .8 of another completion; γλ = ½: .2 + ½·.4 = .4, .4 and .8, each × β = .1."""
    inputs = replace(inputs_of(reference_logprobs=(-1.2, -1.4, -1.8)), reward_discount=0.5)
    objective = ObjectiveConfig(loss=DAPO, reference={"beta": 0.1, "estimator": "k1", "place": "reward"})
    penalised_T = kl_in_reward(inputs, objective)
    assert penalised_T.tolist() == pytest.approx([1 - 0.04, 1 - 0.04, -1 - 0.08])


def test_discounted_sums_are_those_of_the_recursion() -> None:
    """Three completions of 7, 1 and 5 tokens, at several discounts, against the loop that defines them."""
    values = [0.5 * k - 3 for k in range(13)]
    completion_of_T = torch.tensor([0] * 7 + [1] + [2] * 5)
    for discount in (0.0, 0.873, 1.0):
        expected, latest = [], 0.0
        for t in reversed(range(13)):
            ends = t == 12 or completion_of_T[t] != completion_of_T[t + 1]
            latest = values[t] + (0.0 if ends else discount * latest)
            expected.append(latest)
        found_T = discounted_sums(torch.tensor(values, dtype=torch.float64), completion_of_T, discount)
        assert found_T.tolist() == pytest.approx(expected[::-1], abs=1e-12)


def test_a_token_is_passed_over_that_is_not_in_the_loss() -> None:
    """Three tokens, the middle one a tool's: the last one's KL counts ½ at the first, as if they were neighbours."""
    inputs = replace(
        inputs_of(reference_logprobs=(-1.2, -1.4, -1.8)),
        completion_of_T=torch.zeros(3, dtype=torch.int64),
        num_completions=1,
        loss_mask_T=torch.tensor([True, False, True]),
        reward_discount=0.5,
    )
    objective = ObjectiveConfig(loss=DAPO, reference={"beta": 0.1, "estimator": "k1", "place": "reward"})
    found = kl_in_reward(inputs, objective).tolist()
    assert (found[0], found[2]) == pytest.approx((1 - 0.1 * (0.2 + 0.5 * 0.8), -1 - 0.08))


# --- missing logprobs of the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({"mode": "truncate", "high": 9.0}, [2.0, 1.0, 0.5]),
        ({"mode": "truncate", "level": "sequence", "high": 9.0}, [2.0, 2.0, 0.5]),
        ({"mode": "mask", "level": "sequence", "high": 1.5}, [0.0, 0.0, 0.5]),
    ],
)
def test_a_missing_logprob_of_the_engine_corrects_nothing(correction: dict[str, Any], weights: list[float]) -> None:
    """Differences ln 2, none and −ln 2: the second adds 0, also to the sum of its completion; old is not logp here."""
    inputs = inputs_of(
        logprobs=(-1.0, -1.5, -1.0), old_logprobs=(-1.0, -1.0, -1.0), inference=(-1 - LN2, math.nan, -1 + LN2)
    )
    objective = ObjectiveConfig(loss=DAPO, correction=correction)
    found_T = correction_weights(inputs.prepared(), objective.correction, {})
    assert found_T.tolist() == pytest.approx(weights)
    output, grad = computed(inputs, correction=correction)
    assert torch.isfinite(output.loss)
    assert all(math.isfinite(value) for value in [*grad, *map(float, output.sums.values())])


def test_a_missing_logprob_of_the_engine_is_no_sign_of_lag() -> None:
    """Means of inference − logp of a completion with A < 0: (.4 + 0) ÷ 2 = .2 with the second token missing."""
    inputs = inputs_of(inference=(-0.6, math.nan, -1.0), advantages=(-1.0, 1.0))
    assert metric(computed(inputs, off_policy_mask_threshold=0.25)[0], "off_policy_fraction") == 0
    assert metric(computed(inputs, off_policy_mask_threshold=0.15)[0], "off_policy_fraction") == pytest.approx(2 / 3)


def test_a_loss_that_weighs_from_the_engine_has_ratio_one_where_the_engine_says_nothing() -> None:
    """aipo, ratio exp(.5) and 1: the gradient of the second is −A ÷ 3 tokens."""
    inputs = inputs_of(inference=(-1.5, math.nan, -1.0), advantages=(1.0, 1.0))
    _, grad = computed(inputs, {"type": "aipo"})
    assert grad == pytest.approx([-math.exp(0.5) / 3, -1 / 3, -1 / 3])


def test_the_kl_in_the_reward_may_be_the_engines_and_cut() -> None:
    """AReaL's: inference − reference = 0.5, 12 and 0, cut at 10."""
    inputs = inputs_of(inference=(-1.0, -1.0, -1.0), old_logprobs=(0.0,) * 3, reference_logprobs=(-1.5, -13.0, -1.0))
    keys = {"beta": 0.1, "estimator": "k1", "place": "reward", "old_logprobs": "inference", "max_kl": 10.0}
    found = kl_in_reward(inputs, ObjectiveConfig(loss=DAPO, reference=keys))
    assert found.tolist() == pytest.approx([1 - 1.05, 1 - 1.0, -1.0])
