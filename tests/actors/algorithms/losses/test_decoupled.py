"""AReaL's decoupled loss and its rejection sampling: by hand, and against a reference in plain Python."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs, compute_loss
from actors.algorithms.losses.decoupled import proximal
from actors.algorithms.losses.metrics import metrics_of
from schemas.config.losses import DecoupledLossConfig, RejectionConfig
from schemas.config.objective import ObjectiveConfig
from tests.actors.algorithms.losses.around_engine import computed, counts, inputs_of, random_inputs


def logs(*probabilities: float) -> torch.Tensor:
    """As logprobs."""
    return torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64)


def hand_example(**changes: Any) -> LossInputs:
    """Ratios 1.1, 1.5, 0.5 of trainer to proximal; weights 2, 1 and 6 of proximal to engine; advantages 1, 1, −1."""
    inputs = inputs_of([0.44, 0.6, 0.3], [0.2, 0.4, 0.1], [1, 1, -1], old_logprobs_T=logs(0.4, 0.4, 0.6))
    return replace(inputs, **changes)


def rejecting(**keys: Any) -> DecoupledLossConfig:
    """With rejection sampling."""
    return DecoupledLossConfig(rejection_sampling=RejectionConfig(**keys))


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_without_rejection_there_is_no_behaviour_weight() -> None:
    """(−1.1 − 1.2 + 0.8) ÷ 3: clipped at 1.2 and, for the negative advantage, at 0.8; the engine has no part in it."""
    output, grad = computed(hand_example(), DecoupledLossConfig())
    assert output.loss.item() == pytest.approx(-1.5 / 3)
    assert grad == pytest.approx([-1.1 / 3, 0, 0])
    assert counts(output, "clipped_low", "clipped_high") == [1, 1]
    elsewhere = hand_example(inference_logprobs_T=logs(0.9, 0.01, 0.5))
    assert computed(elsewhere, DecoupledLossConfig())[0].loss.item() == output.loss.item()


def test_rejection_weighs_what_it_keeps_and_keeps_the_normaliser() -> None:
    """2 · −1.1 and 1 · −1.2; the third token, of weight 6 > 5, costs nothing and is still one of the three."""
    output, grad = computed(hand_example(), rejecting())
    assert output.loss.item() == pytest.approx(-3.4 / 3)
    assert grad == pytest.approx([-2.2 / 3, 0, 0])
    metrics = metrics_of({name: float(value) for name, value in output.sums.items()})
    assert (metrics["rejected_fraction"], metrics["masked_fraction"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert metrics["behaviour_weight"] == pytest.approx(1.5)


def test_a_lower_bound_rejects_too() -> None:
    """Weights 2 and 6 are above 1.5 and below 7; the second token's is 1."""
    output, grad = computed(hand_example(), rejecting(lower=1.5, upper=7.0))
    assert output.loss.item() == pytest.approx((-2.2 + 6 * 0.8) / 3)
    assert grad == pytest.approx([-2.2 / 3, 0, 0])


def test_clamping_keeps_every_token() -> None:
    """Weights 2, 1 and 5: (−2.2 − 1.2 + 5 · 0.8) ÷ 3."""
    output, _ = computed(hand_example(), rejecting(action="clamp"))
    assert output.loss.item() == pytest.approx(0.6 / 3)
    assert counts(output, "rejected_tokens", "masked_tokens", "kept_tokens") == [1, 0, 3]


def test_a_completion_is_judged_and_weighted_by_its_geometric_mean() -> None:
    """(2 · 1 · 6)^⅓ = 2.2894285 for all three tokens: × −1.5 ÷ 3; just below that bound the completion is gone."""
    output, _ = computed(hand_example(), rejecting(level="sequence"))
    assert output.loss.item() == pytest.approx(2.2894285 * -1.5 / 3, abs=1e-7)
    assert computed(hand_example(), rejecting(level="sequence", upper=2.289))[0].loss.item() == 0.0


def test_a_completion_judged_by_its_product_is_weighted_by_its_geometric_mean() -> None:
    """2 · 1 · 6 = 12: above 11 all is dropped, below 13 the weight is 2.2894285, not 12; clamped it stays so."""
    assert computed(hand_example(), rejecting(level="sequence", agg="sum", upper=11.0))[0].loss.item() == 0.0
    for keys in ({"upper": 13.0}, {"upper": 11.0, "action": "clamp"}):
        output, _ = computed(hand_example(), rejecting(level="sequence", agg="sum", **keys))
        assert output.loss.item() == pytest.approx(2.2894285 * -1.5 / 3, abs=1e-7)


