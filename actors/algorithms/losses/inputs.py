"""Inputs and outputs of every loss: flat tensors over the completion tokens of one micro-batch.

two completions of 3 and 2 tokens:  logprobs_T (5,)   completion_of_T [0, 0, 0, 1, 1]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
"""Optional arrays of `LossInputs.of_padded`, with their dtype; None: the dtype of the logprobs."""

Average = Literal["step_tokens", "micro_batch_tokens", "completion_means", "completion_sums", "max_length"]
"""Averages of a loss over a step, defined in `share_of_step`."""


@dataclass(frozen=True)
class LossInputs:
    """Arrays and normalisers of one micro-batch. Axes: T completion tokens, B samples, each a completion or a branch.

    Only `logprobs_T` and `entropy_T` may have a gradient. Tokens outside `loss_mask_T` may hold any finite value: no
    loss and no metric reads them.
    """

    logprobs_T: Tensor
    """Logprobs of the trainer's current weights, at the temperature of sampling (logp in formulas)."""
    inference_logprobs_T: Tensor
    """Logprobs of the engine when it sampled (behaviour policy). NaN: none known, the token's ratio to the engine
    counts as 1."""
    advantages_T: Tensor
    """Advantages, a value per token."""
    loss_mask_T: Tensor
    """bool; False for tokens not written by the policy (tool output, prompts of later turns)."""
    completion_of_T: Tensor
    """int64, index of each token's sample: 0 … B−1, never decreasing."""
    num_completions: int
    """B, samples of this micro-batch."""
    loss_tokens: float
    """Loss-mask tokens of the whole step over all ranks, the denominator of `step_tokens`; below 1 counts as 1."""
    step_completions: int = 0
    """Completions of the whole step over all ranks. 0: this micro-batch is the whole step."""
    shares_B: Tensor | None = None
    """Share of each sample in the loss tokens of its completion, (B,). A completion with branches is several samples,
    which may be in different micro-batches; averages of completions count each sample with its share. None: 1."""
    num_micro_batches: int = 1
    """Micro-batches of the whole step over all ranks."""
    max_completion_length: int = 0
    """Tokens, `rollout.max_tokens`: a factor of the denominator of `dr_grpo`."""
    old_logprobs_T: Tensor | None = None
    """Logprobs of the trainer at the start of the step. None: the step's first update, so equal to `logprobs_T`."""
    reference_logprobs_T: Tensor | None = None
    """Logprobs of the frozen reference, for a KL penalty. None: no reference."""
    teacher_logprobs_T: Tensor | None = None
    """Logprobs of the teacher. None: no teacher."""
    entropy_T: Tensor | None = None
    """Entropy in nats of the distribution that each token was drawn from. None: not computed."""
    versions_T: Tensor | None = None
    """int64, version of the policy that sampled each token."""
    version: int = 0
    """Version of the weights that the step starts from."""
    weights_T: Tensor | None = None
    """Factor of each token's loss (prime-rl's rl_weights). A token of weight 0 is in no mask, and `loss_tokens` must
    not count it. None: 1."""
    reward_discount: float = 1.0
    """Discount per token of later KLs, for a KL in the reward: γλ of advantage `gae`."""
    missing_T: Tensor | None = None
    """bool, tokens without a logprob of the engine. Set by `compute_loss`, like the next two."""
    correction_T: Tensor | None = None
    """Weights of the inference correction; None without a correction."""
    high_entropy_T: Tensor | None = None
    """bool, loss-mask tokens that top_entropy_quantile keeps; None without the modifier."""

    @classmethod
    def of_padded(
        cls,
        logprobs_BT: Any,
        inference_logprobs_BT: Any,
        advantages: Any,
        mask_BT: Any,
        *,
        loss_tokens: float | None = None,
        step_completions: int = 0,
        num_micro_batches: int = 1,
        max_completion_length: int = 0,
        version: int = 0,
        **further_BT: Any,
    ) -> "LossInputs":
        """Build inputs from padded arrays, a row per completion. Values outside the mask are not read.

        Args:
            logprobs_BT: logprobs of the trainer, a tensor; the gradient of the loss flows back into the tensor.
            inference_logprobs_BT: logprobs of the engine; a tensor, array or list, as all further arrays.
            advantages: (B,) or (B, T).
            mask_BT: true for the tokens in the loss.
            loss_tokens: loss-mask tokens of the whole step. None: the tokens of the mask.
            step_completions: completions of the whole step. 0: B.
            num_micro_batches, max_completion_length, version: as the fields of these names.
            further_BT: `old_logprobs_BT`, `reference_logprobs_BT`, `teacher_logprobs_BT`, `entropy_BT`, `versions_BT`.

        Raises:
            ValueError: an unknown name, or a shape that differs from the mask's.
        """
        if unknown := sorted(set(further_BT) - set(_FURTHER)):
            raise ValueError(f"{unknown[0]}: no such array; there are {', '.join(_FURTHER)}")
        logprobs_BT = torch.as_tensor(logprobs_BT)
        mask_BT = torch.as_tensor(mask_BT, device=logprobs_BT.device).bool()
        advantages = torch.as_tensor(advantages, dtype=logprobs_BT.dtype, device=logprobs_BT.device)
        # an advantage per completion holds for all of its tokens
        if advantages.ndim == 1 and len(advantages) == len(mask_BT):
            advantages = advantages[:, None].expand(mask_BT.shape)
        arrays = {"logprobs_BT": logprobs_BT, "inference_logprobs_BT": inference_logprobs_BT, "advantages": advantages}
        completion_of_T = mask_BT.nonzero()[:, 0]
        return cls(
            **_inside(mask_BT, arrays | further_BT, logprobs_BT.dtype),
            # only masked tokens are copied, so padding costs nothing later and the loss mask is all true
            loss_mask_T=torch.ones_like(completion_of_T, dtype=torch.bool),
            completion_of_T=completion_of_T,
            num_completions=len(mask_BT),
            loss_tokens=len(completion_of_T) if loss_tokens is None else loss_tokens,
            step_completions=step_completions,
            num_micro_batches=num_micro_batches,
            max_completion_length=max_completion_length,
            version=version,
        )

    def prepared(self) -> "LossInputs":
        """Return the inputs without tokens of weight 0, and with the trainer's logprobs where the engine's are NaN."""
        # the trainer's logprob for a missing one gives a ratio of 1 to the engine. Detached: the engine's logprobs are
        # constants in every loss
        missing_T, logprobs_T = self.inference_logprobs_T.isnan(), self.logprobs_T.detach()
        return replace(
            self,
            inference_logprobs_T=torch.where(missing_T, logprobs_T, self.inference_logprobs_T),
            loss_mask_T=self.loss_mask_T if self.weights_T is None else self.loss_mask_T & (self.weights_T != 0),
            missing_T=missing_T,
        )

    def detached(self) -> "LossInputs":
        """Return the inputs without the graph behind logprobs and entropy."""
        entropy_T = self.entropy_T.detach() if self.entropy_T is not None else None
        return replace(self, logprobs_T=self.logprobs_T.detach(), entropy_T=entropy_T)

    @cached_property
    def old_T(self) -> Tensor:
        """Logprobs of the policy at the start of the step, (T,), without gradient."""
        return self.logprobs_T.detach() if self.old_logprobs_T is None else self.old_logprobs_T

    @cached_property
    def num_tokens_B(self) -> Tensor:
        """Loss-mask tokens per completion, (B,), at least 1, in the dtype of the logprobs."""
        # at least 1, as a divisor: a completion without loss tokens has a sum of 0
        return self._counts_B.clamp(min=1)

    @cached_property
    def num_tokens_T(self) -> Tensor:
        """Loss-mask tokens of each token's completion, (T,), at least 1."""
        return self.per_token(self.num_tokens_B)

    @property
    def scored_completions(self) -> Tensor:
        """Number of completions with a token in the loss mask, a scalar; a sample counts as its share."""
        return self.total(self._counts_B > 0)

    # a frozen dataclass allows cached properties, and `replace` makes a new object with an empty cache
    @cached_property
    def _counts_B(self) -> Tensor:
        return self.sum_per_completion(self.loss_mask_T.to(self.logprobs_T.dtype))

    def over_completion(self, values_T: Tensor) -> Tensor:
        """Divide each token's value by the number of loss-mask tokens of its whole completion, (T,) → (T,)."""
        values_T = values_T / self.num_tokens_T
        return values_T if self.shares_B is None else values_T * self.per_token(self.shares_B)

    def total(self, values_B: Tensor) -> Tensor:
        """Sum values over completions, (B,) → a scalar; a sample counts with its share."""
        return values_B.sum() if self.shares_B is None else (values_B * self.shares_B).sum()

    def masked(self, values_T: Tensor, fill: float = 0.0) -> Tensor:
        """Return the values with `fill` outside the loss mask, (T,)."""
        # not × mask: inf · 0 would be NaN, in the value and in the gradient
        return values_T.masked_fill(~self.loss_mask_T, fill)

    def per_token(self, values_B: Tensor) -> Tensor:
        """Copy a value per completion to its tokens, (B,) → (T,)."""
        return values_B.index_select(0, self.completion_of_T)  # cheaper to differentiate than indexing

    def sum_per_completion(self, values_T: Tensor) -> Tensor:
        """Sum the values of each completion over all its tokens, (T,) → (B,); the loss mask is not applied."""
        return values_T.new_zeros(self.num_completions).index_add(0, self.completion_of_T, values_T)

    def mean_per_completion(self, values_T: Tensor) -> Tensor:
        """Average the values of each completion over its loss-mask tokens, (T,) → (B,); 0 if there are none."""
        return self.sum_per_completion(self.masked(values_T)) / self.num_tokens_B

    def min_per_completion(self, values_T: Tensor) -> Tensor:
        """Return the least value of each completion, (T,) → (B,); +inf for a completion without tokens."""
        return self._reduce(values_T, float("inf"), "amin")

    def max_per_completion(self, values_T: Tensor) -> Tensor:
        """Return the greatest value of each completion, (T,) → (B,); −inf for a completion without tokens."""
        return self._reduce(values_T, float("-inf"), "amax")

    def _reduce(self, values_T: Tensor, start: float, how: str) -> Tensor:
        filled = torch.full((self.num_completions,), start, dtype=values_T.dtype, device=values_T.device)
        return filled.scatter_reduce(0, self.completion_of_T, values_T, how)


