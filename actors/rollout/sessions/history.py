"""Messages that clients send back, and the recorded messages that they stand for.

A trajectory continues without a new branch only if its past comes back unchanged. Clients change the writing without
changing the meaning: APIs whose tool arguments are objects lose blanks and escapes, frameworks write JSON anew,
programs in JavaScript turn 1.0 into 1, and an empty text may be null or absent. Many leave out the thoughts of an
answer, for which OpenAI's chat API has no field.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.trajectories.bridges import Message
from actors.trajectories.recorder import written

THOUGHTS = "reasoning_content"


def canonical(message: Message) -> str:
    """Return a text that is equal for messages with the same meaning: arguments of calls count as JSON values."""
    return _canonical(message)


def _canonical(message: Message, left_out: str = "") -> str:
    """Return the canonical text of a message without a field."""
    plain = {}
    for name, value in message.items():
        if name == "content" and isinstance(value, str) and message.get("role") == "assistant":
            # frameworks strip answers
            value = value.strip()
        elif name == "tool_calls" and isinstance(value, list):
            value = [_with_values(one) for one in value]
        if value not in (None, "", []) and name != left_out:
            plain[name] = value
    return written(plain)


def same_message(first: Message, second: Message) -> bool:
    """Return whether two messages have the same meaning."""
    return canonical(first) == canonical(second)


@dataclass
class History:
    """Answers of the model in one session, each behind the conversation to which it belongs.

    Args:
        needs_thoughts: whether an answer without its thoughts is another answer. Otherwise it stands for the recorded
            one, and the model keeps its thoughts in sight.
    """

    needs_thoughts: bool = False
    _answers: dict[bytes, dict[str, Message]] = field(default_factory=dict)
    """Answers by their canonical text, the newest last, by the digest of the conversation without thoughts."""

    def add(self, messages: Sequence[Message], answer: Message, digest: bytes | None = None) -> None:
        """Record an answer to a conversation. `digest`: of the conversation, where it is known from `read`."""
        digest = _next_digest([b"", *_digests(messages)][-1] if digest is None else digest, answer)
        answers, text = self._answers.setdefault(digest, {}), canonical(answer)
        # put at the end, whether known or not
        answers.pop(text, None)
        answers[text] = answer

    def restored(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation of a client with each answer as it was recorded."""
        return self.read(messages)[0]

    def read(self, messages: Sequence[Message]) -> tuple[list[Message], bytes]:
        """Return what `restored` does, and the digest of the conversation."""
        digests = list(_digests(messages))
        return [self._restored(*one) for one in zip(messages, digests, strict=True)], [b"", *digests][-1]

    def _restored(self, message: Message, digest: bytes) -> Message:
        answers = self._answers.get(digest)
        if not answers or message.get("role") != "assistant":
            return message
        if exact := answers.get(canonical(message)):
            return exact
        return message if self.needs_thoughts or message.get(THOUGHTS) else list(answers.values())[-1]


def _digests(messages: Iterable[Message]) -> Iterator[bytes]:
    """Yield behind each message a digest of the conversation so far, without thoughts."""
    digest = b""
    for message in messages:
        digest = _next_digest(digest, message)
        yield digest


def _next_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation that a message continues."""
    return hashlib.blake2b(
        digest + _canonical(message, THOUGHTS).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


def _with_values(call: Any) -> Any:
    """Return a tool call with the value of its arguments; text that is no JSON stays text."""
    try:
        function = call["function"]
        value = _levelled(json.loads(function["arguments"]))
        # written once here, since a value may be too deep to be written
        return call | {"function": function | {"arguments": [json.dumps(value, sort_keys=True)]}}
    except (ValueError, KeyError, TypeError, RecursionError):
        return call


def _levelled(value: Any) -> Any:
    """Return a JSON value with its numbers as JavaScript has them: all of one kind, with 53 bits, without −0."""
    if isinstance(value, dict):
        return {key: _levelled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_levelled(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) + 0.0
        except OverflowError:
            return value
    return value