def test_a_completion_judged_by_a_kl_keeps_a_weight_per_token() -> None:
    """The mean of d²/2 is (ln 2² + ln 6²) ÷ 6 = 0.6151500; the weights stay 2, 1 and 6."""
    output, _ = computed(hand_example(), rejecting(level="sequence", metric="kl_k2", upper=0.6152))
    assert output.loss.item() == pytest.approx((-2.2 - 1.2 + 6 * 0.8) / 3)
    assert computed(hand_example(), rejecting(level="sequence", metric="kl_k2", upper=0.6151))[0].loss.item() == 0.0


def test_a_sequence_ratio_is_of_what_rejection_keeps() -> None:
    """The third token gone, √(1.1 · 1.5) = 1.2845233, clipped at 1.2, for both: (2 + 1) · −1.2 ÷ 3."""
    config = DecoupledLossConfig(importance_sampling_level="sequence", rejection_sampling=RejectionConfig())
    assert computed(hand_example(), config)[0].loss.item() == pytest.approx(-3.6 / 3)
    wide = config.model_copy(update={"epsilon": 0.9})
    assert computed(hand_example(), wide)[0].loss.item() == pytest.approx(3 * -1.2845233 / 3, abs=1e-7)


def test_the_dual_clip_bounds_a_negative_advantages_loss() -> None:
    """A ratio of 9 costs 9 · 1, or 3 · 1 with a dual clip of 3 and without gradient; a positive one is untouched."""
    inputs = inputs_of([0.9, 0.9], [0.1, 0.1], [-1, 1], old_logprobs_T=logs(0.1, 0.1))
    plain, dual = (computed(inputs, DecoupledLossConfig(dual_clip=c)) for c in (None, 3.0))
    assert plain[0].loss.item() == pytest.approx((9 - 1.2) / 2)
    assert plain[1] == pytest.approx([9 / 2, 0])
    assert dual[0].loss.item() == pytest.approx((3 - 1.2) / 2)
    assert dual[1] == pytest.approx([0, 0])


def test_loglinear_takes_proximal_logprobs_by_the_age_of_a_token() -> None:
    """Four versions old: three quarters of the way to the trainer; one or none: the engine's; prox carries no grad."""
    inputs = inputs_of([0.5] * 4, [0.25] * 4, [1] * 4, versions_T=torch.tensor([2, 4, 5, 6]), version=6)
    found_T = proximal(inputs, "loglinear")
    assert found_T.exp().tolist() == pytest.approx([0.25 * 2**0.75, 0.25 * 2**0.5, 0.25, 0.25])
    assert not found_T.requires_grad
    output, _ = computed(inputs, DecoupledLossConfig(prox_logp_method="loglinear", epsilon=9.0))
    assert output.loss.item() == pytest.approx(-(2**0.25 + 2**0.5 + 2 + 2) / 4)


def test_loglinear_without_versions_is_an_error() -> None:
    """Not the engine's logprobs in silence."""
    with pytest.raises(ValueError, match="prox_logp_method loglinear needs the version"):
        computed(hand_example(), DecoupledLossConfig(prox_logp_method="loglinear"))


def test_recomputed_proximal_logprobs_are_those_of_the_start_of_the_step() -> None:
    """The first update has none of its own: its ratios are 1."""
    output, grad = computed(hand_example(old_logprobs_T=None), DecoupledLossConfig())
    assert output.loss.item() == pytest.approx(-1 / 3)
    assert grad == pytest.approx([-1 / 3, -1 / 3, 1 / 3])


def test_the_proximal_kl_is_zero_where_the_engine_has_the_proximal_logprobs() -> None:
    """(2 − ln 2 − 1) + 0 + (6 − ln 6 − 1), the k3 of the way from engine to proximal."""
    output, _ = computed(hand_example(), DecoupledLossConfig())
    assert output.sums["proximal_kl"].item() == pytest.approx(1 - math.log(2) + 5 - math.log(6))


# --- against the reference -------------------------------------------------------------------------------------------

METRICS = {
    "ratio": math.exp,
    "kl_k1": lambda d: d,
    "kl_k2": lambda d: d * d / 2,
    "kl_k3": lambda d: math.exp(-d) - 1 + d,
}
AGGREGATES = {"sum": sum, "mean": lambda xs: sum(xs) / len(xs), "max": max}


def outside(d: float, of_completion: list[float], c: RejectionConfig) -> bool:
    """Whether a token of log weight d, in a completion of such, is too far."""
    metric = METRICS[c.metric]
    if c.level == "token":
        value = metric(d)
    elif c.metric == "ratio":
        value = math.exp(AGGREGATES[c.agg](of_completion))
    else:
        value = AGGREGATES[c.agg]([metric(x) for x in of_completion])
    return value > c.upper or (c.lower is not None and value < c.lower)


def behaviour(d: float, of_completion: list[float], c: RejectionConfig | None) -> tuple[bool, float]:
    """(is it kept, its weight)."""
    if c is None:
        return True, 1.0
    too_far = outside(d, of_completion, c)
    whole = c.level == "sequence" and c.metric == "ratio"
    weight = math.exp(sum(of_completion) / len(of_completion) if whole else d)
    if c.action == "clamp":
        return True, min(max(weight, c.lower or 0), c.upper) if too_far else weight
    return not too_far, weight


