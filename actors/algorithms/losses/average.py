"""Averages of a loss: values per token reduced to one micro-batch's share of the step's loss."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms.losses.inputs import Average, LossInputs


def share_of_step(inputs: LossInputs, values_T: Tensor, average: Average) -> Tensor:
    """Return this micro-batch's share, a scalar; shares of all micro-batches and ranks add up to the step's average.

    step_tokens         Σ ÷ loss-mask tokens of the step
    micro_batch_tokens  mean over the micro-batches of their token means (TRL's bnpo)
    completion_means    mean over the completions of their token means (GRPO)
    completion_sums     Σ ÷ completions of the step (LUSPO)
    max_length          Σ ÷ (completions of the step × max_completion_length) (Dr. GRPO)

    Raises:
        ValueError: `max_length` without inputs.max_completion_length.
    """
    return _divided(inputs, _counted(inputs, values_T, average).sum(), average)


def token_shares(inputs: LossInputs, values_T: Tensor, average: Average) -> Tensor:
    """Return each token's part of `share_of_step`, (T,), for records; the parts add up to the share."""
    return _divided(inputs, _counted(inputs, values_T, average), average)


def _counted(inputs: LossInputs, values_T: Tensor, average: Average) -> Tensor:
    # a completion counts once, in the micro-batch that holds it whole, or in shares
    return inputs.over_completion(values_T) if average == "completion_means" else values_T


def _divided(inputs: LossInputs, values: Tensor, average: Average) -> Tensor:
    # denominators of the whole step, over all ranks: with those of this micro-batch, a token's loss would depend on the
    # samples that it was packed with, as in TRL's bnpo
    match average:
        case "step_tokens":
            return values / max(inputs.loss_tokens, 1)
        case "micro_batch_tokens":
            return values / inputs.loss_mask_T.sum().clamp(min=1) / max(inputs.num_micro_batches, 1)
        case "completion_means" | "completion_sums":
            return values / step_completions(inputs)
        case "max_length":
            if inputs.max_completion_length < 1:
                raise ValueError("max_completion_length: this loss divides by it, so it must be given")
            return values / (step_completions(inputs) * inputs.max_completion_length)


def step_completions(inputs: LossInputs) -> int:
    """Return the number of completions of the step (of the micro-batch, if it is the whole step), at least 1."""
    return max(inputs.step_completions or inputs.num_completions, 1)


def token_normaliser(loss_tokens_U: NDArray[np.int64], minibatch: int, kind: str) -> float:
    """Return the divisor of a minibatch's token sums: its own loss tokens, or with `step_mean` the minibatches' mean.

    Minibatches of [6, 3] tokens are divided by 6 and 3, or both by 4.5 with `step_mean`. Source of `step_mean`: TRL
    1.16, `GRPOTrainer._compute_loss`, where num_items_in_batch spans the generation.

    Args:
        loss_tokens_U: loss tokens of each minibatch of the step, over all ranks.
        minibatch: index of the minibatch.
        kind: `minibatch` or `step_mean` (`trainer.loss.compat.loss_normalizer`).
    """
    return float(np.mean(loss_tokens_U) if kind == "step_mean" else loss_tokens_U[minibatch])
