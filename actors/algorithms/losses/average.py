"""From values per token to this micro-batch's share of the step's loss."""

from torch import Tensor

from actors.algorithms.losses.inputs import Average, LossInputs


def share_of_step(inputs: LossInputs, values_T: Tensor, average: Average) -> Tensor:
    """Scalar; the shares of all micro-batches on all ranks add up to the average over the step.

    Of `micro_batch_tokens` they add up to the mean of the micro-batches' means, as TRL's bnpo has it.
    """
    total = values_T.sum()
    match average:
        case "step_tokens":
            return total / max(inputs.loss_tokens, 1)
        case "micro_batch_tokens":
            return total / inputs.loss_mask_T.sum().clamp(min=1) / max(inputs.num_micro_batches, 1)
        case "completion_means":
            return (values_T / inputs.num_tokens_T).sum() / step_completions(inputs)
        case "completion_sums":
            return total / step_completions(inputs)
        case "max_length":
            if inputs.max_completion_length < 1:
                raise ValueError("max_completion_length: this loss divides by it, so it must be given")
            return total / (step_completions(inputs) * inputs.max_completion_length)


def step_completions(inputs: LossInputs) -> int:
    """Completions of the step; those of the micro-batch where it is the whole step."""
    return max(inputs.step_completions or inputs.num_completions, 1)
