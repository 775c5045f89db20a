"""Which policy loss: a union told apart by `type`, one class per loss (docs/algorithms.md)."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.config.base import FunctionPath, Section


class PolicyLossConfig(Section):
    """What a loss does with the switches of its objective, by key; not itself a part of the file."""

    ignores: ClassVar[frozenset[str]] = frozenset()
    """Switches without effect on this loss."""
    takes_inside: ClassVar[frozenset[str]] = frozenset()
    """Switches that are part of this loss's own formula instead of acting on what it makes."""

    @property
    def weighs_from_engine(self) -> bool:
        """Whether its importance ratio is to the engine's policy already, which `correction` would count twice."""
        return False


class EngineRatioLossConfig(PolicyLossConfig):
    """What all losses are that weigh tokens for the whole way from the engine to the trainer."""

    @property
    def weighs_from_engine(self) -> bool:
        """Always."""
        return True


class SurogateLossConfig(EngineRatioLossConfig):
    """The documented Surogate GRPO loss: importance-weighted policy gradient, masked outside a trust region."""

    type: Literal["surogate"] = "surogate"
    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or one per completion."""
    token_mask_low: float = Field(0.125, ge=0)
    """Drop tokens whose ratio is below."""
    token_mask_high: float = Field(8.0, ge=0)
    """Drop tokens whose ratio is above."""
    geo_mask_low: float = Field(0.1, ge=0)
    """Drop completions whose geometric mean ratio is below."""
    geo_mask_high: float = Field(10.0, ge=0)
    """Drop completions whose geometric mean ratio is above."""
    sequence_mask_low: float = Field(0.0, ge=0)
    """Drop completions whose smallest token ratio is below."""
    sequence_mask_high: float = Field(100.0, ge=0)
    """Drop completions whose largest token ratio is above."""
    sequence_clip_high: float = Field(10.0, ge=0)
    """Cap of the ratio of a whole completion (ratio_type sequence)."""
    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantage."""
    kl_tau: float = Field(0.0, ge=0)
    """Factor of the penalty on the log ratio to the inference policy."""
    teacher_tau: float = Field(0.0, ge=0)
    """Factor of the pull towards a teacher's logprobs."""
    sequence_normalizer: Literal["step_tokens", "micro_batches"] = "step_tokens"
    """Of ratio_type sequence, whose sums are divided by the completion's loss-mask tokens first: then by those of the
    whole step (Surogate), or by the number of micro-batches (prime-rl)."""

    @model_validator(mode="after")
    def _normalizer_is_of_sequences(self) -> "SurogateLossConfig":
        if self.ratio_type == "token" and self.sequence_normalizer != "step_tokens":
            raise ValueError(f"sequence_normalizer {self.sequence_normalizer} needs ratio_type sequence, not token")
        return self

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "SurogateLossConfig":
        for mask in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{mask}_low"), getattr(self, f"{mask}_high")
            if low >= high:
                raise ValueError(f"{mask}_low {low} must be below {mask}_high {high}")
        return self


class RatioLossConfig(PolicyLossConfig):
    """What all losses have whose ratio is taken to `old`, the policy at the start of the step."""

    old_logprobs: Literal["step_start", "inference"] = "step_start"
    """`step_start`: of the trainer's weights before the step's first update (with one update per step the ratio is
    then 1 and only its gradient counts; a correction covers the way from the engine). `inference`: of the engine, so
    that clipping bounds lag and numerics too."""

    @property
    def weighs_from_engine(self) -> bool:
        """With `inference`."""
        return self.old_logprobs == "inference"


class LevelLossConfig(RatioLossConfig):
    """What the ratio is of: a token, or a whole completion."""

    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    """One ratio per token, or one per completion, from the mean of its log ratios (GSPO); `sequence_token` has the
    value of the latter and the gradient of each token (GSPO-token)."""
    advantage_level: Literal["token", "completion"] = "token"
    """Each token's own advantage, or the mean of its completion's (AReaL at level sequence); they differ only where
    the tokens of a completion have different ones."""


