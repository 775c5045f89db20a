"""OpenAI's responses. A session keeps no conversation by its id: each request brings the whole of it as input.

An answer is a list of items: thoughts, text and calls of tools. Clients send the items back as input, and all items of
one answer become one message again. Ids tell which items belong together, since some clients put the output of each
call behind the call; items without ids belong together as long as they follow each other in the order of an answer.
"""

import base64
import binascii
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.rollout.sessions.dialects import chat
from actors.rollout.sessions.dialects.calls import Call, CallError, Json, Reply, sse, unheeded
from actors.trajectories.bridges import Message

KNOWN = frozenset(
    {
        "model",
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_output_tokens",
        "text",
        "stream",
        "stream_options",
        "store",
        "include",
        "metadata",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    }
)
"""Parameters that are obeyed, or that change no answer."""
ELSEWHERE = {
    "previous_response_id": "a session keeps no answers; send the whole conversation as input (store=False)",
    "conversation": "a session keeps no conversations; send the whole conversation as input (store=False)",
    "prompt": "templates of prompts are kept at OpenAI; send instructions and input",
    "background": "an answer comes with its own request; leave background out",
}
"""Parameters that need what only OpenAI's servers keep, with the reason of their refusal."""
IN_TOOLS = ("name", "description", "parameters")
"""Fields of a tool that a chat template may read."""
FORMATS = ("text", "json_object", "json_schema")
SEALED = "reasoning.encrypted_content"
"""Value of `include` that asks for thoughts which a client can't read, only send back."""
SEAL = "thoughts."
"""Start of thoughts that are sealed here; they are encoded, not encrypted, since the client may read them anyway."""

REASONING, MESSAGE, FUNCTION_CALL = "reasoning", "message", "function_call"
ORDER = {REASONING: 0, MESSAGE: 1, FUNCTION_CALL: 2}
"""Order of the items of an answer."""
PREFIXES = {REASONING: "rs", MESSAGE: "msg", FUNCTION_CALL: "fc"}
OWN_ID = re.compile(r"(?:rs|msg|fc)_([A-Za-z0-9]+)_\d+")
"""Id of an item, with the id of its answer; ids of OpenAI's own items have no number at their end."""


def call(body: Json) -> Call:
    """Return the call of a body."""
    for name, why in ELSEWHERE.items():
        if body.get(name):
            raise CallError(400, f"{name}: {why}")
    messages = _messages(body.get("input"))
    if instructions := chat.text_of(body.get("instructions"), "instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    return Call(
        messages=messages,
        tools=tools_of(body.get("tools")),
        max_tokens=chat.number_of(body.get("max_output_tokens"), "max_output_tokens"),
        response_format=_response_format(body.get("text")),
        tool_choice=_tool_choice(body.get("tool_choice")),
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        stream=bool(body.get("stream")),
        **unheeded(body, KNOWN),
    )


