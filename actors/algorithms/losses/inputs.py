"""What every loss takes and gives: flat tensors over the completion tokens of one micro-batch.

two completions of 3 and 2 tokens:  logprobs_T (5,)   completion_of_T [0, 0, 0, 1, 1]
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """Axes: T completion tokens, B completions. Only `logprobs_T` carries gradient."""

    logprobs_T: Tensor
    """Of the trainer, at the temperature of sampling."""
    inference_logprobs_T: Tensor
    """Of the engine when it sampled (behaviour policy)."""
    advantages_T: Tensor
    loss_mask_T: Tensor
    """bool; False for tokens that the policy did not write (tool output, later turns' prompts)."""
    completion_of_T: Tensor
    """int64, which completion a token belongs to: 0 … B−1, not falling."""
    num_completions: int
    """B."""
    loss_tokens: int
    """Loss-mask tokens of the whole step over all ranks: the token normaliser (at least 1)."""
    teacher_logprobs_T: Tensor | None = None

    def sum_per_completion(self, values_T: Tensor) -> Tensor:
        """(T,) → (B,)."""
        return values_T.new_zeros(self.num_completions).index_add(0, self.completion_of_T, values_T)

    def min_per_completion(self, values_T: Tensor) -> Tensor:
        """(T,) → (B,); +inf for a completion without tokens."""
        return self._reduce(values_T, float("inf"), "amin")

    def max_per_completion(self, values_T: Tensor) -> Tensor:
        """(T,) → (B,); −inf for a completion without tokens."""
        return self._reduce(values_T, float("-inf"), "amax")

    def _reduce(self, values_T: Tensor, start: float, how: str) -> Tensor:
        filled = torch.full((self.num_completions,), start, dtype=values_T.dtype, device=values_T.device)
        return filled.scatter_reduce(0, self.completion_of_T, values_T, how)


@dataclass(frozen=True)
class LossOutput:
    """`loss` is this micro-batch's share: shares of all micro-batches and ranks add up to the loss of the step.

    `sums` are numerators and denominators of metrics, to be added up over micro-batches and ranks before the division:
    the metric `x` is `sums["x"] / sums[x's denominator]`, see `actors.algorithms.losses.metrics`.
    """

    loss: Tensor
    sums: dict[str, Tensor]
