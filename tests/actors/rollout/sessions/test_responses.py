"""OpenAI's responses: items to messages, messages to items, and back without a change."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.sessions.dialects import responses
from actors.rollout.sessions.dialects.calls import CallError, Json, Reply
from tests.actors.rollout.sessions.replies import TOOL, conversations, messages_of, read_events, reply

FLAT = {"type": "function", **TOOL["function"], "strict": True}


def _output(one: Json, text: str) -> Json:
    return {"type": "function_call_output", "call_id": one["call_id"], "output": text}


def _sent_back(turn: Reply, items: list[Json], texts: list[str], *, interleaved: bool) -> list[Json]:
    """What a client appends to its input: the items of an answer and what the agent has to say to them."""
    if not turn.message.get("tool_calls"):
        return [*items, {"role": "user", "content": texts[0]}]
    calls = [item for item in items if item["type"] == "function_call"]
    outputs = {one["call_id"]: _output(one, text) for one, text in zip(calls, texts, strict=True)}
    if interleaved:
        return [part for item in items for part in (item, outputs.get(item.get("call_id"))) if part]
    return [*items, *outputs.values()]


@given(conversations(), st.sampled_from(["whole", "stream", "sealed"]), st.sampled_from(["ids", "no ids", "mixed"]))
def test_a_conversation_comes_back_exactly_as_it_was_answered(turns: Any, way: str, ids: str) -> None:
    """Whichever way the answer was read, with or without the items' ids, and with outputs behind each call."""
    body: Json = {"model": "policy", "instructions": "Be good.", "input": [{"role": "user", "content": "Go."}]}
    if way == "sealed":
        body["include"] = ["reasoning.encrypted_content"]
    for turn, texts in turns:
        if way == "stream":
            events = read_events(responses.events(body, turn))
            items = [data["item"] for name, data in events if name == "response.output_item.done"]
            assert items == responses.whole(body, turn)["output"]
        else:
            items = responses.whole(body, turn)["output"]
        if way == "sealed":
            items = [item | ({"content": None} if item["type"] == "reasoning" else {}) for item in items]
        if ids == "no ids":
            items = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
        body["input"] += _sent_back(turn, items, texts, interleaved=ids == "mixed")
    assert responses.call(body).messages == messages_of(turns)


def test_answers_that_follow_each_other_stay_apart() -> None:
    """An agent may ask again without a word of its own; ids tell the answers apart."""
    first, second = reply("One.", number=1), reply("", calls=[("call1", "add", "{}")], number=2)
    items = [*responses.whole({}, first)["output"], *responses.whole({}, second)["output"]]
    assert responses.call({"input": items}).messages == [first.message, second.message]
    anonymous = [{**item, "id": None} for item in responses.whole({}, first)["output"]]
    twice = responses.call({"input": [*anonymous, *anonymous]}).messages
    assert twice == [first.message, first.message]


def test_a_request_is_one_of_the_chat_api() -> None:
    """All that has a name there."""
    call = responses.call(
        {
            "model": "policy",
            "input": [
                {"role": "developer", "content": "Be good."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
                {"type": "reasoning", "id": "rs_68a", "summary": [], "encrypted_content": "gAAAAABo"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "Hm.", "annotations": []}]},
                {"type": "function_call", "call_id": "call_9", "name": "add", "arguments": '{"a": 1}', "id": "fc_68a"},
                {"type": "function_call_output", "call_id": "call_9", "output": [{"type": "input_text", "text": "1"}]},
            ],
            "tools": [FLAT],
            "tool_choice": {"type": "function", "name": "add"},
            "parallel_tool_calls": False,
            "max_output_tokens": 9,
            "text": {"format": {"type": "json_schema", "name": "point", "schema": {"type": "object"}, "strict": True}},
            "temperature": 0.1,
            "reasoning": {"effort": "high"},
            "store": False,
        }
    )
    calls = [{"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    assert call.messages == [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "call_9"},
    ]
    assert call.tools == (TOOL,)
    assert call.tool_choice == {"type": "function", "function": {"name": "add"}}
    assert call.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "point", "schema": {"type": "object"}, "strict": True},
    }
    assert (call.max_tokens, call.parallel_tool_calls, call.stream) == (9, False, False)
    assert (call.pinned, call.ignored) == (("temperature",), ("reasoning",))
    assert responses.call({"input": "Go.", "text": {"format": {"type": "json_object"}}}).response_format == {
        "type": "json_object"
    }
    assert responses.call({"input": "Go.", "tool_choice": "required"}).tool_choice == "required"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: .*send the whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation: .*send the whole conversation as input"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: .*send instructions and input"),
        ({"background": True}, "background: .*leave background out"),
        ({"input": []}, "input: must be a text, or a list with at least one item"),
        ({"input": None}, "input: must be"),
        ({"input": ["Go."]}, "input.0: must be an item"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input.0: a session keeps no items"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input.0.type: 'web_search_call' is nothing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.image_url: must be a data URL",
        ),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input.0.arguments: must be a text"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input.0.call_id: must be"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "thoughts.%"}]},
            "input.0.encrypted_content: is not as it was sent",
        ),
        ({"tools": [FLAT, {"type": "web_search"}]}, "tools.1.type: web_search is a tool of OpenAI's"),
        ({"tools": [TOOL]}, "tools.0.name: must be a text"),
        ({"tools": {}}, "tools: must be a list"),
        ({"tools": [FLAT] * 129}, "tools: must be a list of at most 128"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice: must be"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be a whole number above 0"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format: must have one of the types"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: must be a JSON schema"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused_in_words(change: Json, words: str) -> None:
    """The words begin with the parameter's name."""
    with pytest.raises(CallError, match=words) as caught:
        responses.call({"model": "policy", "input": "Go."} | change)
    assert str(caught.value).startswith(next(iter(change)))
    assert caught.value.status == 400
    told = responses.problem(400, str(caught.value), caught.value.code)["error"]
    assert (told["param"].split(".")[0], told["type"]) == (next(iter(change)), "invalid_request_error")


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    """The last item alone; the stream ends with another event."""
    cut = reply("Half", "Thought", finish_reason="length")
    whole = responses.whole({}, cut)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    assert read_events(responses.events({}, cut))[-1][0] == "response.incomplete"


def test_events_come_in_the_order_of_openais_api() -> None:
    """Item by item, numbered, each opened, filled and closed."""
    body = {"input": "Go.", "tools": [FLAT]}
    turn = reply("Well.", "Hm.", [("c1", "add", '{"a":1}'), ("c2", "add", "{}")])
    events = read_events(responses.events(body, turn))
    filled = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    item = ["output_item.added", *filled, "output_item.done"]
    expected = ["created", "in_progress", *(one.format("reasoning_text") for one in item)]
    expected += [*(one.format("output_text") for one in item), *call, *call, "completed"]
    assert [name for name, _ in events] == [f"response.{one}" for one in expected]
    assert [data["type"] for _, data in events] == [name for name, _ in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[0][1]["response"]["output"] == []
    assert events[-1][1]["response"] == responses.whole(body, turn)
    indexes = [data["output_index"] for _, data in events if "output_index" in data]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1, 2, 3}