class ClipRangeConfig(RatioLossConfig):
    """Where the ratio is clipped."""

    epsilon: float = Field(0.2, ge=0)
    """The ratio is clipped at 1 − epsilon from below."""
    epsilon_high: float | None = Field(None, ge=0)
    """The ratio is clipped at 1 + epsilon_high from above (DAPO's clip-higher: 0.28); empty: like epsilon."""

    @property
    def upper(self) -> float:
        """epsilon_high, or epsilon where it is empty."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class ClippedLossConfig(ClipRangeConfig, LevelLossConfig):
    """PPO's clipped surrogate objective, and the switches on it."""

    delta: float | None = Field(None, gt=1)
    """Two-sided clip (INTELLECT-2): caps the ratio where the objective is not clipped; above 1 + epsilon_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Dual-clip PPO: where the advantage is negative the loss is at most dual_clip × |advantage|."""

    @model_validator(mode="after")
    def _delta_beyond_clip(self) -> "ClippedLossConfig":
        if self.delta is not None and self.delta <= 1 + self.upper:
            raise ValueError(f"delta {self.delta} must be above 1 + epsilon_high = {1 + self.upper}")
        return self


class GrpoLossConfig(ClippedLossConfig):
    """GRPO (DeepSeekMath): clipped objective, mean over the tokens of a completion, then over completions."""

    type: Literal["grpo"] = "grpo"


class BnpoLossConfig(ClippedLossConfig):
    """TRL's bnpo: the same objective, mean over the tokens of the local micro-batch."""

    type: Literal["bnpo"] = "bnpo"


class DrGrpoLossConfig(ClippedLossConfig):
    """Dr. GRPO: the same objective, sum ÷ (completions × max_completion_length): no bias by length."""

    type: Literal["dr_grpo"] = "dr_grpo"


class DapoLossConfig(ClippedLossConfig):
    """DAPO: the same objective, mean over the tokens of the whole step on all ranks."""

    type: Literal["dapo"] = "dapo"


class GspoLossConfig(ClippedLossConfig):
    """GSPO: one ratio per completion, clipped, and the mean over completions (the paper clips at 3e-4 and 4e-4)."""

    type: Literal["gspo"] = "gspo"
    importance_sampling_level: Literal["sequence"] = "sequence"
    """It is of the completion; AReaL's GSPO, which averages over tokens, is dapo with this key at sequence."""


class GspoTokenLossConfig(ClippedLossConfig):
    """GSPO-token: gspo whose tokens may have different advantages, each with its own gradient."""

    type: Literal["gspo_token"] = "gspo_token"
    importance_sampling_level: Literal["sequence_token"] = "sequence_token"
    """The value is of the completion, the gradient of the token."""


class LuspoLossConfig(ClippedLossConfig):
    """LUSPO: a completion's clipped objective × its length, mean over completions: no bias by length."""

    type: Literal["luspo"] = "luspo"
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "sequence"
    """The paper's is sequence; TRL leaves its default, token."""


class CispoLossConfig(LevelLossConfig):
    """CISPO: the capped ratio weighs the logprob and carries no gradient; mean over the tokens of the step."""

    type: Literal["cispo"] = "cispo"
    epsilon_high: float = Field(5.0, gt=0)
    """The cap of the ratio itself, not of its distance from 1 (TRL and ms-swift alike)."""


class SapoLossConfig(LevelLossConfig):
    """SAPO: a sigmoid of the ratio in place of the clip."""

    type: Literal["sapo"] = "sapo"
    temperature_pos: float = Field(1.0, gt=0)
    """Steepness of the sigmoid where the advantage is above 0."""
    temperature_neg: float = Field(1.05, gt=0)
    """Steepness where it is 0 or below."""
    average: Literal["completion_means", "step_tokens"] = "completion_means"
    """Mean over completions of the means over their tokens (TRL, ms-swift), or over the tokens of the step (AReaL)."""


