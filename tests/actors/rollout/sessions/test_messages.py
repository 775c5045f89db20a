"""Anthropic's messages: blocks to messages, messages to blocks, and back with the same meaning."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.sessions.dialects import messages
from actors.rollout.sessions.dialects.calls import CallError, Json
from actors.rollout.sessions.history import History
from tests.actors.rollout.sessions.replies import TOOL, conversations, messages_of, read_events, reply

FUNCTION = TOOL["function"]
OWN = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
    "cache_control": {"type": "ephemeral"},
}


def _from_events(stream: list[tuple[str, Any]]) -> list[Json]:
    """The blocks that a client makes of a stream."""
    blocks: list[Json] = []
    written: list[str] = []
    for name, data in stream:
        if name == "content_block_start":
            blocks.append(data["content_block"])
            written.append("")
        if name == "content_block_delta":
            match data["delta"]:
                case {"type": "input_json_delta", "partial_json": text}:
                    written[data["index"]] += text
                case {"type": kind, **rest}:
                    field = kind.removesuffix("_delta")
                    blocks[data["index"]][field] += rest[field]
        if name == "content_block_stop" and written[data["index"]]:
            blocks[data["index"]]["input"] = json.loads(written[data["index"]])
    return blocks


def _in_javascript(value: Any) -> Any:
    """A value as a program in JavaScript writes it again."""
    if isinstance(value, dict):
        return {key: _in_javascript(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_in_javascript(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _sent_back(blocks: list[Json], texts: list[str], *, apart: bool) -> list[Json]:
    """What a client appends to its messages: an answer, and the results of its calls or a user's words."""
    uses = [block["id"] for block in blocks if block["type"] == "tool_use"]
    if not uses:
        return [{"role": "assistant", "content": blocks}, {"role": "user", "content": texts[0]}]
    results = [
        {"type": "tool_result", "tool_use_id": one, "content": [{"type": "text", "text": text}] if apart else text}
        for one, text in zip(uses, texts, strict=True)
    ]
    if apart:
        pairs = [("assistant", one) for one in blocks] + [("user", one) for one in results]
        return [{"role": role, "content": [block]} for role, block in pairs]
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


@given(conversations(), st.booleans(), st.booleans(), st.booleans())
def test_a_conversation_comes_back_as_it_was_recorded(
    turns: Any, streamed: bool, apart: bool, javascript: bool
) -> None:
    """Whichever way the answer was read, by a client in Python or JavaScript, with a message for each block."""
    body: Json = {"model": "policy", "system": "Be good.", "messages": [{"role": "user", "content": "Go."}]}
    history = History(needs_thoughts=True)
    for turn, texts in turns:
        history.add(history.restored(messages.call(body).messages), turn.message)
        blocks = messages.whole(body, turn)["content"]
        if streamed:
            assert _from_events(read_events(messages.events(body, turn))) == blocks
        if javascript:
            blocks = _in_javascript(blocks)
        body["messages"] += _sent_back(blocks, texts, apart=apart)
    assert history.restored(messages.call(body).messages) == messages_of(turns)


def test_arguments_come_back_as_most_models_write_them() -> None:
    """In the order of their keys, with a blank behind each colon and letters of all languages."""
    turn = reply("", calls=[("c1", "add", '{"b": "ä", "a": [1, 2.5]}')])
    answer = {"role": "assistant", "content": messages.whole({}, turn)["content"]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]}
    assert messages.call({"messages": [answer, result]}).messages[0] == turn.message


