"""Requests of agents and the model's answers, in the words of no API. Each module beside this one translates one API.

A policy is trained on the distribution from which its tokens were drawn, so a session samples as the run samples.
Parameters that would change the distribution are pinned: the request is served without them, and the record names
them. Unknown parameters are ignored, and named as well.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.trajectories.bridges import Message
from actors.trajectories.recorder import RecordedTurn

Json = dict[str, Any]

PINNED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
    }
)
"""Parameters that change the distribution, or the choice of the next token; the run's own values hold."""


class CallError(ValueError):
    """Request that can't be served. The words start with the name of the parameter.

    Args:
        status: HTTP status.
        words: what is wrong, and what to change.
        code: short name of the problem, for programs.
    """

    def __init__(self, status: int, words: str, code: str = "invalid_request") -> None:
        super().__init__(words)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Call:
    """Request of an agent."""

    messages: Sequence[Message] = ()
    """The whole conversation, as in OpenAI's chat API: contents are texts, or parts where images are among them (data
    URLs); arguments of tool calls are JSON texts."""
    prompt: str | Sequence[int] | None = None
    """Prompt as a text or as token ids, in place of messages rendered by the chat template; None: the messages."""
    tools: Sequence[Json] = ()
    """Tools as in OpenAI's chat API: `{"type": "function", "function": {…}}`."""
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    response_format: Json | None = None
    """Demand on the text, as in OpenAI's chat API."""
    tool_choice: Any = None
    """Demand on tool calls, as in OpenAI's chat API."""
    parallel_tool_calls: bool = True
    """False: the answer has one tool call at most; further ones are cut off."""
    stream: bool = False
    pinned: Sequence[str] = ()
    """Names of parameters that were asked for and are not obeyed, since they would change the distribution."""
    ignored: Sequence[str] = ()
    """Names of parameters that are not known."""


@dataclass(frozen=True)
class Reply:
    """Answer to a call."""

    id: str
    """Letters and digits by which `rl/set_reward` and an agent's dictionary of rewards name the reply."""
    model: str
    """Name of the model in the request."""
    created: int
    """Seconds since 1970."""
    turn: RecordedTurn
    message: Message = field(default_factory=dict)
    """Message as in OpenAI's chat API: `content` (a text, may be empty), `reasoning_content`, `tool_calls` if any."""
    text: str | None = None
    """Answer to a prompt as the model wrote it, without its end and a stop text; None: the content of the message."""
    stopped_by: str | None = None
    """Text of `Call.stop` that ended the answer; None: the answer ended otherwise."""

    @property
    def finish_reason(self) -> str:
        """`tool_calls`, `stop` or `length`."""
        reason = self.turn.answer.finish_reason
        return "tool_calls" if self.message.get("tool_calls") and reason == "stop" else reason

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens, by OpenAI's names."""
        prompt, completion = len(self.turn.prompt_ids), len(self.turn.answer.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Dialect(Protocol):
    """One API. Its functions are pure."""

    def call(self, body: Json) -> Call:
        """Return the call of a body.

        Raises:
            CallError: the body can't be served.
        """
        ...

    def whole(self, body: Json, reply: Reply) -> Json:
        """Return the body of an answer."""
        ...

    def events(self, body: Json, reply: Reply) -> Iterator[bytes]:
        """Yield the answer as server-sent events, whole: the order and the names that the API's clients expect."""
        ...

    def problem(self, status: int, words: str, code: str) -> Json:
        """Return the body of an answer to a request that failed."""
        ...


def sse(data: Json | str, event: str = "") -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


def unheeded(body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return `pinned` and `ignored` of a call: parameters with a value that are not obeyed."""
    given = {name for name, value in body.items() if value is not None and name not in known}
    return {"pinned": tuple(sorted(given & PINNED)), "ignored": tuple(sorted(given - PINNED))}
