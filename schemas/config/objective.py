"""Keys of the training objective: a policy loss, and switches to combine with any loss (docs/reference/losses.md)."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.distillation import DistillationConfig, RlsdConfig
from schemas.config.losses import (
    CustomLossConfig,
    DapoLossConfig,
    LossConfig,
    RatioLossConfig,
    RefKlLossConfig,
    VespoLossConfig,
)
from schemas.config.resume_classes import Identity
from schemas.config.sft import SftConfig

MODIFIERS = (
    "correction",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "entropy_coef",
    "adaptive_entropy",
    "distillation",
)
"""Keys that act on the loss after it is computed. None has an effect on a loss of type `custom`, so all are refused
there."""


class CorrectionConfig(Section):
    """Importance weights for the gap between engine and trainer, exp(old − q), truncated or masked (TIS, MIS, IcePop).

    `q` is the engine's logprob of a token, `old` the trainer's before the step's first update.
    """

    mode: Literal["truncate", "mask"]
    """Treatment of weights outside [low, high]. `truncate`: clamped into the bounds (TIS). `mask`: the tokens are
    dropped (MIS, IcePop). Weights inside stay as computed in both modes."""
    level: Literal["token", "sequence"] = "token"
    """Unit of a weight: one per token, or one per completion (`sequence`)."""
    sequence_ratio: Literal["sum", "geometric_mean"] = "sum"
    """Ratio of a completion, with level `sequence`: exp of the sum of its log ratios (TRL), or of their mean
    (`geometric_mean`, ms-swift)."""
    sequence_weight: Literal["completion", "token"] = "completion"
    """Weight of kept tokens, with level `sequence` and mode `mask`: the ratio of the completion (TRL), or each token's
    own ratio (ms-swift)."""
    low: float = Field(0.0, ge=0)
    """Lower bound of the weight."""
    high: float = Field(2.0, gt=0)
    """Upper bound of the weight. TRL's default: mode mask, level sequence, sequence_ratio sum, high 3.0. IcePop: mode
    mask, level token, low 0.5, high 5.0."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "CorrectionConfig":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class ReferenceSyncConfig(Section):
    """Reference that follows the policy (TRL's and ms-swift's sync_ref_model, from TR-DPO).

    After every `every_steps`-th step each weight of the reference becomes (1 − alpha) · reference + alpha · policy.
    The reference is kept in float32 and saved in checkpoints, so a run that continues or is rewound has the reference
    of its step.
    """

    every_steps: int = Field(512, ge=1)
    """Steps between two moves. TRL's ref_model_sync_steps counts optimizer updates, of which a step may have
    several."""
    alpha: float = Field(0.6, gt=0, le=1)
    """Share of the policy in the new reference (TRL: ref_model_mixup_alpha). 1: the reference becomes the policy."""


class ReferenceConfig(Section):
    """KL penalty towards a reference policy, which is frozen unless `sync` moves it.

    With LoRA the reference is the policy with its adapter switched off, else a second copy of the first weights.
    """

    beta: float = Field(gt=0)
    """Factor of the KL. Defaults elsewhere: ms-swift 0.04, AReaL 0.1 (kl_ctl)."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL from d = logp − ref of a token: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d."""
    place: Literal["loss", "reward", "group_reward"] = "loss"
    """Place of the penalty. `loss`: beta × KL is added to each token's loss. `reward`: a token's advantage is reduced
    by beta × the KL of this and all later tokens (AReaL, with k1). `group_reward`: a completion's reward is reduced by
    beta × the KL of all its tokens, before advantages are computed (ms-swift's kl_in_reward and TRL's RLOOTrainer, with
    k1)."""
    old_logprobs: Literal["step_start", "inference"] = "step_start"
    """Policy of the KL in a reward: the trainer's weights before the step, or the engine's policy (`inference`, AReaL).
    Has no effect with place `loss`."""
    bias_correction: bool = False
    """Multiplication of a token's KL by its importance ratio, for an unbiased gradient (TRL's default). Has an effect
    with place `loss` only."""
    max_kl: float | None = Field(None, gt=0)
    """Bound of a token's KL estimate: values beyond ± max_kl are cut and have no gradient (ms-swift, AReaL: 10). Empty:
    no bound."""
    switches: Literal["escape", "apply"] = "escape"
    """Effect of `correction` and of the off-policy mask on the KL in the loss. `escape`: none (TRL). `apply`: the same
    as on the policy loss (ms-swift)."""
    sync: ReferenceSyncConfig | None = None
    """Moves of the reference towards the policy. Not with `model.lora`, where the reference is the base model itself.
    Empty: the reference never changes."""


