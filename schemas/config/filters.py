"""Keys of `reward.filters`: completions not fit to learn from (docs/reference/rewards.md). One class per `type`."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.base import Section


class FilterBase(Section):
    """Base of all completion filters."""

    enforce: bool = False
    """Masking of the completions found: their tokens leave the loss, their rewards stay in the baseline. `false`: such
    completions are only counted (metric `grpo_reward_filtered_completions_total`)."""


class GibberishFilterConfig(FilterBase):
    """Gibberish: completions with a rare token less likely than chance under the policy (arXiv 2510.02387, §5.2)."""

    type: Literal["gibberish"] = "gibberish"
    token_id_threshold: int = Field(100_000, ge=0)
    """Token id above which a token counts as rare: tokenizers number tokens by falling frequency."""
    logprob_offset: float = Field(2.0, ge=0)
    """Margin in nats below chance: a token counts if its logprob is below −ln(vocabulary) − logprob_offset."""


class RepetitionFilterConfig(FilterBase):
    """Repetition: completions with many almost certain tokens in a row (arXiv 2506.13585, §3.2)."""

    type: Literal["repetition"] = "repetition"
    window: int = Field(3000, ge=1)
    """Number of tokens in a row, each more probable than prob_threshold, from which on a completion counts. Tokens not
    sampled by the policy (masked) are skipped and do not interrupt a row."""
    prob_threshold: float = Field(0.99, gt=0, lt=1)
    """Probability above which a token counts as almost certain."""


CompletionFilterConfig = Annotated[GibberishFilterConfig | RepetitionFilterConfig, Field(discriminator="type")]
