"""What a teacher adds to the rewards, by hand: joint distillation, RLSD, SDAR."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from actors.algorithms.losses import LossInputs, compute_loss
from actors.algorithms.losses.distillation import at_step, reweighted, rlsd_lambda
from schemas.config.distillation import RlsdConfig
from schemas.config.objective import ObjectiveConfig

DAPO = {"type": "dapo", "old_logprobs": "inference"}


def inputs_of(**changes: Any) -> LossInputs:
    """Tokens of probabilities .5, .4, .2 and .5, the last outside the loss; the teacher's are .6, .2, .2 and 0."""
    return replace(
        LossInputs(
            logprobs_T=torch.tensor([0.5, 0.4, 0.2, 0.5], dtype=torch.float64).log().requires_grad_(),
            inference_logprobs_T=torch.tensor([0.5, 0.5, 0.2, 0.5], dtype=torch.float64).log(),
            teacher_logprobs_T=torch.tensor([0.6, 0.2, 0.2, 1e-30], dtype=torch.float64).log(),
            advantages_T=torch.tensor([1.0, 1.0, -1.0, 9.0], dtype=torch.float64),
            loss_mask_T=torch.tensor([True, True, True, False]),
            completion_of_T=torch.tensor([0, 0, 1, 1]),
            num_completions=2,
            loss_tokens=6,
        ),
        **changes,
    )


def computed(inputs: LossInputs, distillation: dict[str, Any] | None, loss: Any = DAPO) -> tuple[float, list[float]]:
    """Loss and gradient."""
    output = compute_loss(inputs, ObjectiveConfig(loss=loss, distillation=distillation))
    (grad_T,) = torch.autograd.grad(output.loss, inputs.logprobs_T)
    return output.loss.item(), grad_T.tolist()


def test_joint_distillation_adds_the_reverse_kl_to_a_weighted_loss() -> None:
    """Ratios 1, .8 and 1: −(1 + .8 − 1) ÷ 6 without the teacher; logp − teacher is ln(5/6), ln 2 and 0."""
    joint = {"type": "joint", "rl_loss_weight": 0.5, "distill_loss_weight": 0.3}
    loss, grad = computed(inputs_of(), joint)
    assert loss == pytest.approx(0.5 * -0.8 / 6 + 0.3 * (math.log(5 / 6) + math.log(2)) / 6)
    assert grad == pytest.approx([(-0.5 + 0.3) / 6, (-0.4 + 0.3) / 6, (0.5 + 0.3) / 6, 0.0])


@pytest.mark.parametrize(("old", "second"), [("inference", 0.8), ("step_start", 1.0)])
def test_a_teacher_alone_rewards_tokens_weighted_with_their_ratio(old: str, second: float) -> None:
    """rl_loss_weight 0: −ratio·(teacher − logp), its ratio to the policy that the loss names."""
    joint = {"type": "joint", "rl_loss_weight": 0.0, "distill_loss_weight": 0.3}
    loss, grad = computed(inputs_of(), joint, {"type": "dapo", "old_logprobs": old})
    assert loss == pytest.approx(-0.3 * (math.log(1.2) + second * math.log(0.5)) / 6)
    assert grad == pytest.approx([-0.3 * math.log(1.2) / 6, -0.3 * second * math.log(0.5) / 6, 0.0, 0.0])


def test_under_m2po_the_penalty_is_of_the_tokens_that_stay() -> None:
    """Squares 0, (ln 1.25)² = .0498 and 0: the second goes, so means over two tokens, × 3 of the step's 6."""
    loss = {"type": "m2po", "m2_threshold": 0.01}
    without, _ = computed(inputs_of(), None, loss)
    found, _ = computed(inputs_of(), {"type": "joint", "distill_loss_weight": 0.3}, loss)
    assert found - without == pytest.approx(0.3 * math.log(5 / 6) / 2 * 3 / 6)