def _inside(mask_BT: Tensor, arrays_BT: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the values of each padded array inside the mask, (B, T) → (T,), under the names of `LossInputs`.

    Raises:
        ValueError: a shape differs from the mask's.
    """
    found = {}
    for name, values in arrays_BT.items():
        if values is None:
            continue
        values_BT = torch.as_tensor(values, dtype=_FURTHER.get(name) or dtype, device=mask_BT.device)
        if values_BT.shape != mask_BT.shape:
            raise ValueError(f"{name}: shape {tuple(values_BT.shape)}, expected {tuple(mask_BT.shape)}, the mask's")
        found[f"{name.removesuffix('_BT')}_T"] = values_BT[mask_BT]
    return found


@dataclass(frozen=True)
class TokenLoss:
    """Result of a policy loss, before the modifiers that combine with it and before the average."""

    values_T: Tensor
    """Loss per token, (T,), with gradient; 0 for dropped tokens and outside the loss mask, never NaN."""
    average: Average
    """Average of the values over the step, as in `share_of_step`."""
    ratio_T: Tensor | None = None
    """Importance ratio, (T,), for the reference KL's `bias_correction`. None: exp(logp − old)."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums of the loss's own metrics, see `LossOutput.sums`."""
    kept_T: Tensor | None = None
    """bool, the remaining loss mask, if dropped tokens leave the denominator too (m2po). None: they stay in it."""
    rules: Mapping[str, Tensor] = field(default_factory=dict)
    """bool, (T,), tokens that a rule masks or clips, by rule. Tokens outside the loss mask may have any value."""


@dataclass(frozen=True)
class TokenDetails:
    """Values of single tokens behind a loss, without gradient, for records. The loss itself needs all of them."""

    values_T: Tensor
    """Loss of each token after all modifiers, (T,), before the average."""
    inputs: LossInputs
    """Arrays as the average counts them."""
    average: Average
    ratio_T: Tensor | None
    """Importance ratio of the loss, (T,); None if it names none."""
    rules: Mapping[str, Tensor]
    """Tokens that a rule of the loss or of a modifier masks or clips, by rule, as in `TokenLoss.rules`."""


@dataclass(frozen=True)
class LossOutput:
    """Result of `compute_loss` and of a custom loss for one micro-batch."""

    loss: Tensor
    """Share of the step's loss, a scalar with gradient. Shares of all micro-batches and ranks add up to the loss."""
    sums: dict[str, Tensor]
    """Numerators and denominators of metrics, scalars. They are added up over micro-batches and ranks before a metric
    is divided; `actors.algorithms.losses.metrics.DENOMINATORS` names both sums of each metric."""
    # outputs with equal loss and sums are equal: arrays of tokens have no truth value
    tokens: TokenDetails | None = field(default=None, compare=False)
    """Values of single tokens, of the policy loss; None for a custom loss."""