class GmpoLossConfig(ClipRangeConfig):
    """GMPO: the geometric mean of a completion's ratios, each clipped on the side its advantage pushes to."""

    ignores: ClassVar[frozenset[str]] = frozenset({"correction", "off_policy_mask_threshold"})
    takes_inside: ClassVar[frozenset[str]] = frozenset({"top_entropy_quantile"})
    type: Literal["gmpo"] = "gmpo"
    epsilon: float = Field(0.4, ge=0)
    """The log ratio is clipped at −epsilon from below."""
    epsilon_high: float | None = Field(None, ge=0)
    """The log ratio is clipped at epsilon_high from above; empty: like epsilon."""


class RlooLossConfig(ClipRangeConfig):
    """RLOO as in TRL: the ratio of a completion's probabilities, clipped, mean over completions."""

    type: Literal["rloo"] = "rloo"


class VespoLossConfig(RatioLossConfig):
    """VESPO: exp(λ + k·log w − λ·w) weighs the logprobs, w being the ratio of the whole completion."""

    takes_inside: ClassVar[frozenset[str]] = frozenset({"correction"})
    type: Literal["vespo"] = "vespo"
    k_pos: float = 2.0
    """Exponent of w where the advantage is 0 or above."""
    lambda_pos: float = 3.0
    """Decay of w there; below 1e-4 it counts as that."""
    k_neg: float = 3.0
    """Exponent of w where the advantage is below 0."""
    lambda_neg: float = 2.0
    """Decay of w there."""


class CustomLossConfig(PolicyLossConfig):
    """Your own: a function `(LossInputs) -> LossOutput` of actors.algorithms.losses.

    It gives this micro-batch's share of the step's loss, so no switch acts on it and none may be set; with `reference`
    it finds the reference's logprobs in its inputs, and what becomes of them is its affair.
    """

    type: Literal["custom"] = "custom"
    path: FunctionPath
    """package.module:function or file.py:function."""


class IpoLossConfig(EngineRatioLossConfig):
    """INTELLECT policy optimisation: a token is dropped where its probability moved too far, up or down."""

    type: Literal["ipo"] = "ipo"
    ipo_mask_low: float = Field(0.2, ge=0)
    """Drop tokens whose probability is lower than the engine's by more than this (prime-rl: 0.1 both ways)."""
    ipo_mask_high: float = Field(0.2, ge=0)
    """Drop tokens whose probability is higher than the engine's by more than this."""
    ratio_clip: float | None = Field(math.exp(2), gt=0)
    """Cap of the importance ratio, which does not stop the gradient (Surogate: e²); empty: none (prime-rl)."""
    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantage."""
    kl_tau: float = Field(1e-3, ge=0)
    """Factor of the squared log ratio, also on tokens that are dropped."""
    teacher_tau: float = Field(0.0, ge=0)
    """Factor of the pull towards a teacher's logprobs (Surogate)."""


class DppoLossConfig(EngineRatioLossConfig):
    """DPPO, prime-rl's default: a token is dropped where its probability moved too far the way its advantage points."""

    type: Literal["dppo"] = "dppo"
    dppo_mask_low: float = Field(0.2, ge=0)
    """Drop tokens with an advantage of 0 or less whose probability is lower than the engine's by more than this."""
    dppo_mask_high: float = Field(0.2, ge=0)
    """Drop tokens with an advantage above 0 whose probability is higher than the engine's by more than this."""
    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantage."""
    kl_tau: float = Field(1e-3, ge=0)
    """Factor of the squared log ratio, also on tokens that are dropped."""
    teacher_tau: float = Field(0.0, ge=0)
    """Factor of the pull towards a teacher's logprobs."""


class AipoLossConfig(EngineRatioLossConfig):
    """AIPO (LlamaRL): advantage × importance ratio, which is capped; mean over the tokens of the step."""

    type: Literal["aipo"] = "aipo"
    token_mask_high: float = Field(8.0, gt=0)
    """Cap of the importance ratio."""
    above_cap: Literal["stop", "weigh"] = "stop"
    """Tokens above the cap get no gradient, that of the minimum (prime-rl); or that of a weight as large as the cap
    (LlamaRL)."""


