"""What an engine is, to the inference actor that owns it and to the HTTP server in front of it."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from bus.weights import Weights
from schemas.messages import Policy

Segment = tuple[int, int, int]
"""(first token, lineage, version): the policy that sampled the tokens from here on."""


class RequestError(ValueError):
    """The request can't be served as it is; the message says what to change. HTTP answers 400."""


class EngineStoppedError(RuntimeError):
    """The engine has failed or been closed, and serves nothing any more. HTTP answers 503."""


@dataclass(frozen=True)
class SampleRequest:
    """n completions of one prompt; completion i is sampled with `seed + i`."""

    prompt_ids: list[int]
    num_completions: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass
class Completion:
    """One sampled completion. `token_ids` ends with the end-of-sequence token when it was sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` (end of sequence) or `length`."""


@dataclass(frozen=True)
class EngineStatus:
    """What beats and metrics say of an engine."""

    policy: Policy | None
    num_running: int
    num_waiting: int
    generated_tokens: int
    busy_seconds: float


class Engine(Protocol):
    """An engine in this process. All methods may be called from any thread."""

    holds_two_versions: bool

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Queue a request; cancelling the future ends it, at any moment.

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

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def close(self) -> None:
        """Stop; requests under way fail. May be called again."""
        ...
