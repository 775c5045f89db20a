"""Keys of `trainer.loss`, the policy loss (docs/reference/losses.md). One class per `type`."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.config.base import FunctionPath, Section


class CompatConfig(Section):
    """Details of the loss in which other systems differ, for runs that reproduce the numbers of another system.

    The defaults suit all other runs.
    """

    loss_normalizer: Literal["minibatch", "step_mean"] = "minibatch"
    """Divisor of losses averaged over step tokens, with `trainer.num_minibatches` above 1. `minibatch`: the loss tokens
    of the minibatch. `step_mean`: the mean number of loss tokens of the step's minibatches (TRL's
    num_items_in_batch)."""
    entropy_average: Literal["step_tokens", "micro_batch_tokens"] = "step_tokens"
    """Average of the entropy bonus (`trainer.entropy_coef`). `step_tokens`: over all tokens of the step.
    `micro_batch_tokens`: over micro-batches of their token means (TRL)."""
    off_policy_tokens: Literal["count", "leave"] = "count"
    """Treatment of tokens dropped by the off-policy mask (`trainer.off_policy_mask_threshold`). `count`: counted in the
    loss's denominator (TRL). `leave`: not counted (ms-swift). Affects loss `bnpo`, and losses averaged over completion
    means if the tokens of a completion have different advantages."""


class LevelCompatConfig(CompatConfig):
    """Compatibility of losses with a ratio per token or per completion."""

    advantage_level: Literal["token", "completion"] = "token"
    """Advantage of a token. `token`: of the token itself. `completion`: the mean over the completion (AReaL at
    importance_sampling_level sequence). Both are equal unless tokens of a completion have different advantages."""


class SurogateCompatConfig(CompatConfig):
    """Compatibility of loss surogate."""

    sequence_normalizer: Literal["step_tokens", "micro_batches"] = "step_tokens"
    """Second divisor, with ratio_type `sequence`: a completion's sum is divided by its tokens, then by the loss tokens
    of the step (Surogate) or by the number of micro-batches (prime-rl)."""


class AipoCompatConfig(CompatConfig):
    """Compatibility of loss aipo."""

    above_cap: Literal["stop", "weigh"] = "stop"
    """Gradient of tokens above the cap of the ratio. `stop`: none, as of a minimum (prime-rl). `weigh`: the gradient
    with the cap as the token's weight (LlamaRL)."""


class RefKlCompatConfig(CompatConfig):
    """Compatibility of loss ref_kl."""

    trust_region: Literal["low", "advantage"] = "low"
    """Rule for dropping tokens. `low`: a fall of the probability by more than 0.2 from engine to trainer. `advantage`:
    as in loss dppo with bounds 0.2, by the sign of the advantage, although the objective does not read advantages
    (prime-rl's first version)."""


class PolicyLossConfig(Section):
    """Base of all losses: how modifiers of the objective act on them. Class variables are not keys of the file."""

    ignores: ClassVar[frozenset[str]] = frozenset()
    """Modifiers without effect on this loss; `actors check` warns of them."""
    takes_inside: ClassVar[frozenset[str]] = frozenset()
    """Modifiers inside this loss's own formula, not applied to its result."""
    compat: CompatConfig = CompatConfig()
    """Details to reproduce the numbers of another system. The defaults suit all other runs."""

    @property
    def weighs_from_engine(self) -> bool:
        """True if the importance ratio is to the engine's policy: `correction` would count the gap twice."""
        return False


class EngineRatioLossConfig(PolicyLossConfig):
    """Base of losses with an importance ratio between trainer and engine, r = exp(logp − q)."""

    @property
    def weighs_from_engine(self) -> bool:
        """Always true."""
        return True


