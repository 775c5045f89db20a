"""Replies of no model, as examples and drawn at random, and events read back from a stream."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from actors.rollout.sessions.dialects.calls import Json, Reply
from actors.trajectories.bridges import Message
from actors.trajectories.recorder import RecordedTurn, TurnAnswer

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def reply(
    content: str = "",
    thoughts: str = "",
    calls: Sequence[tuple[str, str, str]] = (),
    *,
    number: int = 0,
    finish_reason: str = "stop",
    text: str | None = None,
    stopped_by: str | None = None,
) -> Reply:
    """A reply of two tokens to a prompt of three.

    Args:
        calls: id, name and arguments of each call.
        number: of the turn; part of the reply's id.
    """
    message: Message = {"role": "assistant", "content": content}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
            for one, name, arguments in calls
        ]
    answer = TurnAnswer([7, 8], [-0.5, -0.25], [(0, 1, 0)], finish_reason)
    turn = RecordedTurn(number, [1, 2, 3], answer, message)
    return Reply(f"turn{number}", "policy", 1_700_000_000, turn, message, text, stopped_by)


WORDS = st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def arguments(draw: st.DrawFn) -> str:
    """A JSON object, written in one of the ways that models have."""
    value = draw(st.dictionaries(WORDS, VALUES, max_size=3))
    written = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 0, 3])))
    return draw(st.sampled_from([written, f" {written}\n"]))


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[Reply, list[str]]]:
    """Replies, each with the outputs of its calls, or with a user's next words if there are no calls."""
    turns = []
    for number in range(draw(st.integers(1, 3))):
        calls = [
            (f"call{number:03}{index:02}", draw(st.sampled_from(["add", "look_up"])), draw(arguments()))
            for index in range(draw(st.integers(0, 3)))
        ]
        turn = reply(draw(WORDS), draw(WORDS), calls, number=number)
        turns.append((turn, [draw(WORDS) for _ in calls or [None]]))
    return turns


def messages_of(turns: Iterable[tuple[Reply, Sequence[str]]]) -> list[Message]:
    """The conversation of these turns in the form of the chat API."""
    messages: list[Message] = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Go."}]
    for turn, texts in turns:
        messages.append(dict(turn.message))
        if calls := turn.message.get("tool_calls"):
            for one, text in zip(calls, texts, strict=True):
                messages.append({"role": "tool", "content": text, "tool_call_id": one["id"]})
        else:
            messages.append({"role": "user", "content": texts[0]})
    return messages


def read_events(stream: Iterable[bytes]) -> list[tuple[str, Any]]:
    """Names and data of server-sent events; data that are no JSON stay text."""
    events = []
    for raw in stream:
        fields = dict(line.split(": ", 1) for line in raw.decode().strip().split("\n"))
        assert raw.endswith(b"\n\n")
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events