class RefKlLossConfig(EngineRatioLossConfig):
    """On-policy distillation towards `trainer.teacher`, prime-rl's ref_kl: the reverse KL in place of the advantage."""

    type: Literal["ref_kl"] = "ref_kl"
    trust_region: Literal["low", "advantage"] = "low"
    """Drop tokens whose probability is lower than the engine's by more than 0.2; or like dppo, by the sign of the
    advantage, which the objective does not read (prime-rl's first version)."""
    kl_tau: float = Field(1e-3, ge=0)
    """Factor of the squared log ratio, also on tokens that are dropped."""


class RejectionConfig(Section):
    """Which tokens are too far from what sampled them: a metric of proximal policy and engine, and its bounds."""

    level: Literal["token", "sequence"] = "token"
    """Each token is judged, or each completion."""
    action: Literal["mask", "clamp"] = "mask"
    """What is outside is dropped, or its weight is clamped into the bounds (metric ratio only)."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    """With d = proximal − inference: exp(d), d, d²/2, exp(−d) − 1 + d."""
    agg: Literal["sum", "mean", "max"] = "mean"
    """Of level sequence: how a completion's tokens become one; of ratios, their logs (mean: the geometric mean)."""
    upper: float = 5.0
    """Upper bound."""
    lower: float | None = None
    """Lower bound; empty: none."""

    @model_validator(mode="after")
    def _metric_fits(self) -> "RejectionConfig":
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(f"action clamp needs metric ratio, not {self.metric}: weights are ratios; use action mask")
        if self.level == "token" and self.agg != "mean":
            raise ValueError(f"agg {self.agg} needs level sequence, not token")
        return self

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "RejectionConfig":
        least = {"ratio": 1.0, "kl_k1": -math.inf}.get(self.metric, 0.0)
        if self.upper <= least:
            raise ValueError(f"upper {self.upper} must be above {least} with metric {self.metric}")
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower {self.lower} must not exceed upper {self.upper}")
        if self.metric == "ratio" and self.lower is not None and self.lower <= 0:
            raise ValueError(f"lower {self.lower} must be above 0 with metric ratio")
        return self


class ProximalLossConfig(EngineRatioLossConfig):
    """What AReaL's losses have: PPO's clipped objective around a proximal policy, weighted for what sampled."""

    epsilon: float = Field(0.2, ge=0)
    """The ratio is clipped at 1 − epsilon from below."""
    epsilon_high: float | None = Field(None, ge=0)
    """The ratio is clipped at 1 + epsilon_high from above; empty: like epsilon."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative the loss is at most dual_clip × |advantage| (AReaL's c_clip)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One ratio per token; or one per completion, from the mean of its log ratios, with the mean of its advantages."""
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """Proximal logprobs: those of the weights that the step starts from; or taken as lying between the engine's and
    the trainer's, by how many versions old a token is."""
    rejection_sampling: RejectionConfig | None = None
    """Behaviour weights exp(proximal − inference), and which of them are too large; empty: no weights at all."""

    @property
    def upper(self) -> float:
        """epsilon_high, or epsilon where it is empty."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class DecoupledLossConfig(ProximalLossConfig):
    """AReaL's decoupled PPO; what rejection drops stays in the normaliser."""

    type: Literal["decoupled"] = "decoupled"


class M2poLossConfig(ProximalLossConfig):
    """M2PO: the same without the tokens of largest (inference − proximal)², whose mean is held below a bound.

    Dropped tokens leave the normaliser. Each micro-batch is judged by itself.
    """

    type: Literal["m2po"] = "m2po"
    m2_threshold: float = Field(0.04, gt=0)
    """Bound of the mean square (0.04 in the paper)."""


LossConfig = Annotated[
    SurogateLossConfig
    | GrpoLossConfig
    | BnpoLossConfig
    | DrGrpoLossConfig
    | DapoLossConfig
    | GspoLossConfig
    | GspoTokenLossConfig
    | LuspoLossConfig
    | CispoLossConfig
    | SapoLossConfig
    | GmpoLossConfig
    | RlooLossConfig
    | VespoLossConfig
    | CustomLossConfig
    | IpoLossConfig
    | DppoLossConfig
    | AipoLossConfig
    | RefKlLossConfig
    | DecoupledLossConfig
    | M2poLossConfig,
    Field(discriminator="type"),
]
