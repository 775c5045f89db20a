"""A teacher's pull: how much likelier it finds a token than the policy does."""

from torch import Tensor

from actors.algorithms.losses.inputs import LossInputs


def teacher_gap(inputs: LossInputs) -> Tensor:
    """(T,) teacher − logp, no gradient: as an advantage, its policy gradient is that of −KL(policy ‖ teacher).

    Raises:
        ValueError: there is no teacher.
    """
    if inputs.teacher_logprobs_T is None:
        raise ValueError("teacher_logprobs: this trainer.loss reads a teacher's; set trainer.teacher")
    return inputs.masked(inputs.teacher_logprobs_T - inputs.logprobs_T.detach())


def with_teacher(inputs: LossInputs, advantages_T: Tensor, teacher_tau: float) -> Tensor:
    """(T,) advantages and teacher_tau × the gap."""
    return advantages_T + teacher_tau * teacher_gap(inputs) if teacher_tau else advantages_T


def teacher_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Of the metric teacher_kl, the mean of logp − teacher (k1); nothing without a teacher."""
    return {} if inputs.teacher_logprobs_T is None else {"teacher_kl": -teacher_gap(inputs).sum()}
