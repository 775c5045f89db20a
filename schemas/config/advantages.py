"""How rewards become advantages: a union told apart by `type` (docs/algorithms.md).

`level` says what an advantage is computed over, and so where: `group` and `token` from one group, by the reward actor;
`step` from all groups of a training step, by the packer. A completion that no function scored has advantage 0 and is in
no mean and no deviation.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.config.base import FunctionPath, Section

Level = Literal["group", "step", "token"]
Scale = Literal["none", "group", "batch"]


class AdvantageBase(Section):
    """What all of them have."""

    @property
    def level(self) -> Level:
        """`token` has one value per token, the others one per completion."""
        return "group"


class DeviationConfig(AdvantageBase):
    """What all of them have that divide by a standard deviation."""

    std: Literal["unbiased", "population"] = "unbiased"
    """TRL, ms-swift and AReaL use unbiased; TRL's async trainer population."""
    eps: float = Field(1e-4, ge=0)
    """Added to the deviation. TRL and ms-swift 1e-4; AReaL 1e-5; TRL async 1e-8."""


class ScaledConfig(DeviationConfig):
    """What those have whose deviation is a choice."""

    scale: Scale = "none"
    """Divide by the standard deviation over the group, over the batch (all groups of a step), or not at all."""

    @property
    def level(self) -> Level:
        """A deviation over the batch is known when the step is."""
        return "step" if self.scale == "batch" else "group"


class MeanAdvantageConfig(AdvantageBase):
    """Reward minus the mean of its group (Surogate's default; Dr. GRPO)."""

    type: Literal["mean"] = "mean"


class LengthWeightedMeanAdvantageConfig(AdvantageBase):
    """Reward minus the mean of its group weighted by tokens, Σ(r·L) ÷ ΣL (Surogate, prime-rl)."""

    type: Literal["length_weighted_mean"] = "length_weighted_mean"


class ZScoreAdvantageConfig(DeviationConfig):
    """(reward − mean) / (std + eps) inside the group (GRPO); `batch_std` has the std of the batch."""

    type: Literal["zscore"] = "zscore"


class BatchStdAdvantageConfig(DeviationConfig):
    """(reward − mean of its group) / (std of all rewards of the step + eps) (TRL's scale_rewards: batch)."""

    type: Literal["batch_std"] = "batch_std"

    @property
    def level(self) -> Level:
        """The deviation is the step's."""
        return "step"


class RlooAdvantageConfig(ScaledConfig):
    """Reward minus the mean of the others of its group (RLOO)."""

    type: Literal["rloo"] = "rloo"
    std_of: Literal["rewards", "advantages"] = "rewards"
    """With `scale`: ms-swift takes the deviation of the rewards; TRL's normalize_advantages, over the batch, that of
    the advantages."""


class ReinforcePPAdvantageConfig(ScaledConfig):
    """(reward − mean of its group) ÷ (std of these differences + eps) (REINFORCE++ with a baseline, as in ms-swift)."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    scale: Scale = "batch"
    """Over what the deviation is taken: the batch (all groups of a step), the group, or none."""


class GdpoAdvantageConfig(DeviationConfig):
    """z-score per reward function inside the group, weighted sum, then z-score over the step (GDPO).

    TRL calls it multi_objective_aggregation: normalize_then_sum, ms-swift scale_rewards: gdpo.
    """

    type: Literal["gdpo"] = "gdpo"
    eps: float = Field(1e-8, ge=0)
    """Added to each deviation. ms-swift 1e-8; TRL 1e-4."""

    @property
    def level(self) -> Level:
        """The last z-score is over the step."""
        return "step"


class MaxRLAdvantageConfig(AdvantageBase):
    """(reward − mean) ÷ mean of its group, 0 where that is not positive; for rewards of 0 and above (MaxRL)."""

    type: Literal["max_rl"] = "max_rl"


class ProcessAdvantageConfig(DeviationConfig):
    """Process supervision (DeepSeekMath): at each token the sum of step rewards that come at it or later.

    Step rewards are z-scores over all steps of the group. Needs `reward.steps`; `reward.functions` then only measure.
    """

    type: Literal["process"] = "process"

    @property
    def level(self) -> Level:
        """Each step's tokens have their own."""
        return "token"


class GaeAdvantageConfig(AdvantageBase):
    """Generalised advantage estimation with values 0, for there is no critic: the reward, discounted from the end.

    It is at the last token in the loss; those of `reward.steps`, where given, are where the steps end.
    """

    type: Literal["gae"] = "gae"
    discount: float = Field(1.0, ge=0, le=1)
    """Factor per token of what comes later (γ)."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Further factor per token (λ); without a critic only γ·λ counts."""
    reward_norm: Literal["none", "mean", "zscore"] = "none"
    """Before that, rewards stay as they are, or are taken relative to the mean of their group, or as its z-scores
    (AReaL's reward_norm: unbiased, eps 1e-5)."""

    @property
    def level(self) -> Level:
        """Each token is at its own distance from the end."""
        return "token"


class CustomAdvantageConfig(AdvantageBase):
    """A function `f(rewards, lengths, **kwargs)`, two arrays (P, G) for P groups and G completions, to such an array.

    It is called for one group at a time (P = 1), with the completions that were scored, where these are two or more.
    """

    type: Literal["custom"] = "custom"
    path: FunctionPath
    """`package.module:function` or `path/to/file.py:function`, looked for like `reward.functions[].path`."""
    kwargs: dict[str, Any] = {}
    """Passed to each call."""


AdvantageConfig = Annotated[
    MeanAdvantageConfig
    | LengthWeightedMeanAdvantageConfig
    | ZScoreAdvantageConfig
    | BatchStdAdvantageConfig
    | RlooAdvantageConfig
    | ReinforcePPAdvantageConfig
    | GdpoAdvantageConfig
    | MaxRLAdvantageConfig
    | ProcessAdvantageConfig
    | GaeAdvantageConfig
    | CustomAdvantageConfig,
    Field(discriminator="type"),
]
