"""Distillation next to rewards (`trainer.distillation`): joint distillation (AReaL), RLSD and SDAR (ms-swift)."""

import torch
from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs
from actors.algorithms.losses.ratios import ratio_of
from actors.algorithms.losses.teacher import teacher_gap, teacher_sums
from schemas.config.distillation import DistillationConfig, JointDistillationConfig, RlsdConfig, SdarConfig
from schemas.config.losses import RatioLossConfig
from schemas.config.objective import ObjectiveConfig


def reweighted(inputs: LossInputs, config: DistillationConfig | None) -> Tensor:
    """Return advantages × RLSD's weights, (T,): (1 − λ) + λ·clip(exp(sign(A)·(teacher − old)), 1 − ε, 1 + ε).

    A token that the teacher finds likelier gets more of a positive advantage and less of a negative one; signs never
    change. Other types of distillation leave the advantages as they are. Source: ms-swift 4.6,
    `swift/rl_core/advantage.py` (apply_rlsd_reweight).

    Raises:
        ValueError: RLSD without a teacher's logprobs.
    """
    if not isinstance(config, RlsdConfig):
        return inputs.advantages_T
    if inputs.teacher_logprobs_T is None:
        raise ValueError("teacher_logprobs: trainer.distillation reads a teacher's; set trainer.teacher")
    advantages_T = inputs.advantages_T
    gap_T = inputs.masked(inputs.teacher_logprobs_T - inputs.old_T)
    low, high = 1 - config.rlsd_reweight_clip_range, 1 + config.rlsd_reweight_clip_range
    # exp(−gap) for a negative advantage: a token that the teacher likes is punished less
    clipped_T = ratio_of(advantages_T.sign() * gap_T).clamp(low, high)
    weight_T = (1 - config.rlsd_lambda) + config.rlsd_lambda * clipped_T
    return advantages_T * (weight_T.where(advantages_T < 0, 1) if config.rlsd_negative_only else weight_T)


def rlsd_lambda(step: int, config: RlsdConfig) -> float:
    """Return λ of step 1, 2, …: linear from 0 in step 1 to rlsd_lambda after the warm-up, then linear to 0.

    Without decay steps λ stays at rlsd_lambda. Source: ms-swift 4.6, `swift/rlhf_trainers/grpo_trainer.py`
    (_rlsd_effective_lambda).
    """
    done, warmup, decay = step - 1, config.rlsd_lambda_warmup_steps, config.rlsd_lambda_decay_steps
    if done < warmup:
        return config.rlsd_lambda * done / warmup
    return config.rlsd_lambda * max(1 - (done - warmup) / decay, 0.0) if decay else config.rlsd_lambda


def at_step(objective: ObjectiveConfig, step: int) -> ObjectiveConfig:
    """Return the objective with RLSD's λ of this step; unchanged for other types of distillation."""
    config = objective.distillation
    if not isinstance(config, RlsdConfig):
        return objective
    found = config.model_copy(update={"rlsd_lambda": rlsd_lambda(step, config)})
    return objective.model_copy(update={"distillation": found})


def distilled(
    inputs: LossInputs, objective: ObjectiveConfig, loss: Tensor, kept_T: Tensor | None, sums: dict[str, Tensor]
) -> Tensor:
    """Return this micro-batch's share of the loss with the teacher's term added, a scalar.

    Args:
        inputs: arrays of the micro-batch.
        objective: loss and distillation.
        loss: the share without the teacher's term.
        kept_T: `TokenLoss.kept_T`, the tokens that AReaL's penalty is restricted to. None: all loss-mask tokens.
        sums: sums of metrics, extended in place.
    """
    config = objective.distillation
    if config is None:
        return loss
    sums |= teacher_sums(inputs)
    match config:
        case JointDistillationConfig():
            # losses without the key old_logprobs weigh from the engine
            of_start = isinstance(objective.loss, RatioLossConfig) and objective.loss.old_logprobs == "step_start"
            old_T = inputs.old_T if of_start else inputs.inference_logprobs_T
            return _joint(inputs, config, loss, old_T, inputs.loss_mask_T if kept_T is None else kept_T)
        case SdarConfig():
            # SDAR: the mean over micro-batches of their token means of sg[sigmoid(β·gap)]·gap, gap = teacher − logp.
            # Source: ms-swift 4.6, `swift/rl_core/advantage.py` (compute_sdar_loss)
            gap_T = teacher_gap(inputs)
            gate_T = torch.sigmoid(config.sdar_gate_beta * gap_T)
            # + 0 in value, with the gradient of −logp, which the gap itself does not have
            with_gradient_T = gap_T + inputs.masked(inputs.logprobs_T.detach() - inputs.logprobs_T)
            total = inputs.masked(gate_T * with_gradient_T).sum()
            share = total / inputs.loss_mask_T.sum().clamp(min=1) / max(inputs.num_micro_batches, 1)
            return loss + config.sdar_loss_coef * share
        case RlsdConfig():
            return loss


def _joint(inputs: LossInputs, config: JointDistillationConfig, loss: Tensor, old_T: Tensor, kept_T: Tensor) -> Tensor:
    """Return rl_loss_weight × loss + distill_loss_weight × mean of (logp − teacher), a scalar.

    With rl_loss_weight 0 the result is distill_loss_weight × mean of −ratio·sg[teacher − logp] alone. A micro-batch is
    weighted with its share of the step's loss-mask tokens. Source: AReaL 1.0.4, `areal/trainer/ppo/actor.py`
    (grpo_loss_fn).
    """
    if config.rl_loss_weight:  # logp − teacher with the gradient of logp, which the gap alone does not have
        penalty_T = -(teacher_gap(inputs) + inputs.masked(inputs.logprobs_T.detach() - inputs.logprobs_T))
    else:
        log_ratio_T = inputs.masked(inputs.logprobs_T - old_T)
        penalty_T = -teacher_gap(inputs) * ratio_of(log_ratio_T)
    mean = penalty_T.masked_fill(~kept_T, 0.0).sum() / kept_T.sum().clamp(min=1)
    penalty = mean * inputs.loss_mask_T.sum() / max(inputs.loss_tokens, 1)
    if not config.rl_loss_weight:  # not 0 × loss, whose gradient may be infinite
        return config.distill_loss_weight * penalty
    return config.rl_loss_weight * loss + config.distill_loss_weight * penalty