def test_sdar_follows_the_teacher_where_it_is_surer() -> None:
    """Gates sigmoid(2 ln 1.2) = 1.44/2.44, sigmoid(−2 ln 2) = 1/5 and ½; over the three tokens of one of two rows."""
    sdar = {"type": "sdar", "sdar_loss_coef": 0.1, "sdar_gate_beta": 2.0}
    inputs = inputs_of(num_micro_batches=2)
    (without, plain), (loss, grad) = computed(inputs, None), computed(inputs, sdar)
    gates = [1.44 / 2.44, 0.2, 0.5]
    assert loss - without == pytest.approx(0.1 * (gates[0] * math.log(1.2) + gates[1] * math.log(0.5)) / 3 / 2)
    expected = [-0.1 * gate / 3 / 2 for gate in gates] + [0.0]
    assert [after - before for after, before in zip(grad, plain, strict=True)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # exp of ±(teacher − old): 1.2 and .5 with A > 0; 1 with A < 0
        ({"rlsd_lambda": 1.0, "rlsd_reweight_clip_range": 0.9}, [1.2, 0.5, -1.0]),
        ({"rlsd_lambda": 1.0, "rlsd_reweight_clip_range": 0.1}, [1.1, 0.9, -1.0]),
        ({"rlsd_lambda": 0.5, "rlsd_reweight_clip_range": 0.9}, [1.1, 0.75, -1.0]),
        ({"rlsd_lambda": 0.0}, [1.0, 1.0, -1.0]),
        ({"rlsd_lambda": 1.0, "rlsd_negative_only": True}, [1.0, 1.0, -1.0]),
    ],
)
def test_rlsd_shares_an_advantage_out_among_tokens(keys: dict[str, Any], expected: list[float]) -> None:
    """The first update of a step: old is the trainer's own."""
    found = reweighted(inputs_of(), RlsdConfig(**keys)).tolist()
    assert [*found[:1], *found[2:3]] == pytest.approx([*expected[:1], *expected[2:]])
    assert found[1] == pytest.approx(expected[1])


def test_rlsd_turns_with_the_sign_of_the_advantage() -> None:
    """Teacher ÷ old of 1.2 and ½ with A = −1: weights 1 ÷ 1.2 and 2; the reward's sign stays."""
    inputs = inputs_of(advantages_T=torch.tensor([-1.0, -1.0, 1.0, 0.0], dtype=torch.float64))
    config = RlsdConfig(rlsd_lambda=1.0, rlsd_reweight_clip_range=5.0, rlsd_negative_only=True)
    assert reweighted(inputs, config).tolist()[:3] == pytest.approx([-1 / 1.2, -2.0, 1.0])
    old_T = torch.tensor([0.3, 0.4, 0.2, 0.5], dtype=torch.float64).log()
    moved = replace(inputs, old_logprobs_T=old_T)
    assert reweighted(moved, config).tolist()[0] == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("warmup", "decay", "expected"),
    [(0, 0, [0.5] * 7), (2, 0, [0.0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]), (2, 4, [0.0, 0.25, 0.5, 0.375, 0.25, 0.125, 0])],
)
def test_rlsds_lambda_rises_and_falls(warmup: int, decay: int, expected: list[float]) -> None:
    """Of steps 1 to 7, to .5."""
    config = RlsdConfig(rlsd_lambda_warmup_steps=warmup, rlsd_lambda_decay_steps=decay)
    objective = ObjectiveConfig(distillation=config)
    assert [rlsd_lambda(step, config) for step in range(1, 8)] == pytest.approx(expected)
    found = [at_step(objective, step).distillation for step in (1, 7)]
    assert [one.rlsd_lambda for one in found if isinstance(one, RlsdConfig)] == [expected[0], expected[6]]
    assert at_step(ObjectiveConfig(), 3) == ObjectiveConfig()


@pytest.mark.parametrize("type_", ["joint", "rlsd", "sdar"])
def test_a_teacher_is_needed(type_: str) -> None:
    """In words that say which key is missing."""
    with pytest.raises(ValueError, match=r"teacher_logprobs: .*; set trainer\.teacher"):
        computed(inputs_of(teacher_logprobs_T=None), {"type": type_})


def test_what_makes_no_sense_together_is_refused() -> None:
    """A custom loss has no modifiers, and ref_kl no advantage that RLSD could change."""
    with pytest.raises(ValidationError, match="distillation: acts on no loss of type custom"):
        ObjectiveConfig(loss={"type": "custom", "path": "mine.py:loss"}, distillation={"type": "sdar"})
    with pytest.raises(ValidationError, match=r"distillation: rlsd changes the advantage, which loss\.type ref_kl"):
        ObjectiveConfig(loss={"type": "ref_kl"}, distillation={"type": "rlsd"})
