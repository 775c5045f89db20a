"""Keys of `reward.advantage`: formulas from rewards to advantages (docs/reference/advantages.md). One class per `type`.

The property `level` decides where an advantage is computed: `group` and `token` from one group, by the reward actor;
`step` from all groups of a training step, by the packer. An unscorable completion (every function returned None) has
advantage 0 and is left out of all means and deviations.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.config.base import FunctionPath, Section

Level = Literal["group", "step", "token"]
Scale = Literal["none", "group", "batch"]


class NormConfig(Section):
    """Normalisation (x − mean) ÷ (std + eps), mean and std each over the step, over the group, or absent (AReaL)."""

    mean_level: Literal["batch", "group", "none"] = "batch"
    """Range of the mean to subtract: all groups of the step (`batch`), the own group, or `none` for no mean."""
    mean_leave1out: bool = False
    """Leave-one-out mean: the mean subtracted from a value is over the other values only."""
    std_level: Literal["batch", "group", "none"] = "batch"
    """Range of the standard deviation to divide by: all groups of the step (`batch`), the own group, or `none` for no
    division."""
    std_unbiased: bool = True
    """Unbiased standard deviation (divisor n − 1). `false`: population (divisor n)."""
    eps: float = Field(1e-5, ge=0)
    """Number added to the standard deviation."""


class AdvantageBase(Section):
    """Base of all advantages."""

    @property
    def level(self) -> Level:
        """Range of the computation: `token` has one advantage per token, `group` and `step` one per completion."""
        return "group"


class DeviationConfig(AdvantageBase):
    """Base of advantages divided by a standard deviation."""

    std: Literal["unbiased", "population"] = "unbiased"
    """Kind of standard deviation: `unbiased` (TRL, ms-swift, AReaL) or `population` (TRL's AsyncGRPOTrainer)."""
    eps: float = Field(1e-4, ge=0)
    """Number added to the standard deviation. TRL and ms-swift: 1e-4; AReaL: 1e-5; TRL's AsyncGRPOTrainer: 1e-8."""


class ScaledConfig(DeviationConfig):
    """Base of advantages with a choice of the range of their standard deviation."""

    scale: Scale = "none"
    """Range of the standard deviation to divide by: the group, the batch (all groups of a step), or `none` for no
    division."""

    @property
    def level(self) -> Level:
        """`step` if the deviation is over the batch, known only when the step is composed; else `group`."""
        return "step" if self.scale == "batch" else "group"


class MeanAdvantageConfig(AdvantageBase):
    """Reward minus group mean (Surogate's default; Dr. GRPO)."""

    type: Literal["mean"] = "mean"


class LengthWeightedMeanAdvantageConfig(AdvantageBase):
    """Reward minus group mean weighted by length, Σ(r·L) ÷ ΣL with L tokens (Surogate, prime-rl)."""

    type: Literal["length_weighted_mean"] = "length_weighted_mean"


class ZScoreAdvantageConfig(DeviationConfig):
    """z-score in the group, (reward − mean) ÷ (std + eps) (GRPO)."""

    type: Literal["zscore"] = "zscore"


class BatchStdAdvantageConfig(DeviationConfig):
    """(reward − group mean) ÷ (std of all rewards of the step + eps) (TRL's scale_rewards: batch)."""

    type: Literal["batch_std"] = "batch_std"

    @property
    def level(self) -> Level:
        """`step`: the deviation is over all groups of the step."""
        return "step"


class NormAdvantageConfig(AdvantageBase, NormConfig):
    """Normalised rewards, mean and deviation each over step or group (AReaL's reward_norm, with the same keys)."""

    type: Literal["norm"] = "norm"

    @property
    def level(self) -> Level:
        """`step`: mean and deviation may be over all groups of the step."""
        return "step"


class RlooAdvantageConfig(ScaledConfig):
    """Reward minus the mean of the other rewards of the group (RLOO)."""

    type: Literal["rloo"] = "rloo"
    std_of: Literal["rewards", "advantages"] = "rewards"
    """Values of the standard deviation, if `scale` is not none: the rewards (ms-swift), or the advantages (TRL's
    normalize_advantages, with scale `batch`)."""


class ReinforcePPAdvantageConfig(ScaledConfig):
    """(reward − group mean) ÷ (std of all these differences + eps) (REINFORCE++ with a baseline, as in ms-swift)."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    scale: Scale = "batch"
    """Range of the standard deviation to divide by: the batch (all groups of a step), the group, or `none` for no
    division."""


class GdpoAdvantageConfig(DeviationConfig):
    """z-score per reward function in the group, weighted sum, then z-score over the step (GDPO).

    TRL's name is multi_objective_aggregation: normalize_then_sum, ms-swift's is scale_rewards: gdpo.
    """

    type: Literal["gdpo"] = "gdpo"
    eps: float = Field(1e-8, ge=0)
    """Number added to each standard deviation. ms-swift: 1e-8; TRL: 1e-4."""

    @property
    def level(self) -> Level:
        """`step`: the second z-score is over all groups of the step."""
        return "step"


class MaxRLAdvantageConfig(AdvantageBase):
    """(reward − mean) ÷ (mean + eps) in the group, 0 if the mean is not positive; for rewards ≥ 0 (MaxRL)."""

    type: Literal["max_rl"] = "max_rl"
    eps: float = Field(0.0, ge=0)
    """Number added to the mean in the denominator. 1e-4 in TRL's development versions (scale_rewards: mean)."""


class ProcessAdvantageConfig(DeviationConfig):
    """Process supervision: at each token the sum of the rewards of steps that end there or later (DeepSeekMath).

    Step rewards enter as z-scores over all steps of the group. Needs `reward.steps`; `reward.functions` are then
    measured and do not count.
    """

    type: Literal["process"] = "process"
    discount: float = Field(1.0, ge=0, le=1)
    """Factor of a step's reward for each step before it; with rewards of turns, the discount along the turns."""
    discount_along: Literal["turns", "parents"] = "turns"
    """Turns whose rewards a turn has, beside its own: all later ones (`turns`, AReaL), or those that continue it, token
    by token (`parents`), so that the turns of one helper have no rewards of another. A trajectory without branches is
    the same in both."""

    @property
    def level(self) -> Level:
        """`token`: the tokens of each step have their own advantage."""
        return "token"


class GaeAdvantageConfig(AdvantageBase):
    """Generalised advantage estimation (GAE) without a critic: values are 0, the reward is discounted from the end.

    The reward is at the completion's last token in the loss. Rewards of `reward.steps`, if set, are at the ends of the
    steps.
    """

    type: Literal["gae"] = "gae"
    discount: float = Field(1.0, ge=0, le=1)
    """Discount factor γ per token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Factor λ per token. Without a critic only the product γ·λ has an effect."""
    reward_norm: Literal["none", "mean", "zscore"] = "none"
    """Normalisation of rewards before GAE: `none`, minus the group mean (`mean`), or z-score in the group (`zscore`,
    AReaL's reward_norm with unbiased std and eps 1e-5)."""

    @property
    def level(self) -> Level:
        """`token`: the discount depends on a token's distance from the end."""
        return "token"


class CustomAdvantageConfig(AdvantageBase):
    """A function `f(rewards, lengths, **kwargs)` from two arrays (P, G) to an array (P, G) of finite advantages.

    P is the number of groups, G of completions; lengths are in tokens. The function is called for one group at a time
    (P = 1), with the scored completions only, and not if fewer than two are scored.
    """

    type: Literal["custom"] = "custom"
    path: FunctionPath
    """Path to the function, `package.module:function` or `path/to/file.py:function`, looked up like
    `reward.functions[].path`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of each call."""


AdvantageConfig = Annotated[
    MeanAdvantageConfig
    | LengthWeightedMeanAdvantageConfig
    | ZScoreAdvantageConfig
    | BatchStdAdvantageConfig
    | NormAdvantageConfig
    | RlooAdvantageConfig
    | ReinforcePPAdvantageConfig
    | GdpoAdvantageConfig
    | MaxRLAdvantageConfig
    | ProcessAdvantageConfig
    | GaeAdvantageConfig
    | CustomAdvantageConfig,
    Field(discriminator="type"),
]
