"""Requests from clients: the bodies of OpenAI's two endpoints, with vLLM's sampling parameters.

A chat may have tools. Their calls are read from the sampled text. A form of the answer (`response_format`, a forced
`tool_choice`) cuts the distribution, and the logprobs are of the rest; engines without structured outputs refuse it.

A parameter without a field here is refused by name: ignoring it would answer another question. null counts as absent.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from actors.engines.protocol import Completion, RequestError, SampleRequest
from actors.trajectories.forms import AnswerForm, Demand, demand_of
from schemas import limits
from schemas.config.sampling import SamplingParams
from schemas.messages import Prompt

MOST_TOP_LOGPROBS = 20
"""Limit of alternatives per token, as in OpenAI's chat API and vLLM's default."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        # some clients send every parameter, null for absent ones
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class StreamOptions(_Body):
    """Options of a request with `stream: true`."""

    include_usage: bool = False


class Sampling(_Body, SamplingParams, ABC):
    """Parameters common to both endpoints."""

    model_config = ConfigDict(strict=False)  # a client may send "0.5" for 0.5

    max_tokens_by_default: ClassVar[int | None] = None
    """Limit of new tokens without `max_tokens`; None allows as many as fit behind the prompt."""

    model: str
    n: int = Field(1, ge=1, le=limits.HTTP_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=limits.HTTP_LOGIT_BIAS)
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=limits.HTTP_STOP_CHARACTERS)], ...],
        BeforeValidator(lambda v: (v,) if isinstance(v, str) else v),  # a single text or a list
    ] = Field((), max_length=limits.HTTP_STOPS)
    stop_token_ids: tuple[int, ...] = Field((), max_length=limits.HTTP_STOPS)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None
    """Name of the end user; ignored, as it changes no answer of OpenAI either."""

    @field_validator("top_k", mode="before")
    @classmethod
    def _zero_for_all(cls, top_k: Any) -> Any:
        # vLLM takes both for all tokens
        return 0 if top_k == -1 else top_k

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: is the older name of max_completion_tokens; give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream: true")
        longest = self.max_tokens or self.max_completion_tokens or self.max_tokens_by_default
        if longest is not None and self.min_tokens > longest:
            raise ValueError(f"min_tokens: {self.min_tokens} exceeds the limit of {longest} new tokens")
        num = len(self.prompts)
        if num > limits.HTTP_PROMPTS:
            raise ValueError(f"prompt: {num} prompts exceed the limit of {limits.HTTP_PROMPTS} per request")
        if num * self.n > limits.HTTP_CHOICES:
            raise ValueError(f"n: {num} prompts × {self.n} exceed the limit of {limits.HTTP_CHOICES} per request")
        return self

    @property
    @abstractmethod
    def prompts(self) -> list[Prompt | list[int]]:
        """Prompts, at least one: each is a text, messages, or token ids."""

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool:
        """True if the answer includes the logprobs of sampled tokens."""

    @property
    @abstractmethod
    def num_top_logprobs(self) -> int:
        """Number of alternatives per token in the answer."""

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sample_request(
        self,
        prompt_ids: list[int],
        on_piece: Callable[[int, Completion], None] | None = None,
        form: AnswerForm | None = None,
    ) -> SampleRequest:
        """Return the engine's request for a single prompt. Without a seed a random seed is drawn.

        Args:
            form: form that the answer must have.
            on_piece: callback for each piece, with the completion's number.
        """
        return SampleRequest(
            prompt_ids,
            self.n,
            self.max_tokens or self.max_completion_tokens or self.max_tokens_by_default,
            # 48 random bits, so that seed + n overflows nowhere
            uuid.uuid4().int >> 80 if self.seed is None else self.seed,
            self.sampling,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            num_top_logprobs=self.num_top_logprobs,
            form=form,
            on_piece=on_piece,
        )


class CompletionRequest(Sampling):
    """Body of `POST /v1/completions`."""

    # OpenAI's own default
    max_tokens_by_default = 16
    prompt_forms: ClassVar[str] = "a text, token ids, or a list of either"
    """Forms of a prompt, for errors."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    """Number of alternatives per token; 0 for the logprob of the sampled token alone, None for no logprobs."""
    echo: Literal[False] = False  # accepted only as false
    answer_form: AnswerForm | None = None
    """Form of each completion, for callers that make the prompt themselves, as rollouts do."""

    @property
    def prompts(self) -> list[Prompt | list[int]]:
        """Prompts in the given order; a single text or list of token ids is a single prompt."""
        if isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def wants_logprobs(self) -> bool:
        """True if `logprobs` is given, also as 0."""
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        """Value of `logprobs`; 0 if absent."""
        return self.logprobs or 0


def _joined_parts(content: Any) -> Any:
    """Join a list of text parts with line breaks, as vLLM does for text-only chat templates."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in content):
        raise ValueError('must be a text, or a list of {"type": "text", "text": …}')
    return "\n".join(str(part["text"]) for part in content)


