"""Interface of an engine, for the owning inference actor and the HTTP server in front."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.trajectories.forms import AnswerForm, Demand
from actors.trajectories.parsing import Parsed
from bus.weights import Weights
from schemas.config.sampling import SamplingParams
from schemas.messages import EngineState, PolicyVersion, Prompt
from schemas.routed import Experts

Segment = tuple[int, int, int]
"""(first token, lineage, version): policy of the tokens from `first token` (from 0) to the next segment."""

Alternatives = list[tuple[int, float]]
"""(token, logprob) of the most probable tokens at a position, best first."""


NO_FORMS = "engine {engine} can't demand a form of an answer; use vllm or sglang, or ask for it in a message"
"""Words of the engines without structured outputs."""

NO_IMAGES = "engine {engine} takes no images; use embedded, vllm or sglang"
"""Words of the engines that see no images."""


class RequestError(ValueError):
    """Error of a request that can never be served; the message says what to change. HTTP answers 400."""


class SamplingError(RuntimeError):
    """Failure of a single request, with the reason; the engine serves other requests on. HTTP answers 500."""


class EngineStoppedError(RuntimeError):
    """Error after the engine has failed or been closed: no request is served any more. HTTP answers 503."""


@dataclass
class Completion:
    """Sampled completion, or a piece: the part of a completion added by a token.

    `token_ids` holds every sampled token, also the end of sequence and tokens cut from the text by a stop string. The
    pieces of a completion, joined in order, are the completion: each piece has the segments starting there, and only
    the last piece has the reasons.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Logprob per token, of the distribution from which the token was drawn."""
    segments: list[Segment] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` (end of sequence, stop string, stop token) or `length`; empty in every piece but the last."""
    stop_reason: str | int | None = field(default=None, kw_only=True)
    """Stop string or stop token at the end of the completion; None for the end of sequence."""
    top_logprobs: list[Alternatives] = field(default_factory=list, kw_only=True)
    """Alternatives of each token; empty unless the request asks for alternatives."""
    routed_experts: Experts | None = field(default=None, kw_only=True, compare=False)
    """Experts of the prompt's tokens and of the completion's without the last (tokens, layers, experts per token), from
    engines that tell them; None in a piece."""


@dataclass(frozen=True)
class PromptImage:
    """Image in a prompt, whose tokens the prompt has already."""

    start: int
    """Index of the image's first token in the prompt."""
    digest: str
    """Digest of the bytes."""
    data: bytes = field(repr=False)
    """Bytes of the image file."""


@dataclass(frozen=True)
class SampleRequest:
    """Request for `num_completions` completions of a prompt; completion i is sampled with seed `seed + i`."""

    prompt_ids: list[int]
    num_completions: int
    max_tokens: int | None
    """Limit of new tokens; None allows as many as fit behind the prompt."""
    seed: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Values to add to the logits, by token id."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Whether the end of sequence ends no completion."""
    num_top_logprobs: int = 0
    """Number of alternatives to report per token."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt in the order of their places."""
    form: AnswerForm | None = None
    """Form of each completion; None leaves the model free. Logprobs are then of the distribution without the tokens
    that the form forbids."""
    # requests compare by content
    on_piece: Callable[[int, Completion], None] | None = field(default=None, compare=False)
    """Callback for each piece, with the completion's number; None for no callback. Called in a thread of the
    engine before the future is done. Must not raise."""

    def ends(self, eos: frozenset[int]) -> list[int]:
        """Return the tokens that end a completion, in order.

        Args:
            eos: the model's ends of sequence.
        """
        return sorted((frozenset() if self.ignore_eos else eos) | set(self.stop_token_ids))


@dataclass(frozen=True)
class EngineStatus:
    """State of an engine, for heartbeats and metrics."""

    policy: PolicyVersion | None
    """Policy of the loaded weights; None before the first load."""
    num_running: int
    """Completions being sampled."""
    num_waiting: int
    """Completions of queued requests."""
    generated_tokens: int
    """Tokens sampled since the start."""
    busy_seconds: float
    """Seconds of work since the start."""
    state: EngineState = "clean"
    """In any state but `clean` the engine takes no new work until a version has been loaded."""


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Check token ids against the range from 0 to `vocab_size - 1`.

    Args:
        name: field of the request, for the error.

    Raises:
        RequestError: a token id is outside the vocabulary; names the field.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RequestError(f"{name}: token ids must be from 0 to {vocab_size - 1}")


class TakesTurns(Protocol):
    """Engine that gives the memory of its cache back between two tokens, and goes on later."""

    def rest(self, timeout: float) -> None:
        """Stop between two tokens and give memory back. Requests stay, and new ones wait. No effect on one at rest.

        Raises:
            TimeoutError: the engine did not stop within `timeout` seconds.
            EngineStoppedError: the engine has failed or been closed.
        """
        ...

    def wake(self, timeout: float) -> None:
        """Take memory again and go on. No effect on an engine that does not rest. Raises as `rest` does."""
        ...


class Engine(Protocol):
    """Engine in this process. All methods may be called from any thread."""

    holds_two_versions: bool
    """True if running requests finish under the old version after an update (adapters)."""

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Queue a request. Cancelling the future ends all completions, at any moment.

        Raises:
            RequestError: the request can never be served.
            EngineStoppedError: the engine has failed or been closed. Pending futures then fail with the same error.
        """
        ...

    def load(self, policy: PolicyVersion, weights: Weights, timeout: float) -> float:
        """Switch to these weights at a token boundary; return the seconds without decoding.

        Args:
            timeout: seconds to wait for the switch.

        Raises:
            ValueError: the weights do not fit the model; the old version serves on.
            TimeoutError: running completions did not finish in time (update mode `drain`); the old version serves on.
            EngineStoppedError: the engine has failed or been closed.
        """
        ...

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state.

        Raises:
            EngineStoppedError: the engine has failed: the actor must exit and be started again.
        """
        ...

    def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, also of a special token, as shown in lists of logprobs."""
        ...

    def tokenize(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a text, or of messages through the model's chat template.

        Args:
            tools: functions that the model may call, as OpenAI's API describes them.
            template_kwargs: variables of the chat template, such as `enable_thinking`.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages or has no tool calls.
        """
        ...

    def form_of(self, prompt_ids: list[int], demand: Demand) -> AnswerForm:
        """Return the form that meets a demand on the answer to this prompt.

        Raises:
            RequestError: the engine, or the model's chat template, can't meet the demand.
        """
        ...

    def read_message(
        self, prompt_ids: list[int], completion: Completion, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Parsed:
        """Return thoughts, text and tool calls of a completion; without tools no calls are looked for."""
        ...

    def close(self) -> None:
        """Stop the engine; pending requests fail. May be called again."""
        ...


class WithoutForms:
    """Base of an engine that makes tokens up, whose answers have no form."""

    def form_of(self, prompt_ids: list[int], demand: Demand) -> AnswerForm:
        """Refuse a demand on an answer.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"response_format, tool_choice: {NO_FORMS.format(engine='fake')}")
