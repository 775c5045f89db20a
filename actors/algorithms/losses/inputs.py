"""What every loss takes and gives: flat tensors over the completion tokens of one micro-batch.

two completions of 3 and 2 tokens:  logprobs_T (5,)   completion_of_T [0, 0, 0, 1, 1]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

_FURTHER = {
    "old_logprobs_BT": None,
    "reference_logprobs_BT": None,
    "teacher_logprobs_BT": None,
    "entropy_BT": None,
    "versions_BT": torch.int64,
}
"""What `LossInputs.of_padded` takes besides the four arrays that all losses need; None: of the logprobs' dtype."""

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
    correction_T: Tensor | None = None
    """Weights of the inference correction. This and the next are made by `compute_loss` from the objective."""
    high_entropy_T: Tensor | None = None
    """bool, the loss-mask tokens that top_entropy_quantile keeps."""

    @classmethod
    def of_padded(
        cls,
        logprobs_BT: Any,
        inference_logprobs_BT: Any,
        advantages: Any,
        mask_BT: Any,
        *,
        loss_tokens: int | None = None,
        step_completions: int = 0,
        num_micro_batches: int = 1,
        max_completion_length: int = 0,
        version: int = 0,
        **further_BT: Any,
    ) -> "LossInputs":
        """From padded arrays, with a row for each completion; what is outside the mask is not looked at.

        Args:
            logprobs_BT: a tensor; the gradient of the loss goes back into it.
            inference_logprobs_BT: of the engine; tensors, arrays or lists, as all that follow.
            advantages: (B,) or (B, T).
            mask_BT: true for the tokens in the loss.
            loss_tokens: of the whole step; None: those of the mask.
            step_completions: and the next three, like the fields of their names.
            further_BT: `old_logprobs_BT`, `reference_logprobs_BT`, `teacher_logprobs_BT`, `entropy_BT`, `versions_BT`.

        Raises:
            ValueError: a name that is none of these, or a shape that is not that of the mask.
        """
        logprobs_BT = torch.as_tensor(logprobs_BT)
        mask_BT = torch.as_tensor(mask_BT, device=logprobs_BT.device).bool()

        def flat(name: str, values: Any, dtype: torch.dtype = logprobs_BT.dtype) -> Tensor:
            values_BT = torch.as_tensor(values, dtype=dtype, device=logprobs_BT.device)
            if values_BT.shape != mask_BT.shape:
                raise ValueError(f"{name}: shape {tuple(values_BT.shape)}, expected {tuple(mask_BT.shape)}, the mask's")
            return values_BT[mask_BT]

        unknown = sorted(set(further_BT) - set(_FURTHER))
        if unknown:
            raise ValueError(f"{unknown[0]}: no such array; there are {', '.join(_FURTHER)}")
        advantages = torch.as_tensor(advantages, dtype=logprobs_BT.dtype, device=logprobs_BT.device)
        if advantages.ndim == 1 and len(advantages) == len(mask_BT):
            advantages = advantages[:, None].expand(mask_BT.shape)
        completion_of_T = mask_BT.nonzero()[:, 0]
        return cls(
            logprobs_T=flat("logprobs_BT", logprobs_BT),
            inference_logprobs_T=flat("inference_logprobs_BT", inference_logprobs_BT),
            advantages_T=flat("advantages", advantages),
            loss_mask_T=torch.ones_like(completion_of_T, dtype=torch.bool),
            completion_of_T=completion_of_T,
            num_completions=len(mask_BT),
            loss_tokens=len(completion_of_T) if loss_tokens is None else loss_tokens,
            step_completions=step_completions,
            num_micro_batches=num_micro_batches,
            max_completion_length=max_completion_length,
            version=version,
            **{
                name.replace("_BT", "_T"): flat(name, values, _FURTHER[name] or logprobs_BT.dtype)
                for name, values in further_BT.items()
                if values is not None
            },
        )

    @cached_property
    def old_T(self) -> Tensor:
        """Logprobs of the policy at the start of the step; no gradient."""
        return self.logprobs_T.detach() if self.old_logprobs_T is None else self.old_logprobs_T

    @cached_property
    def num_tokens_B(self) -> Tensor:
        """Loss-mask tokens per completion, at least 1; of the dtype of the logprobs."""
        return self._counts_B.clamp(min=1)

    @cached_property
    def num_tokens_T(self) -> Tensor:
        """Those of each token's completion."""
        return self.per_token(self.num_tokens_B)

    @property
    def scored_completions(self) -> Tensor:
        """Scalar, completions with a token in the loss mask."""
        return (self._counts_B > 0).sum()

    @cached_property
    def _counts_B(self) -> Tensor:
        return self.sum_per_completion(self.loss_mask_T.to(self.logprobs_T.dtype))

    def masked(self, values_T: Tensor, fill: float = 0.0) -> Tensor:
        """The values, and `fill` outside the loss mask."""
        return values_T.masked_fill(~self.loss_mask_T, fill)

    def per_token(self, values_B: Tensor) -> Tensor:
        """(B,) → (T,)."""
        return values_B.index_select(0, self.completion_of_T)  # its gradient is cheaper than that of indexing

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
