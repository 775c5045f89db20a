"""Sampling parameters: the distribution from which an engine draws the next token."""

from pydantic import Field

from schemas.config.base import Section
from schemas.config.resume_classes import Free


class SamplingParams(Section):
    """Distribution of the next token. One value in configuration, tickets, HTTP requests and engines' requests.

    A new parameter is a field here, with vLLM's name, so that it reaches every engine by itself; only the engines that
    sample by their own code, or that know it by another name, need a change.
    """

    temperature: Free[float] = Field(1.0, ge=0)
    """Divisor of the logits. 0: the most probable token, whatever top_p, top_k and min_p are."""
    top_p: Free[float] = Field(1.0, gt=0, le=1)
    """Nucleus sampling: only the most probable tokens with this total probability. 1: all. Below 1 the importance ratio
    is biased, and `actors check` warns."""
    top_k: Free[int] = Field(0, ge=0)
    """Number of most probable tokens to sample from. 0: all. Above 0 the importance ratio is biased, and `actors check`
    warns."""
    min_p: Free[float] = Field(0.0, ge=0, le=1)
    """Least probability of a token, relative to the most probable token. 0: no limit. Above 0 the importance ratio is
    biased, and `actors check` warns."""
    presence_penalty: Free[float] = Field(0.0, ge=-2, le=2)
    """Number subtracted from the logit of each token that the completion already has, once however often it has the
    token (OpenAI). Other than 0 the importance ratio is biased, and `actors check` warns."""

    frequency_penalty: Free[float] = Field(0.0, ge=-2, le=2)
    """Number subtracted from the logit of each token for each time that the completion already has the token (OpenAI).
    Other than 0 the importance ratio is biased, and `actors check` warns."""
    repetition_penalty: Free[float] = Field(1.0, gt=0)
    """Divisor of the positive, and factor of the negative, logits of all tokens that the prompt or the completion
    already has (with engine `sglang` the completion alone). Other than 1 the importance ratio is biased, and
    `actors check` warns."""
    min_tokens: Free[int] = Field(0, ge=0)
    """Number of new tokens before which a completion does not end: the end of sequence has probability 0, and no stop
    string counts. Above 0 the importance ratio of these tokens is biased, and `actors check` warns."""

    @property
    def sampling(self) -> "SamplingParams":
        """Sampling parameters alone, without the other keys of a derived class."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.model_fields})