class SurogateLossConfig(EngineRatioLossConfig):
    """Surogate's documented GRPO loss: importance-weighted policy gradient, masked outside a trust region."""

    type: Literal["surogate"] = "surogate"
    ratio_type: Literal["token", "sequence"] = "token"
    """Unit of the importance ratio: one per token, or one per completion (`sequence`)."""
    token_mask_low: float = Field(0.125, ge=0)
    """Ratio below which a token is dropped."""
    token_mask_high: float = Field(8.0, ge=0)
    """Ratio above which a token is dropped."""
    geo_mask_low: float = Field(0.1, ge=0)
    """Geometric mean of the token ratios below which a completion is dropped."""
    geo_mask_high: float = Field(10.0, ge=0)
    """Geometric mean of the token ratios above which a completion is dropped."""
    sequence_mask_low: float = Field(0.0, ge=0)
    """Smallest token ratio below which a completion is dropped."""
    sequence_mask_high: float = Field(100.0, ge=0)
    """Largest token ratio above which a completion is dropped."""
    sequence_clip_high: float = Field(10.0, ge=0)
    """Cap of the ratio of a completion, with ratio_type `sequence`."""
    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantage."""
    kl_tau: float = Field(0.0, ge=0)
    """Factor of the penalty on a token's log ratio of trainer to engine; the product is subtracted from the
    advantage."""
    teacher_tau: float = Field(0.0, ge=0)
    """Factor of the pull towards `trainer.teacher`: teacher_tau × (teacher − logp) is added to the advantage
    (Surogate)."""
    compat: SurogateCompatConfig = SurogateCompatConfig()
    """Details to reproduce the numbers of another system. The defaults suit all other runs."""

    @model_validator(mode="after")
    def _normalizer_is_of_sequences(self) -> "SurogateLossConfig":
        divisor = self.compat.sequence_normalizer
        if self.ratio_type == "token" and divisor != "step_tokens":
            raise ValueError(f"compat.sequence_normalizer {divisor} needs ratio_type sequence, not token")
        return self

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "SurogateLossConfig":
        for mask in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{mask}_low"), getattr(self, f"{mask}_high")
            if low >= high:
                raise ValueError(f"{mask}_low {low} must be below {mask}_high {high}")
        return self


class RatioLossConfig(PolicyLossConfig):
    """Base of losses with an importance ratio ρ = exp(logp − old), `old` chosen by `old_logprobs`."""

    old_logprobs: Literal["step_start", "inference"] = "step_start"
    """Denominator `old` of the ratio. `step_start`: the trainer's logprobs before the step's first update; with one
    update per step the ratio is 1 and only its gradient counts, and `trainer.correction` may cover the gap to the
    engine. `inference`: the engine's logprobs, so that clipping also bounds lag and numerical differences; not with
    `trainer.correction`."""

    @property
    def weighs_from_engine(self) -> bool:
        """True with `old_logprobs: inference`."""
        return self.old_logprobs == "inference"


class LevelLossConfig(RatioLossConfig):
    """Base of losses with a ratio per token or per completion."""

    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    """Unit of the ratio. `token`: one per token. `sequence`: one per completion, exp of the mean log ratio (GSPO).
    `sequence_token`: the value of `sequence` with the gradient of each token (GSPO-token)."""
    compat: LevelCompatConfig = LevelCompatConfig()
    """Details to reproduce the numbers of another system. The defaults suit all other runs."""


class ClipRangeConfig(RatioLossConfig):
    """Base of losses with a clipped ratio: the clip range."""

    epsilon: float = Field(0.2, ge=0)
    """Lower clip range: the ratio is clipped at 1 − epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip range: the ratio is clipped at 1 + epsilon_high (DAPO's clip-higher: 0.28). Empty: epsilon."""

    @property
    def upper(self) -> float:
        """Upper clip range: epsilon_high, or epsilon if epsilon_high is empty."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class ClippedLossConfig(LevelLossConfig, ClipRangeConfig):
    """Base of losses with PPO's clipped surrogate objective, −min(ρA, clip(ρ)·A)."""

    delta: float | None = Field(None, gt=1)
    """Cap of the ratio for negative advantages, where the clip has no effect on large ratios (INTELLECT-2's two-sided
    clip); above 1 + epsilon_high. Empty: none."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of a token's loss at negative advantage, dual_clip × |advantage| (dual-clip PPO; AReaL: c_clip). Empty:
    none."""

    @model_validator(mode="after")
    def _delta_beyond_clip(self) -> "ClippedLossConfig":
        if self.delta is not None and self.delta <= 1 + self.upper:
            raise ValueError(f"delta {self.delta} must be above 1 + epsilon_high = {1 + self.upper}")
        return self


class GrpoLossConfig(ClippedLossConfig):
    """GRPO (DeepSeekMath): clipped objective, mean over the tokens of a completion, then over completions."""

    type: Literal["grpo"] = "grpo"


class BnpoLossConfig(ClippedLossConfig):
    """BNPO (TRL): GRPO's clipped objective, mean over the tokens of the local micro-batch."""

    type: Literal["bnpo"] = "bnpo"


class DrGrpoLossConfig(ClippedLossConfig):
    """Dr. GRPO: GRPO's clipped objective, sum ÷ (completions × `rollout.max_tokens`), without bias by length."""

    type: Literal["dr_grpo"] = "dr_grpo"


class DapoLossConfig(ClippedLossConfig):
    """DAPO: GRPO's clipped objective, mean over the tokens of the whole step on all ranks."""

    type: Literal["dapo"] = "dapo"


class GspoLossConfig(ClippedLossConfig):
    """GSPO: one clipped ratio per completion, mean over completions (the paper clips at 3e-4 and 4e-4)."""

    type: Literal["gspo"] = "gspo"
    importance_sampling_level: Literal["sequence"] = "sequence"
    """Unit of the ratio: always the completion. AReaL's GSPO averages over tokens; use loss dapo with this key at
    `sequence`."""


class GspoTokenLossConfig(ClippedLossConfig):
    """GSPO-token: GSPO with an advantage and a gradient per token."""

    type: Literal["gspo_token"] = "gspo_token"
    importance_sampling_level: Literal["sequence_token"] = "sequence_token"
    """Unit of the ratio: always the value of the completion with the gradient of each token."""


class LuspoLossConfig(ClippedLossConfig):
    """LUSPO: a completion's clipped objective × its length, mean over completions, without bias by length."""

    type: Literal["luspo"] = "luspo"
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "sequence"
    """Unit of the ratio, as for the other losses. The paper has `sequence`; TRL's default is `token`."""


class CispoLossConfig(LevelLossConfig):
    """CISPO: the logprob weighted with the capped ratio, which has no gradient; mean over the tokens of the step."""

    type: Literal["cispo"] = "cispo"
    epsilon_high: float = Field(5.0, gt=0)
    """Cap of the ratio itself, not of its distance from 1, as in TRL and ms-swift."""


class SapoLossConfig(LevelLossConfig):
    """SAPO: a sigmoid of the ratio instead of the clip; mean as `average` says."""

    type: Literal["sapo"] = "sapo"
    temperature_pos: float = Field(1.0, gt=0)
    """Steepness of the sigmoid for advantages above 0."""
    temperature_neg: float = Field(1.05, gt=0)
    """Steepness of the sigmoid for advantages of 0 or below."""
    average: Literal["completion_means", "step_tokens"] = "completion_means"
    """Average of the loss: over completions of their token means (TRL, ms-swift), or over the tokens of the step
    (AReaL)."""


class GmpoLossConfig(ClipRangeConfig):
    """GMPO: geometric mean of a completion's ratios, each clipped on the side that its advantage pushes to."""

    ignores: ClassVar[frozenset[str]] = frozenset({"correction", "off_policy_mask_threshold"})
    takes_inside: ClassVar[frozenset[str]] = frozenset({"top_entropy_quantile"})
    type: Literal["gmpo"] = "gmpo"
    epsilon: float = Field(0.4, ge=0)
    """Lower clip range: the log ratio is clipped at −epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip range: the log ratio is clipped at epsilon_high. Empty: epsilon."""


class RlooLossConfig(ClipRangeConfig):
    """RLOO's loss (TRL): clipped ratio of a completion's probabilities, mean over completions."""

    type: Literal["rloo"] = "rloo"


class VespoLossConfig(RatioLossConfig):
    """VESPO: logprobs weighted with exp(λ + k·log w − λ·w), w the ratio of the whole completion."""

    takes_inside: ClassVar[frozenset[str]] = frozenset({"correction"})
    type: Literal["vespo"] = "vespo"
    k_pos: float = 2.0
    """Exponent k of w for advantages of 0 or above."""
    lambda_pos: float = 3.0
    """Decay λ of w for advantages of 0 or above. Values below 1e-4 count as 1e-4."""
    k_neg: float = 3.0
    """Exponent k of w for advantages below 0."""
    lambda_neg: float = 2.0
    """Decay λ of w for advantages below 0. Values below 1e-4 count as 1e-4."""


class CustomLossConfig(PolicyLossConfig):
    """Your own loss: a function `(LossInputs) -> LossOutput`, types of actors.algorithms.losses.

    The function returns this micro-batch's share of the step's loss. Corrections, masks, entropy terms and distillation
    do not act on the result, so none of their keys may be set. With `trainer.reference` the function finds the
    reference's logprobs in its inputs.
    """

    type: Literal["custom"] = "custom"
    path: FunctionPath
    """Path to the function, `package.module:function` or `path/to/file.py:function`, looked up like
    `reward.functions[].path`."""


class IpoLossConfig(EngineRatioLossConfig):
    """IPO (INTELLECT policy optimisation): tokens are dropped if their probability moved too far, up or down."""

    type: Literal["ipo"] = "ipo"
    ipo_mask_low: float = Field(0.2, ge=0)
    """Fall of a token's probability, from engine to trainer, above which the token is dropped (prime-rl: 0.1)."""
    ipo_mask_high: float = Field(0.2, ge=0)
    """Rise of a token's probability, from engine to trainer, above which the token is dropped (prime-rl: 0.1)."""
    ratio_clip: float | None = Field(math.exp(2), gt=0)
    """Cap of the importance ratio, without stopping the gradient (Surogate: e²). Empty: none (prime-rl)."""
    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantage."""
    kl_tau: float = Field(1e-3, ge=0)
    """Factor of the squared log ratio of trainer to engine, added to the loss of kept and dropped tokens."""
    teacher_tau: float = Field(0.0, ge=0)
    """Factor of the pull towards `trainer.teacher`: teacher_tau × (teacher − logp) is added to the advantage
    (Surogate)."""


class DppoLossConfig(EngineRatioLossConfig):
    """DPPO (prime-rl's default): tokens are dropped if their probability moved too far in the advantage's direction."""

    type: Literal["dppo"] = "dppo"
    dppo_mask_low: float = Field(0.2, ge=0)
    """Fall of a token's probability, from engine to trainer, above which a token with an advantage of 0 or less is
    dropped."""
    dppo_mask_high: float = Field(0.2, ge=0)
    """Rise of a token's probability, from engine to trainer, above which a token with an advantage above 0 is
    dropped."""
    adv_tau: float = Field(1.0, ge=0)
    """Factor of the advantage."""
    kl_tau: float = Field(1e-3, ge=0)
    """Factor of the squared log ratio of trainer to engine, added to the loss of kept and dropped tokens."""
    teacher_tau: float = Field(0.0, ge=0)
    """Factor of the pull towards `trainer.teacher`: teacher_tau × (teacher − logp) is added to the advantage
    (Surogate)."""


class AipoLossConfig(EngineRatioLossConfig):
    """AIPO (LlamaRL): advantage × capped importance ratio, mean over the tokens of the step."""

    type: Literal["aipo"] = "aipo"
    token_mask_high: float = Field(8.0, gt=0)
    """Cap of the importance ratio."""
    compat: AipoCompatConfig = AipoCompatConfig()
    """Details to reproduce the numbers of another system. The defaults suit all other runs."""


class RefKlLossConfig(EngineRatioLossConfig):
    """On-policy distillation towards `trainer.teacher` (prime-rl's ref_kl): the reverse KL instead of the advantage."""

    type: Literal["ref_kl"] = "ref_kl"
    kl_tau: float = Field(1e-3, ge=0)
    """Factor of the squared log ratio of trainer to engine, added to the loss of kept and dropped tokens."""
    compat: RefKlCompatConfig = RefKlCompatConfig()
    """Details to reproduce the numbers of another system. The defaults suit all other runs."""


class RejectionConfig(Section):
    """Rejection sampling (AReaL): bounds of a metric between the proximal policy and the engine."""

    level: Literal["token", "sequence"] = "token"
    """Unit that is kept or rejected: each token, or each completion (`sequence`)."""
    action: Literal["mask", "clamp"] = "mask"
    """Treatment of tokens outside the bounds. `mask`: dropped. `clamp`: their weight is clamped into the bounds (metric
    `ratio` only)."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    """Metric of a token, from d, the proximal policy's logprob minus the engine's: `ratio` exp(d), `kl_k1` d, `kl_k2`
    d²/2, `kl_k3` exp(−d) − 1 + d."""
    agg: Literal["sum", "mean", "max"] = "mean"
    """Aggregation over a completion's tokens, with level `sequence`. Ratios are aggregated as logs, so `mean` is the
    geometric mean."""
    upper: float = 5.0
    """Upper bound of the metric; above 1 with metric `ratio`, above 0 with `kl_k2` and `kl_k3`."""
    lower: float | None = None
    """Lower bound of the metric. Empty: none."""

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
    """Base of AReaL's losses: PPO's clipped objective around a proximal policy, weighted for the gap to the engine."""

    epsilon: float = Field(0.2, ge=0)
    """Lower clip range: the ratio is clipped at 1 − epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip range: the ratio is clipped at 1 + epsilon_high (DAPO's clip-higher: 0.28). Empty: epsilon."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of a token's loss at negative advantage, dual_clip × |advantage| (dual-clip PPO; AReaL: c_clip). Empty:
    none."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Unit of the ratio. `token`: one per token. `sequence`: one per completion, exp of the mean log ratio, with the
    mean of the completion's advantages."""
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """Source of the proximal logprobs. `recompute`: a forward pass of the weights that the step starts from.
    `loglinear`: interpolation between the engine's and the trainer's logprobs by a token's age in versions."""
    rejection_sampling: RejectionConfig | None = None
    """Bounds of the behaviour weights, the ratios of the proximal policy to the engine. Empty: no behaviour weights at
    all."""

    @property
    def upper(self) -> float:
        """Upper clip range: epsilon_high, or epsilon if epsilon_high is empty."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class DecoupledLossConfig(ProximalLossConfig):
    """Decoupled PPO (AReaL): clipped around a proximal policy; rejected tokens stay in the loss's denominator."""

    type: Literal["decoupled"] = "decoupled"


class M2poLossConfig(ProximalLossConfig):
    """M2PO: decoupled PPO without the tokens of largest (q − prox)².

    As few tokens are dropped as needed for a mean of (q − prox)² below m2_threshold over the others, separately in each
    micro-batch. q is the engine's logprob, prox the proximal policy's. Dropped tokens leave the loss's denominator.
    """

    type: Literal["m2po"] = "m2po"
    m2_threshold: float = Field(0.04, gt=0)
    """Bound of the mean of (q − prox)² (0.04 in the paper)."""


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