class AdaptiveEntropyConfig(Section):
    """Adaptive entropy control (Skywork-OR1, as in TRL): an entropy bonus only after steps of low entropy.

    The coefficient starts at `entropy_coef`. After a step with an entropy at the target or below, it rises by `delta`
    and acts in the next step; after any other step it falls by `delta` and does not act. The coefficient changes
    once per step, not per update. A resumed run continues with the coefficient of its checkpoint.
    """

    target: float = Field(0.2, ge=0)
    """Target of the mean entropy per token, in nats."""
    delta: float = Field(0.005, gt=0)
    """Change of the coefficient after each step."""
    min_coef: float = Field(0.0, ge=0)
    """Smallest coefficient."""
    max_coef: float = Field(1.0, ge=0)
    """Largest coefficient."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "AdaptiveEntropyConfig":
        if self.min_coef > self.max_coef:
            raise ValueError(f"min_coef {self.min_coef} must not exceed max_coef {self.max_coef}")
        return self


class ObjectiveConfig(Section):
    """Training objective. All keys here are keys of the section `trainer`."""

    loss: Identity[LossConfig] = DapoLossConfig(old_logprobs="inference")
    """Policy loss. Default: as in TRL's AsyncGRPOTrainer."""
    correction: Identity[CorrectionConfig | None] = None
    """Importance weights for the gap between engine and trainer. Refused with losses whose ratio is to the engine
    already, like the default. Empty: none."""
    reference: Identity[ReferenceConfig | None] = None
    """KL penalty towards a reference. Empty: none."""
    off_policy_mask_threshold: Identity[float | None] = Field(None, gt=0)
    """Off-policy mask (DeepSeek-V3.2): tokens with a negative advantage are dropped if engine logprob minus trainer
    logprob, averaged over the completion, is above this threshold in nats. Empty: no mask."""
    top_entropy_quantile: Identity[float] = Field(1.0, gt=0, le=1)
    """Share of the tokens that carry the policy loss: the tokens with the highest entropy of each micro-batch (0.2 in
    the paper). 1: all tokens."""
    entropy_coef: Identity[float] = Field(0.0, ge=0)
    """Factor of the entropy bonus: the mean entropy per token (nats) times this factor is subtracted from the loss.
    With `top_entropy_quantile` the mean is over the kept tokens (TRL). 0: no bonus."""
    adaptive_entropy: Identity[AdaptiveEntropyConfig | None] = None
    """Adaptive control of the entropy coefficient, from `entropy_coef` on. Empty: constant coefficient."""
    distillation: Identity[DistillationConfig | None] = None
    """Distillation from `trainer.teacher` next to the rewards. Empty: none."""
    sft: Identity[SftConfig | None] = None
    """Supervised examples mixed into training (CHORD). Empty: none."""

    @model_validator(mode="after")
    def _modifiers_fit(self) -> "ObjectiveConfig":
        if isinstance(self.loss, VespoLossConfig) and self.correction and self.correction.level == "sequence":
            raise ValueError("correction.level sequence: loss vespo weighs whole completions itself; it must be token")
        if isinstance(self.loss, CustomLossConfig):
            fields = type(self).model_fields
            # `reference` is not among the modifiers: a custom loss finds its logprobs in the inputs.
            acting = [key for key in MODIFIERS if getattr(self, key) != fields[key].default]
            if acting:
                raise ValueError(f"{acting[0]}: acts on no loss of type custom; remove it or put it into the function")
        return self

    @model_validator(mode="after")
    def _nothing_counts_twice_or_not_at_all(self) -> "ObjectiveConfig":
        kind = f"loss.type {self.loss.type}"
        if self.correction is not None and self.loss.weighs_from_engine:
            way_out = "; remove correction"
            if isinstance(self.loss, RatioLossConfig):
                way_out += f", or write loss: {{type: {self.loss.type}, old_logprobs: step_start}}"
            raise ValueError(f"correction: {kind} already weighs tokens by the ratio to the engine{way_out}")
        if isinstance(self.loss, RefKlLossConfig):
            if self.off_policy_mask_threshold is not None:
                raise ValueError(f"off_policy_mask_threshold: depends on the advantage, which {kind} does not read")
            if isinstance(self.distillation, RlsdConfig):
                raise ValueError(f"distillation: rlsd changes the advantage, which {kind} does not read")
            if self.reference is not None and self.reference.place != "loss":
                raise ValueError(f"reference.place {self.reference.place}: {kind} reads no reward; it must be loss")
        return self
