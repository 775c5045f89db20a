"""Which completions are not fit to learn from: a union told apart by `type` (docs/algorithms.md)."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.base import Section


class FilterBase(Section):
    """What all completion filters have."""

    enforce: bool = False
    """Mask the completions that it finds out of the loss; their rewards stay in the baseline. Without, only count."""


class GibberishFilterConfig(FilterBase):
    """A rare token that the policy held for less likely than chance (arXiv 2510.02387, §5.2)."""

    type: Literal["gibberish"] = "gibberish"
    token_id_threshold: int = Field(100_000, ge=0)
    """Tokens with an id above are rare: tokenizers number them by frequency."""
    logprob_offset: float = Field(2.0, ge=0)
    """Less likely than chance: a logprob below −ln(vocabulary) − this."""


class RepetitionFilterConfig(FilterBase):
    """A loop: many tokens in a row of which the policy was sure (arXiv 2506.13585, §3.2)."""

    type: Literal["repetition"] = "repetition"
    window: int = Field(3000, ge=1)
    """Tokens in a row; what is not sampled (masked) does not end the row."""
    prob_threshold: float = Field(0.99, gt=0, lt=1)
    """Sure: a probability above."""


CompletionFilterConfig = Annotated[GibberishFilterConfig | RepetitionFilterConfig, Field(discriminator="type")]
