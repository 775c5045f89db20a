"""Teacher terms of a loss: the gap teacher − logp, as an advantage and as a metric."""

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs


def teacher_gap(inputs: LossInputs) -> Tensor:
    """Return teacher − logp without gradient, (T,), 0 outside the loss mask.

    Used as an advantage, the gap has the policy gradient of −KL(policy ‖ teacher).

    Raises:
        ValueError: inputs.teacher_logprobs_T is missing.
    """
    if inputs.teacher_logprobs_T is None:
        raise ValueError("teacher_logprobs: this trainer.loss reads a teacher's; set trainer.teacher")
    # detached: an advantage is a constant, and its gradient comes from the ratio that it is multiplied with
    return inputs.masked(inputs.teacher_logprobs_T - inputs.logprobs_T.detach())


def with_teacher(inputs: LossInputs, advantages_T: Tensor, teacher_tau: float) -> Tensor:
    """Return advantages + teacher_tau·(teacher − logp), (T,); without a teacher_tau no teacher is needed."""
    return advantages_T + teacher_tau * teacher_gap(inputs) if teacher_tau else advantages_T


def teacher_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Return the sum of the metric teacher_kl, the mean of logp − teacher (k1); empty without a teacher."""
    return {} if inputs.teacher_logprobs_T is None else {"teacher_kl": -teacher_gap(inputs).sum()}
