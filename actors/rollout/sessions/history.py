"""Messages that clients send back, and the recorded messages that they stand for.

A trajectory continues without a new branch only if its past comes back unchanged. Clients change the writing without
changing the meaning: APIs whose tool arguments are objects lose blanks and escapes, frameworks write JSON anew,
programs in JavaScript turn 1.0 into 1, and an empty text may be null or absent.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from actors.trajectories.bridges import Message


def canonical(message: Message) -> str:
    """Return a text that is equal for messages with the same meaning: arguments of calls count as JSON values."""
    plain = {key: value for key, value in message.items() if value not in (None, "", [])}
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_with_values(one) for one in plain["tool_calls"]]
    return json.dumps(plain, sort_keys=True, default=str)


def same_message(first: Message, second: Message) -> bool:
    """Return whether two messages have the same meaning."""
    return canonical(first) == canonical(second)


def restored(messages: Iterable[Message], recorded: Mapping[str, Message]) -> list[Message]:
    """Return the messages with each answer of the model as it was recorded.

    Args:
        messages: a conversation, as a client sent it.
        recorded: messages of the model by their canonical text.
    """
    return [
        recorded.get(canonical(message), message) if message.get("role") == "assistant" else message
        for message in messages
    ]


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
