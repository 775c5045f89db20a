"""What an engine is, to the inference actor that owns it and to the HTTP server in front of it."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from bus.weights import Weights
from schemas.messages import EngineState, Policy, Prompt

Segment = tuple[int, int, int]
"""(first token, lineage, version): the policy that sampled the tokens from here on."""

Alternatives = list[tuple[int, float]]
"""(token, logprob) of the most probable tokens at one place, the best first."""


class RequestError(ValueError):
    """The request can't be served as it is; the message says what to change. HTTP answers 400."""


class EngineStoppedError(RuntimeError):
    """The engine has failed or been closed, and serves nothing any more. HTTP answers 503."""


@dataclass
class Completion:
    """One sampled completion, or the piece of one that a token adds.

    `token_ids` holds all that was sampled, also the end of sequence and what a stop string has cut from the text.
    Pieces in a row are a completion: a piece has the segments that begin in it, and the last one the reasons.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` (end of sequence, stop string, stop token) or `length`; a piece before the last has none."""
    stop_reason: str | int | None = field(default=None, kw_only=True)
    """The stop string or stop token that ended it; None for the end of sequence."""
    top_logprobs: list[Alternatives] = field(default_factory=list, kw_only=True)
    """Per token, where the request asks for alternatives."""


@dataclass(frozen=True)
class SampleRequest:
    """n completions of one prompt; completion i is sampled with `seed + i`."""

    prompt_ids: list[int]
    num_completions: int
    max_tokens: int | None
    """None: as many as fit behind the prompt."""
    temperature: float
    """0: the most probable token, whatever top_k, top_p and min_p are."""
    top_p: float
    seed: int
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    num_top_logprobs: int = 0
    on_piece: Callable[[int, Completion], None] | None = field(default=None, compare=False)
    """Called in a thread of the engine with the completion's number and each of its pieces, before the future is done;
    must not raise."""


@dataclass(frozen=True)
class EngineStatus:
    """What beats and metrics say of an engine."""

    policy: Policy | None
    num_running: int
    num_waiting: int
    generated_tokens: int
    busy_seconds: float
    state: EngineState = "clean"
    """Else no new work is taken, until a version has been loaded."""


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise a RequestError that names the field where one of them is no token."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RequestError(f"{name}: token ids must be from 0 to {vocab_size - 1}")


class Engine(Protocol):
    """An engine in this process. All methods may be called from any thread."""

    holds_two_versions: bool

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Queue a request; cancelling the future ends all its completions, at any moment.

        Raises:
            RequestError: it can never be served.
            EngineStoppedError: it has failed or been closed; futures under way then fail alike.
        """
        ...

    def load(self, policy: Policy, weights: Weights, timeout: float) -> float:
        """Switch to these weights at a token boundary; returns the seconds that decoding stood still.

        Raises:
            ValueError: they do not fit the model; the old version goes on serving.
            TimeoutError: completions in the making did not end in time (update mode drain); the old version goes on.
            EngineStoppedError: it has failed or been closed.
        """
        ...

    def status(self) -> EngineStatus:
        """A snapshot.

        Raises:
            EngineStoppedError: the engine has failed: its actor must end, and be started again.
        """
        ...

    def detokenize(self, token_ids: list[int]) -> str:
        """Text without special tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token, also a special one, as lists of logprobs name it."""
        ...

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or of messages through the model's chat template.

        Raises:
            RequestError: there is no such template, or it refuses the messages.
        """
        ...

    def close(self) -> None:
        """Stop; requests under way fail. May be called again."""
        ...
