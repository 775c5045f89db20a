"""What clients may ask for: the bodies of OpenAI's two endpoints, with vLLM's parameters for sampling.

What is not listed here is refused by name, since to ignore it would be to answer another question. null is as good as
not given.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from actors.engines.protocol import Completion, RequestError, SampleRequest
from schemas.messages import Prompt

MOST_TOP_LOGPROBS = 20
"""As OpenAI's chat and vLLM by default."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class StreamOptions(_Body):
    """Of `stream: true`."""

    include_usage: bool = False


class Sampling(_Body, ABC):
    """What both endpoints have in common."""

    max_tokens_by_default: ClassVar[int | None] = None

    model: str
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    """0 or −1: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)
    ] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None
    """Whoever it is; as with OpenAI it changes no answer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: is the older name of max_completion_tokens; give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream: true")
        return self

    @property
    @abstractmethod
    def prompts(self) -> list[Prompt | list[int]]:
        """One or several: text, messages or token ids."""

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool:
        """Whether logprobs of sampled tokens are part of the answer."""

    @property
    @abstractmethod
    def num_top_logprobs(self) -> int:
        """How many alternatives are part of the answer."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sample_request(
        self, prompt_ids: list[int], on_piece: Callable[[int, Completion], None] | None = None
    ) -> SampleRequest:
        """For the engine; without a seed it is any."""
        return SampleRequest(
            prompt_ids,
            self.n,
            self.max_tokens or self.max_completion_tokens or self.max_tokens_by_default,
            self.temperature,
            self.top_p,
            uuid.uuid4().int >> 80 if self.seed is None else self.seed,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            num_top_logprobs=self.num_top_logprobs,
            on_piece=on_piece,
        )


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    max_tokens_by_default = 16

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    """Alternatives beside the sampled token's logprob; 0: that alone."""
    echo: Literal[False] = False

    @property
    def prompts(self) -> list[Prompt | list[int]]:
        """Choices of the first one come first."""
        if isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def wants_logprobs(self) -> bool:
        """Also with 0 alternatives."""
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        """As many as `logprobs` says."""
        return self.logprobs or 0


def _joined_parts(content: Any) -> Any:
    """Text of a list of text parts, a line each, as vLLM gives it to templates that know text alone."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in content):
        raise ValueError('must be a text, or a list of {"type": "text", "text": …}')
    return "\n".join(str(part["text"]) for part in content)


class Message(_Body):
    """One turn of a chat."""

    role: str
    content: Annotated[str, BeforeValidator(_joined_parts)]


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`; without max_tokens an answer may fill the model's context."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _alternatives_to_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    @property
    def prompts(self) -> list[Prompt | list[int]]:
        """The messages, for the model's chat template."""
        return [[message.model_dump() for message in self.messages]]

    @property
    def wants_logprobs(self) -> bool:
        """As `logprobs` says."""
        return self.logprobs

    @property
    def num_top_logprobs(self) -> int:
        """As `top_logprobs` says."""
        return self.top_logprobs


Request = TypeVar("Request", bound=Sampling)


def parse(kind: type[Request], body: bytes) -> Request:
    """A body as a request.

    Raises:
        RequestError: it is none; the message begins with the name of the parameter.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "value_error" and not first["loc"]:
        raise RequestError(str(first["ctx"]["error"]))
    if first["loc"][:1] == ("prompt",):
        raise RequestError("prompt: must be a text, token ids, or a list of either")
    words = "is not known or not supported here" if first["type"] == "extra_forbidden" else first["msg"]
    raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {words}")