def test_a_request_is_one_of_the_chat_api() -> None:
    """All that has a name there."""
    call = messages.call(
        {
            "model": "policy",
            "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "good."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Go."}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "Well."},
                        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                        {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t2", "content": "no a", "is_error": True},
                        {"type": "tool_result", "tool_use_id": "t1"},
                        {"type": "text", "text": "Hurry!"},
                    ],
                },
                {"role": "system", "content": "One more turn."},
            ],
            "tools": [OWN],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 9,
            "stop_sequences": ["###"],
            "stream": True,
            "temperature": 0.1,
            "thinking": {"type": "adaptive"},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        }
    )
    made = [
        {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "t2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]
    assert call.messages == [
        {"role": "system", "content": "Be\ngood."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": made},
        {"role": "tool", "content": "Error: no a", "tool_call_id": "t2"},
        {"role": "tool", "content": "", "tool_call_id": "t1"},
        {"role": "user", "content": "Hurry!"},
        {"role": "system", "content": "One more turn."},
    ]
    assert call.tools == (TOOL,)
    assert (call.tool_choice, call.parallel_tool_calls) == ("required", False)
    assert (call.max_tokens, call.stop, call.stream) == (9, ("###",), True)
    assert (call.pinned, call.ignored) == (("temperature",), ("thinking",))
    assert call.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}},
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_a_choice_of_tools_has_another_name_in_the_chat_api(choice: Any, expected: Any) -> None:
    """`any` is `required` there."""
    body = {"messages": [{"role": "user", "content": "Go."}], "tool_choice": choice}
    assert messages.call(body).tool_choice == expected
    assert messages.call(body).parallel_tool_calls


def test_an_error_that_says_so_is_not_told_twice() -> None:
    """The first line names it already."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": "<tool_use_error>No file</tool_use_error>"}
    body = {"messages": [{"role": "user", "content": [result | {"is_error": True}]}]}
    assert messages.call(body).messages[0]["content"] == result["content"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "messages: must be a list with at least one message"),
        ({"messages": [{"content": "Go."}]}, "messages.0.role: must be user"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: must be a text, or a list of blocks"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages.0.content.0.source: must have the type base64",
        ),
        (
            {"messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "The answer is"}]},
            "messages.1: the last message must be no assistant's",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "server_tool_use", "id": "1"}]},
                    {"role": "user", "content": "Go."},
                ]
            },
            "messages.0.content.0.type: 'server_tool_use' is nothing",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "x"}]},
                    {"role": "user", "content": "Go."},
                ]
            },
            "messages.0.content: the input of a tool_use must be an object",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "1"}]}]},
            "messages.0.content.tool_use_id: must be the id of a tool_use",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": [IMAGE]}]}
                ]
            },
            "messages.0.content.content.0.source: must have the type base64",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: web_search_20250305 is"),
        ({"tools": [OWN, {"name": "f"}]}, "tools.1.input_schema: must be a JSON schema"),
        ({"tools": [{}]}, "tools.0: must be"),
        ({"tools": "all"}, "tools: must be a list"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type: must be auto"),
        ({"max_tokens": 0}, "max_tokens: must be a whole number above 0"),
        ({"stop_sequences": [""]}, "stop_sequences: must be a text"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences: at most 64 texts"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format: must be"),
        ({"thread": {"type": "create"}}, "thread: a session keeps no messages; send the whole conversation"),
        ({"mcp_servers": [{"url": "https://example.com"}]}, "mcp_servers: are asked by Anthropic's servers"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused_in_words(change: Json, words: str) -> None:
    """The words begin with the parameter's name."""
    with pytest.raises(CallError, match=words) as caught:
        messages.call({"model": "policy", "messages": [{"role": "user", "content": "Go."}]} | change)
    assert str(caught.value).startswith(next(iter(change)))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (418, "invalid_request_error"), (500, "api_error")],
)
def test_a_problem_has_the_name_of_its_status(status: int, kind: str) -> None:
    """Clients choose their exception by it."""
    told = messages.problem(status, "words", "code")
    assert (told["type"], told["error"]["type"], told["error"]["message"]) == ("error", kind, "words")
    assert told["error"]["details"]["error_code"] == "code"


CALLS = [("c1", "add", "{}")]


@pytest.mark.parametrize(
    ("turn", "end"),
    [
        (reply("Well."), ("end_turn", None)),
        (reply("Well.", finish_reason="length"), ("max_tokens", None)),
        (reply("", calls=CALLS), ("tool_use", None)),
        (reply("", calls=CALLS, finish_reason="length"), ("max_tokens", None)),
        (reply("Well.", stopped_by="###"), ("stop_sequence", "###")),
        (reply("", calls=CALLS, stopped_by="###"), ("tool_use", None)),
        # the run's own stop text
        (reply("Well.", stopped_by="</answer>"), ("end_turn", None)),
    ],
)
def test_the_reason_of_the_end_is_told_in_anthropics_words(turn: Any, end: tuple[str, str | None]) -> None:
    """In an answer and in a stream alike."""
    body = {"stop_sequences": ["###"]}
    whole = messages.whole(body, turn)
    assert (whole["stop_reason"], whole["stop_sequence"]) == end
    delta = dict(read_events(messages.events(body, turn)))["message_delta"]
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == end
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 2
    assert whole["usage"]["input_tokens"] == 3


def test_events_come_in_the_order_of_anthropics_api() -> None:
    """Block by block, with the arguments as the model wrote them."""
    turn = reply("Well.", "Hm.", [("c1", "add", '{"a":1.0}')])
    events = read_events(messages.events({}, turn))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    signed = ["content_block_start", "content_block_delta", *block[1:]]
    assert [name for name, _ in events] == [
        "message_start", "ping", *signed, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    assert [data["type"] for _, data in events] == [name for name, _ in events]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 3)
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": "Hm."}
    assert deltas[-1] == {"type": "input_json_delta", "partial_json": '{"a":1.0}'}
