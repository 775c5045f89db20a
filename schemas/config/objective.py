"""What a training step minimises: a policy loss and the switches that combine with any of them (docs/algorithms.md)."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.losses import CustomLossConfig, LossConfig, RefKlLossConfig, SurogateLossConfig, VespoLossConfig
from schemas.config.sft import SftConfig

SWITCHES = (
    "correction",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "entropy_coef",
    "adaptive_entropy",
)
"""Keys of an objective that act on what its loss makes."""


class CorrectionConfig(Section):
    """Weights for the gap between engine and trainer: exp(old − inference), truncated or masked (TIS, MIS, IcePop)."""

    mode: Literal["truncate", "mask"]
    """`truncate`: weights are clamped into the bounds; `mask`: what lies outside is dropped, inside it keeps its
    weight."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per completion."""
    sequence_ratio: Literal["sum", "geometric_mean"] = "sum"
    """Of level sequence: exponent of the sum of the log ratios (TRL), or of their mean (ms-swift)."""
    sequence_weight: Literal["completion", "token"] = "completion"
    """Of level sequence and mode mask: what is kept is weighted with the ratio of its completion (TRL), or each token
    with its own (ms-swift)."""
    low: float = Field(0.0, ge=0)
    """Lower bound."""
    high: float = Field(2.0, gt=0)
    """Upper bound. TRL's default is mode mask, level sequence, sum, 3.0; IcePop is mask, token, 0.5 and 5.0."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "CorrectionConfig":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class ReferenceConfig(Section):
    """KL to a frozen reference: the adapter switched off under LoRA, else a second copy of the first weights."""

    beta: float = Field(gt=0)
    """Factor of the KL (ms-swift's default is 0.04, AReaL's kl_ctl 0.1)."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = logp − ref: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss; or in the reward (kl_in_reward; AReaL with k1): minus beta × the KL of this and all later tokens is
    added to a token's advantage."""
    old_logprobs: Literal["step_start", "inference"] = "step_start"
    """Whose KL is in the reward: of the trainer's weights before the step, or of the engine (AReaL)."""
    bias_correction: bool = False
    """The KL of a token is multiplied by its importance ratio, so that its gradient is unbiased (TRL's default)."""
    max_kl: float | None = Field(None, gt=0)
    """A token's estimate is cut at ± this, and has no gradient beyond (ms-swift and AReaL: 10)."""
    switches: Literal["escape", "apply"] = "escape"
    """In the loss, the KL escapes correction and off-policy mask (TRL), or they act on it too (ms-swift)."""


class AdaptiveEntropyConfig(Section):
    """Entropy control of Skywork-OR1, as in TRL: the bonus acts after steps whose entropy was at the target or below.

    Its coefficient begins at `entropy_coef`, rises by `delta` after such a step and falls by `delta` after any other,
    once per step however many updates that has. A run that goes on has the coefficient of its checkpoint.
    """

    target: float = Field(0.2, ge=0)
    """Mean entropy per token (nats)."""
    delta: float = Field(0.005, gt=0)
    """Change of the coefficient after each step."""
    min_coef: float = Field(0.0, ge=0)
    """Least coefficient."""
    max_coef: float = Field(1.0, ge=0)
    """Largest coefficient."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "AdaptiveEntropyConfig":
        if self.min_coef > self.max_coef:
            raise ValueError(f"min_coef {self.min_coef} must not exceed max_coef {self.max_coef}")
        return self


class ObjectiveConfig(Section):
    """All that is minimised; the trainer's section has these keys too."""

    loss: LossConfig = SurogateLossConfig()
    """The policy loss."""
    correction: CorrectionConfig | None = None
    """Inference correction."""
    reference: ReferenceConfig | None = None
    """Reference KL."""
    off_policy_mask_threshold: float | None = Field(None, gt=0)
    """Completions with a negative advantage are dropped when their mean of (inference − logp) is above."""
    off_policy_tokens: Literal["count", "leave"] = "count"
    """Whether what that drops counts in the normaliser (TRL), or leaves it (ms-swift); bnpo alone knows a difference,
    since the others divide by completions or by the tokens of the whole step."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Only this share of the tokens, those of the highest entropy, carries the policy loss (0.2 in the paper)."""
    entropy_coef: float = Field(0.0, ge=0)
    """Factor of the mean entropy per token, which is subtracted from the loss; of the tokens that top_entropy_quantile
    keeps, where it is set (TRL)."""
    entropy_average: Literal["step_tokens", "micro_batch_tokens"] = "step_tokens"
    """The mean over the step, in which long micro-batches weigh more, or the mean of their means (TRL)."""
    adaptive_entropy: AdaptiveEntropyConfig | None = None
    """Changes entropy_coef from step to step."""
    sft: SftConfig | None = None
    """Supervised examples mixed in (CHORD)."""

    @model_validator(mode="after")
    def _switches_fit(self) -> "ObjectiveConfig":
        if isinstance(self.loss, VespoLossConfig) and self.correction and self.correction.level == "sequence":
            raise ValueError("correction.level sequence: loss vespo weighs whole completions itself; it must be token")
        if isinstance(self.loss, CustomLossConfig):
            fields = type(self).model_fields
            acting = [key for key in SWITCHES if getattr(self, key) != fields[key].default]
            if acting:
                raise ValueError(f"{acting[0]}: acts on no loss of type custom; remove it or put it into the function")
        return self

    @model_validator(mode="after")
    def _nothing_counts_twice_or_not_at_all(self) -> "ObjectiveConfig":
        kind = f"loss.type {self.loss.type}"
        if self.correction is not None and self.loss.weighs_from_engine:
            raise ValueError(f"correction: {kind} weighs tokens for the way from the engine itself; remove correction")
        if isinstance(self.loss, RefKlLossConfig):
            if self.off_policy_mask_threshold is not None:
                raise ValueError(f"off_policy_mask_threshold: goes by the advantage, which {kind} does not read")
            if self.reference is not None and self.reference.place == "reward":
                raise ValueError(f"reference.place reward: {kind} reads no reward; it must be loss")
        return self
