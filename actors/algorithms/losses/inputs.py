"""What every loss takes and gives: flat tensors over the completion tokens of one micro-batch.

two completions of 3 and 2 tokens:  logprobs_T (5,)   completion_of_T [0, 0, 0, 1, 1]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Average = Literal["step_tokens", "micro_batch_tokens", "completion_means", "completion_sums", "max_length"]


@dataclass(frozen=True)
class LossInputs:
    """Axes: T completion tokens, B completions. Only `logprobs_T` and `entropy_T` may carry gradient.

    Tokens outside `loss_mask_T` may hold anything finite: no loss and no metric looks at them.
    """

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
    step_completions: int = 0
    """Completions of the whole step over all ranks; 0: this micro-batch is the whole step."""
    num_micro_batches: int = 1
    """Micro-batches of the whole step over all ranks."""
    max_completion_length: int = 0
    """rollout.max_tokens, the normaliser of `dr_grpo`."""
    old_logprobs_T: Tensor | None = None
    """Of the trainer at the start of the step; None: this is the step's first update, so they are `logprobs_T`."""
    reference_logprobs_T: Tensor | None = None
    teacher_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    """Of the distribution that each token was drawn from."""
    versions_T: Tensor | None = None
    """int64, the policy version that sampled a token."""
    version: int = 0
    """Of the weights that the step starts from."""

    @cached_property
    def old_T(self) -> Tensor:
        """Logprobs of the policy at the start of the step; no gradient."""
        return self.logprobs_T.detach() if self.old_logprobs_T is None else self.old_logprobs_T

    @cached_property
    def num_tokens_B(self) -> Tensor:
        """Loss-mask tokens per completion, at least 1; of the dtype of the logprobs."""
        return self.sum_per_completion(self.loss_mask_T.to(self.logprobs_T.dtype)).clamp(min=1)

    def masked(self, values_T: Tensor, fill: float = 0.0) -> Tensor:
        """The values, and `fill` outside the loss mask."""
        return values_T.masked_fill(~self.loss_mask_T, fill)

    def per_token(self, values_B: Tensor) -> Tensor:
        """(B,) → (T,)."""
        return values_B[self.completion_of_T]

    def sum_per_completion(self, values_T: Tensor) -> Tensor:
        """(T,) → (B,)."""
        return values_T.new_zeros(self.num_completions).index_add(0, self.completion_of_T, values_T)

    def mean_per_completion(self, values_T: Tensor) -> Tensor:
        """(T,) → (B,), over the loss mask; 0 for a completion without any."""
        return self.sum_per_completion(self.masked(values_T)) / self.num_tokens_B

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
class TokenLoss:
    """What one loss makes of its inputs, before the switches that combine with it and before the average."""

    values_T: Tensor
    """To be minimised, with gradient; 0 for tokens that the loss drops and outside the loss mask, never NaN."""
    average: Average
    """What the values are averaged over: the tokens of the step, those of the micro-batch, each completion's tokens
    and then the completions, the completions, or the completions × max_completion_length."""
    ratio_T: Tensor | None = None
    """The importance ratio where it is not exp(logp − old): what `bias_correction` multiplies the KL with."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Of its own metrics, see `LossOutput.sums`."""


@dataclass(frozen=True)
class LossOutput:
    """`loss` is this micro-batch's share: shares of all micro-batches and ranks add up to the loss of the step.

    `sums` are numerators and denominators of metrics, to be added up over micro-batches and ranks before the division:
    the metric `x` is `sums["x"] / sums[x's denominator]`, see `actors.algorithms.losses.metrics`.
    """

    loss: Tensor
    sums: dict[str, Tensor]