class Function(_Body):
    """Description of a tool. The chat template renders it as it stands."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)


class Tool(_Body):
    """Tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class CalledFunction(_Body):
    """Function of a tool call in an earlier turn."""

    name: str
    arguments: dict[str, Any]
    """Chat templates write the object out; clients send its JSON."""
    parsed_arguments: Any = Field(None, exclude=True)
    """Ignored: OpenAI's client adds it to a message that it has parsed."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _from_json(cls, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        try:
            return json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:  # RecursionError: brackets thousands deep
            raise ValueError(f"is no JSON: {error}") from None


class MessageCall(_Body):
    """Tool call in an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, exclude=True)
    """Ignored: OpenAI's client keeps the number that a call had in a stream."""


class Message(_Body):
    """Turn of a chat."""

    role: str
    content: Annotated[str | None, BeforeValidator(_joined_parts)] = None
    """Missing only beside tool calls; templates then get an empty text."""
    reasoning_content: str | None = None
    tool_calls: list[MessageCall] = Field([], max_length=limits.HTTP_TOOLS)
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _calls_or_content(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if self.content is None:
            if not self.tool_calls:
                raise ValueError("content is missing")
            self.content = ""
        return self


class ChatRequest(Sampling):
    """Body of `POST /v1/chat/completions`. Without max_tokens an answer may fill the model's context."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = Field([], max_length=limits.HTTP_TOOLS)
    tool_choice: str | dict[str, Any] = "auto"
    """`auto` reads calls from the answer, `none` leaves them in its text; `required`, or a function's name, demands a
    call. The prompt has the tools in any case."""
    parallel_tool_calls: bool = True
    """False keeps only the first call of an answer."""
    separate_reasoning: bool | None = None
    """True puts thoughts into `reasoning_content` (SGLang's name); by default only where there are tools."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking` (vLLM's name)."""
    response_format: dict[str, Any] | None = None
    """`{"type": "text"}`, `json_object`, or `json_schema` with a schema."""
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _same_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tools: {twice[0]!r} is the name of several")
        return self

    @model_validator(mode="after")
    def _demand_can_be_met(self) -> Self:
        # the property raises; its words name the parameter
        _ = self.demand
        return self

    @model_validator(mode="after")
    def _alternatives_to_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    @property
    def prompts(self) -> list[Prompt | list[int]]:
        """Messages for the model's chat template: a single prompt."""
        return [[message.model_dump(exclude_unset=True) | {"content": message.content} for message in self.messages]]

    @property
    def reads_message(self) -> bool:
        """True if the answer is taken apart into thoughts, text and tool calls."""
        if self.separate_reasoning is None:
            return bool(self.tools)
        return self.separate_reasoning or bool(self.called_tools)

    @cached_property
    def template_tools(self) -> list[dict[str, Any]]:
        """Tools for the chat template."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def called_tools(self) -> list[dict[str, Any]]:
        """Tools whose calls are read from the answer."""
        return [] if self.tool_choice == "none" else self.template_tools

    @cached_property
    def demand(self) -> Demand | None:
        """Demand on the answer; None if the model is free."""
        return demand_of(self.response_format, self.tool_choice, self.template_tools, not self.parallel_tool_calls)

    @property
    def wants_logprobs(self) -> bool:
        """Value of `logprobs`."""
        return self.logprobs

    @property
    def num_top_logprobs(self) -> int:
        """Value of `top_logprobs`."""
        return self.top_logprobs


Request = TypeVar("Request", bound=Sampling)


def parse(kind: type[Request], body: bytes) -> Request:
    """Parse the body of a request.

    Raises:
        RequestError: the body is invalid; the message starts with the name of the parameter.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # without the input, which may be long and private
        first = error.errors(include_url=False, include_input=False)[0]
    # from a validator here: the text names the parameter
    if first["type"] == "value_error" and not first["loc"]:
        raise RequestError(str(first["ctx"]["error"]))
    # otherwise the message would list each of the four types that were tried
    if first["loc"][:1] == ("prompt",) and issubclass(kind, CompletionRequest):
        raise RequestError(f"prompt: must be {kind.prompt_forms}")
    words = "is not known or not supported here" if first["type"] == "extra_forbidden" else first["msg"]
    words = words.removeprefix("Value error, ")
    raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {words}")