def whole(body: Json, reply: Reply) -> Json:
    """Return the body of an answer."""
    usage = reply.usage
    return _response(body, reply, _status(reply), items_of(body, reply)) | {
        "incomplete_details": {"reason": "max_output_tokens"} if _status(reply) == "incomplete" else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            # OpenAI's client wants these numbers; nothing counts them here
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def events(body: Json, reply: Reply) -> Iterator[bytes]:
    """Yield the answer as events with running numbers: item by item, then the whole once more."""
    numbers = itertools.count()

    def event(kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    begun = _response(body, reply, "in_progress", [])
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(items_of(body, reply)):
        for kind, fields in _item_events(item):
            yield event(f"response.{kind}", output_index=index, **fields)
    yield event(f"response.{_status(reply)}", response=whole(body, reply))


problem = chat.problem


def items_of(body: Json, reply: Reply) -> list[Json]:
    """Return the message of a reply as items: thoughts and calls if any, and a text, which is empty beside nothing."""
    thoughts, content = reply.message.get("reasoning_content"), reply.message.get("content") or ""
    calls = reply.message.get("tool_calls") or ()
    items: list[Json] = []
    if thoughts:
        items.append({"type": REASONING, "summary": [], "content": [{"type": "reasoning_text", "text": thoughts}]})
        if SEALED in (body.get("include") or ()):
            items[0]["encrypted_content"] = SEAL + base64.b64encode(thoughts.encode()).decode()
    if content or not calls:
        text: Json = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        items.append({"type": MESSAGE, "role": "assistant", "content": [text]})
    items += [{"type": FUNCTION_CALL, "call_id": one["id"], **one["function"]} for one in calls]
    # only the last one can be cut off
    states = ["completed"] * (len(items) - 1) + [_status(reply)]
    return [
        {"id": f"{PREFIXES[item['type']]}_{reply.id}_{number}", **item, "status": state}
        for number, (item, state) in enumerate(zip(items, states, strict=True))
    ]


def tools_of(tools: Any) -> tuple[Json, ...]:
    """Return the tools of a body in the form of the chat API.

    Raises:
        CallError: a tool is no function of the agent's, or there are too many.
    """
    if tools is not None and not isinstance(tools, list):
        raise CallError(400, "tools: must be a list of functions")
    functions = []
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise CallError(400, f'tools.{number}: must be {{"type": "function", "name": …, "parameters": {{…}}}}')
        if tool["type"] != "function":
            raise CallError(
                400,
                f"tools.{number}.type: {tool['type']} is a tool of OpenAI's; a session has tools of the type function, "
                "which the agent itself runs",
            )
        if not isinstance(tool.get("name"), str):
            raise CallError(400, f"tools.{number}.name: must be a text")
        function = {name: tool[name] for name in IN_TOOLS if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return chat.tools_of(functions)


@dataclass
class _Conversation:
    """Conversation that is read item by item."""

    messages: list[Message] = field(default_factory=list)
    turn: Message | None = None
    """Last message of the model, if nothing but outputs of tools follows it."""
    answer: str | None = None
    """Id of the answer to which the turn belongs, if known."""
    last: str = ""
    """Type of the last item, if the turn or an output."""

    def add(self, message: Message) -> None:
        """Add a message of somebody else than the model."""
        self.messages.append(message)
        self.last = message["role"]
        if message["role"] != "tool":
            self.turn = self.answer = None

    def part_of_turn(self, item: Mapping[str, Any], kind: str) -> Message:
        """Return the message of the model to which an item belongs: that of the items before, or a new one."""
        found = OWN_ID.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
        answer = found and found[1]
        if self.turn is None or not self._continues(answer, kind):
            self.turn, self.answer = {"role": "assistant", "content": ""}, None
            self.messages.append(self.turn)
        self.answer, self.last = answer or self.answer, kind
        return self.turn

    def _continues(self, answer: str | None, kind: str) -> bool:
        if answer and self.answer:
            return answer == self.answer
        if self.last not in ORDER:
            return False
        # an answer has one text, and may have several calls
        return ORDER[kind] > ORDER[self.last] or kind == self.last != MESSAGE


def _messages(given: Any) -> list[Message]:
    """Return the messages of an input."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise CallError(400, "input: must be a text, or a list with at least one item")
    read = _Conversation()
    for number, item in enumerate(given):
        _read_item(read, item, f"input.{number}")
    return read.messages


def _read_item(read: _Conversation, item: Any, place: str) -> None:
    """Add an item to a conversation.

    Raises:
        CallError: the item is none that the policy can see.
    """
    if not isinstance(item, Mapping):
        raise CallError(400, f"{place}: must be an item with a type")
    kind = item.get("type") or (MESSAGE if "role" in item else None)
    if kind == MESSAGE:
        _read_message(read, item, place)
    elif kind == REASONING:
        # thoughts of another model are sealed, and only their owner can read them
        if thoughts := _thoughts(item, place):
            turn = read.part_of_turn(item, REASONING)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
    elif kind == FUNCTION_CALL:
        made = _function_call(item, place)
        read.part_of_turn(item, FUNCTION_CALL).setdefault("tool_calls", []).append(made)
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise CallError(400, f"{place}.call_id: must be the call_id of a function_call")
        content = chat.content_of(item.get("output"), f"{place}.output")
        read.add({"role": "tool", "content": content, "tool_call_id": item["call_id"]})
    elif kind == "item_reference":
        raise CallError(400, f"{place}: a session keeps no items; send the item itself (store=False)")
    else:
        raise CallError(
            400,
            f"{place}.type: {kind!r} is nothing that the policy can see; message, function_call, function_call_output "
            "and reasoning are",
        )


def _read_message(read: _Conversation, item: Mapping[str, Any], place: str) -> None:
    message = chat.message_of({"role": item.get("role"), "content": item.get("content")}, place)
    if message["role"] != "assistant":
        read.add(message)
        return
    turn = read.part_of_turn(item, MESSAGE)
    turn["content"] += message["content"]


def _thoughts(item: Mapping[str, Any], place: str) -> str:
    """Return the text of thoughts, or their summary; empty if they are sealed by another server."""
    if item.get("content"):
        return chat.text_of(item["content"], f"{place}.content")
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEAL):
        try:
            return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise CallError(400, f"{place}.encrypted_content: is not as it was sent") from None
    return chat.text_of(item.get("summary"), f"{place}.summary")


def _function_call(item: Mapping[str, Any], place: str) -> Json:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise CallError(400, f"{place}.{name}: must be a text")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    """Return the choice in the form of the chat API."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise CallError(400, 'tool_choice: must be auto, none, required or {"type": "function", "name": …}')
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(text: Any) -> Json | None:
    """Return the format of `text` in the form of the chat API."""
    given = text.get("format") if isinstance(text, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") not in FORMATS:
        raise CallError(400, f"text.format: must have one of the types {', '.join(FORMATS)}")
    if given["type"] != "json_schema":
        return {"type": given["type"]}
    if not isinstance(given.get("schema"), Mapping):
        raise CallError(400, "text.format.schema: must be a JSON schema")
    return {"type": "json_schema", "json_schema": {name: one for name, one in given.items() if name != "type"}}


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def _response(body: Json, reply: Reply, status: str, output: list[Json]) -> Json:
    """Return an answer with the settings that hold, as far as the API has names for them."""
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": reply.model,
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": reply.turn.answer.temperature,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
    }


def _item_events(item: Json) -> Iterator[tuple[str, Json]]:
    """Yield kinds and fields of the events of an item; its text, or its arguments, come whole."""
    place = {"item_id": item["id"]}
    if item["type"] == FUNCTION_CALL:
        yield "output_item.added", {"item": item | {"arguments": "", "status": "in_progress"}}
        yield "function_call_arguments.delta", place | {"delta": item["arguments"]}
        yield "function_call_arguments.done", place | {"name": item["name"], "arguments": item["arguments"]}
    else:
        [part] = item["content"]
        place["content_index"] = 0
        beside = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield "output_item.added", {"item": item | {"content": [], "status": "in_progress"}}
        yield "content_part.added", place | {"part": part | {"text": ""}}
        yield f"{part['type']}.delta", place | {"delta": part["text"], **beside}
        yield f"{part['type']}.done", place | {"text": part["text"], **beside}
        yield "content_part.done", place | {"part": part}
    yield "output_item.done", {"item": item}