def reference(inputs: LossInputs, c: DecoupledLossConfig, prox: list[float]) -> tuple[float, list[float]]:
    """(loss, gradient by token), completion by completion."""
    logp, q, advantages = (x.tolist() for x in (inputs.logprobs_T, inputs.inference_logprobs_T, inputs.advantages_T))
    loss, grads = 0.0, [0.0] * len(logp)
    for b in range(inputs.num_completions):
        mine = [t for t in range(len(logp)) if inputs.completion_of_T[t] == b and inputs.loss_mask_T[t]]
        judged = {t: behaviour(prox[t] - q[t], [prox[i] - q[i] for i in mine], c.rejection_sampling) for t in mine}
        kept = [t for t in mine if judged[t][0]]
        for t in kept:
            others = kept if c.importance_sampling_level == "sequence" else [t]
            ratio = math.exp(sum(logp[i] - prox[i] for i in others) / len(others))
            a = sum(advantages[i] for i in others) / len(others)
            plain, clipped = -a * ratio, -a * min(max(ratio, 1 - c.epsilon), 1 + c.upper)
            value, slope = (plain, plain) if plain >= clipped else (clipped, 0.0)
            if c.dual_clip is not None and value > c.dual_clip * abs(a):
                value, slope = c.dual_clip * abs(a), 0.0
            loss += judged[t][1] * value / inputs.loss_tokens
            for i in others:
                grads[i] += judged[t][1] * slope / len(others) / inputs.loss_tokens
    return loss, grads


REJECTIONS = [
    None,
    RejectionConfig(upper=1.8, lower=0.6),
    RejectionConfig(upper=1.8, lower=0.6, action="clamp"),
    RejectionConfig(metric="kl_k1", upper=0.4, lower=-0.3),
    RejectionConfig(metric="kl_k3", upper=0.2),
    RejectionConfig(level="sequence", upper=1.2, lower=0.8),
    RejectionConfig(level="sequence", upper=1.2, lower=0.8, action="clamp"),
    RejectionConfig(level="sequence", agg="sum", upper=1.5),
    RejectionConfig(level="sequence", agg="max", upper=1.7, action="clamp"),
    RejectionConfig(level="sequence", metric="kl_k2", upper=0.2),
    RejectionConfig(level="sequence", metric="kl_k3", agg="max", upper=0.5),
    RejectionConfig(level="sequence", metric="kl_k1", agg="sum", upper=0.3),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rejection", REJECTIONS, ids=repr)
def test_loss_and_gradient_are_those_of_the_reference(rejection: RejectionConfig | None, level: Any, seed: int) -> None:
    """In float64; some of the tokens are rejected, not all."""
    inputs = random_inputs(seed)
    config = DecoupledLossConfig(
        epsilon_high=0.3, dual_clip=1.5, importance_sampling_level=level, rejection_sampling=rejection
    )
    output, grad = computed(inputs, config)
    loss, grads = reference(inputs, config, inputs.old_T.tolist())
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert grad == pytest.approx(grads, abs=1e-12)
    assert rejection is None or 0 < int(output.sums["rejected_tokens"]) < int(output.sums["tokens"])


@pytest.mark.parametrize("seed", range(2))
def test_loglinear_is_that_of_the_reference(seed: int) -> None:
    """a = clamp((v − 1 − v_q) ÷ (v − v_q), 0, 1), 0 for a token of the newest weights (ALGORITHMS 1.2)."""
    inputs = random_inputs(seed)
    config = DecoupledLossConfig(prox_logp_method="loglinear", rejection_sampling=RejectionConfig(upper=1.3))
    prox = []
    columns = (inputs.logprobs_T, inputs.inference_logprobs_T, inputs.versions_T)
    for logp, q, v_q in zip(*(column.tolist() for column in columns), strict=True):
        age = inputs.version - v_q
        prox.append(q + (min(max((age - 1) / age, 0), 1) if age > 0 else 0) * (logp - q))
    output, grad = computed(inputs, config)
    loss, grads = reference(inputs, config, prox)
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert grad == pytest.approx(grads, abs=1e-12)


def test_the_gradient_is_that_of_the_value() -> None:
    """By finite differences, with weights and a ratio per completion."""
    inputs = random_inputs(4)
    config = DecoupledLossConfig(importance_sampling_level="sequence", rejection_sampling=RejectionConfig(upper=1.8))
    objective = ObjectiveConfig(loss=config)
    assert torch.autograd.gradcheck(
        lambda logprobs_T: compute_loss(replace(inputs, logprobs_T=logprobs_T), objective).loss, inputs.logprobs_T
    )
