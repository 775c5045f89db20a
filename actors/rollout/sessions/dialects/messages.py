"""Anthropic's messages. The body of `/v1/messages/count_tokens` is read by the same function.

A message has blocks here: text, images, thoughts, uses of tools and their results. Results stand in a user's message,
and become messages of tools. Arguments of a tool are an object, so their writing comes back otherwise than the model
had it (see `actors.rollout.sessions.history`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.rollout.sessions.dialects import chat
from actors.rollout.sessions.dialects.calls import Call, CallError, Json, Reply, sse, unheeded
from actors.trajectories.bridges import Message

KNOWN = frozenset(
    {
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "stop_sequences",
        "stream",
        "output_config",
        "metadata",
        "service_tier",
        "cache_control",
    }
)
"""Parameters that are obeyed, or that change no answer."""
IN_MODEL = ("text", "thinking", "redacted_thinking", "tool_use")
"""Blocks of the model's messages. Thoughts that are redacted can be read by their owner alone, and are left out."""
IN_USER = ("text", "image", "tool_result")
PROBLEMS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Names of problems by HTTP status; other ones are `invalid_request_error` below 500, and `api_error`."""


def call(body: Json) -> Call:
    """Return the call of a body."""
    if body.get("mcp_servers"):
        raise CallError(400, "mcp_servers: are asked by Anthropic's servers; the agent itself must run its tools")
    if body.get("thread"):
        # Anthropic's client goes on without threads if it reads this code
        words = "thread: a session keeps no messages; send the whole conversation with each request"
        raise CallError(400, words, "thread_unsupported_request")
    messages = _messages(body.get("messages"))
    if system := chat.text_of(body.get("system"), "system"):
        messages.insert(0, {"role": "system", "content": system})
    choice = body.get("tool_choice")
    return Call(
        messages=messages,
        tools=tools_of(body.get("tools")),
        max_tokens=chat.number_of(body.get("max_tokens"), "max_tokens"),
        stop=chat.stops_of(body.get("stop_sequences"), "stop_sequences"),
        response_format=_response_format(body.get("output_config")),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use")),
        stream=bool(body.get("stream")),
        **unheeded(body, KNOWN),
    )


def whole(body: Json, reply: Reply) -> Json:
    """Return the body of an answer."""
    return _head(reply) | {"content": blocks_of(reply), "usage": _usage(reply)} | _end(body, reply)


def events(body: Json, reply: Reply) -> Iterator[bytes]:
    """Yield the answer as events, block by block; the arguments of a tool are the model's own text."""

    def event(kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, **fields}, kind)

    opened = _head(reply) | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", message=opened | {"usage": _usage(reply) | {"output_tokens": 0}})
    yield event("ping")
    written = iter(reply.message.get("tool_calls") or ())
    for index, block in enumerate(blocks_of(reply)):
        arguments = next(written)["function"]["arguments"] if block["type"] == "tool_use" else ""
        begun, deltas = _in_parts(block, arguments)
        yield event("content_block_start", index=index, content_block=begun)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=_end(body, reply), usage=_usage(reply))
    yield event("message_stop")


def problem(status: int, words: str, code: str) -> Json:
    """Return the body of a failed request; clients choose their exception by the name of the problem."""
    kind = PROBLEMS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": words, "details": {"error_code": code}}
    return {"type": "error", "error": error, "request_id": None}


def blocks_of(reply: Reply) -> list[Json]:
    """Return the message of a reply as blocks; there are none of what is empty, as Anthropic's API has it.

    Thoughts have a signature, which is nothing but the name of the reply: clients drop thoughts without one.
    """
    thoughts, content = reply.message.get("reasoning_content"), reply.message.get("content")
    blocks: list[Json] = []
    if thoughts:
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": reply.id})
    if content:
        blocks.append({"type": "text", "text": content})
    for one in reply.message.get("tool_calls") or ():
        name, arguments = one["function"]["name"], json.loads(one["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": one["id"], "name": name, "input": arguments})
    return blocks


def tools_of(tools: Any) -> tuple[Json, ...]:
    """Return the tools of a body in the form of the chat API.

    Raises:
        CallError: a tool has no schema of its own, or there are too many.
    """
    if tools is not None and not isinstance(tools, list):
        raise CallError(400, "tools: must be a list of tools")
    functions = []
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise CallError(400, f'tools.{number}: must be {{"name": …, "input_schema": {{…}}}}')
        if tool.get("type") not in (None, "custom"):
            raise CallError(
                400,
                f"tools.{number}.type: {tool['type']} is a tool of Anthropic's that other models do not know; give one "
                "with name, description and input_schema",
            )
        if not isinstance(tool.get("input_schema"), Mapping):
            raise CallError(400, f"tools.{number}.input_schema: must be a JSON schema")
        described = {} if tool.get("description") is None else {"description": tool["description"]}
        function = {"name": tool["name"], **described, "parameters": tool["input_schema"]}
        functions.append({"type": "function", "function": function})
    return chat.tools_of(functions)


def _messages(given: Any) -> list[Message]:
    """Return the messages of a body; the model's messages that follow each other are one, as in Anthropic's API.

    Raises:
        CallError: the last one is the model's, or one is none.
    """
    if not isinstance(given, list) or not given:
        raise CallError(400, "messages: must be a list with at least one message")
    messages: list[Message] = []
    blocks: list[Json] = []
    for number, one in enumerate(given):
        place = f"messages.{number}"
        role = one.get("role") if isinstance(one, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise CallError(400, f"{place}.role: must be user, assistant or system")
        if role == "assistant":
            blocks += _blocks(one.get("content"), f"{place}.content", IN_MODEL)
            if number + 1 == len(given):
                raise CallError(400, f"{place}: the last message must be no assistant's, since none can be continued")
            if not _is_assistant(given[number + 1]):
                messages.append(_of_model(blocks, place))
                blocks = []
        elif role == "system":
            messages.append({"role": "system", "content": chat.text_of(one.get("content"), f"{place}.content")})
        else:
            messages += _of_user(_blocks(one.get("content"), f"{place}.content", IN_USER), place)
    return messages


def _is_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _blocks(content: Any, place: str, kinds: Sequence[str]) -> list[Json]:
    """Return the blocks of a content.

    Raises:
        CallError: one has another type.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise CallError(400, f"{place}: must be a text, or a list of blocks")
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in kinds:
            raise CallError(
                400, f"{place}.{number}.type: {kind!r} is nothing that the policy can see here; {', '.join(kinds)} are"
            )
    return content


def _of_model(blocks: Sequence[Json], place: str) -> Message:
    """Return a message of the model."""
    texts = [block for block in blocks if block["type"] == "text"]
    message: Message = {"role": "assistant", "content": chat.text_of(texts, f"{place}.content")}
    thoughts = [{"text": block.get("thinking")} for block in blocks if block["type"] == "thinking"]
    if thoughts:
        message["reasoning_content"] = chat.text_of(thoughts, f"{place}.content.thinking")
    uses = [block for block in blocks if block["type"] == "tool_use"]
    if uses:
        message["tool_calls"] = [_tool_call(block, place) for block in uses]
    return message


def _of_user(blocks: Sequence[Json], place: str) -> list[Message]:
    """Return the results of tools as messages, and texts and images as a message behind them if there are any."""
    messages = [_result(block, f"{place}.content") for block in blocks if block["type"] == "tool_result"]
    shown = [one for one in _with_images(blocks, f"{place}.content") if one["type"] != "tool_result"]
    if shown or not messages:
        messages.append({"role": "user", "content": chat.content_of(shown, f"{place}.content")})
    return messages


def _with_images(blocks: Sequence[Any], place: str) -> list[Any]:
    """Return blocks with each image in the form of the chat API.

    Raises:
        CallError: an image is not in the request itself.
    """
    return [
        _image(block, f"{place}.{number}") if isinstance(block, Mapping) and block.get("type") == "image" else block
        for number, block in enumerate(blocks)
    ]


def _image(block: Mapping[str, Any], place: str) -> Json:
    source = block.get("source")
    kind, data = (source.get("media_type"), source.get("data")) if isinstance(source, Mapping) else (None, None)
    if not isinstance(kind, str) or not isinstance(data, str):
        raise CallError(400, f"{place}.source: must have the type base64, with media_type and data; {chat.NOT_LOADED}")
    return chat.image_part(f"data:{kind};base64,{data}")


def _result(block: Json, place: str) -> Message:
    if not isinstance(block.get("tool_use_id"), str):
        raise CallError(400, f"{place}.tool_use_id: must be the id of a tool_use")
    given = block.get("content")
    blocks = _with_images(given, f"{place}.content") if isinstance(given, list) else given
    content = chat.content_of(blocks, f"{place}.content")
    # chat templates have no field for it, and the policy should know
    if block.get("is_error"):
        if not isinstance(content, str):
            content = [{"type": "text", "text": "Error: "}, *content]
        elif "error" not in content.partition("\n")[0].lower():
            content = f"Error: {content}"
    return {"role": "tool", "content": content, "tool_call_id": block["tool_use_id"]}


def _tool_call(block: Json, place: str) -> Json:
    if not isinstance(block.get("id"), str) or not isinstance(block.get("name"), str):
        raise CallError(400, f"{place}.content: a tool_use must have an id and a name")
    if not isinstance(block.get("input"), Mapping):
        raise CallError(400, f"{place}.content: the input of a tool_use must be an object")
    try:
        arguments = json.dumps(block["input"], ensure_ascii=False)
    except RecursionError:
        raise CallError(400, f"{place}.content: the input of a tool_use has too many levels") from None
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _tool_choice(choice: Any) -> Any:
    """Return the choice in the form of the chat API."""
    if choice is None:
        return None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if kind not in ("auto", "any", "none"):
        raise CallError(400, 'tool_choice.type: must be auto, any, none, or tool with a "name"')
    return "required" if kind == "any" else kind


def _response_format(config: Any) -> Json | None:
    """Return the format of `output_config` in the form of the chat API."""
    given = config.get("format") if isinstance(config, Mapping) else None
    if given is None:
        return None
    schema = given.get("schema") if isinstance(given, Mapping) and given.get("type") == "json_schema" else None
    if not isinstance(schema, Mapping):
        raise CallError(400, 'output_config.format: must be {"type": "json_schema", "schema": {…}}')
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _head(reply: Reply) -> Json:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _usage(reply: Reply) -> Json:
    prompt, completion = reply.usage["prompt_tokens"], reply.usage["completion_tokens"]
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": completion, **cached}


def _end(body: Json, reply: Reply) -> Json:
    """Return why the answer ended. The run's own stop texts are none that the client knows."""
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    asked = chat.stops_of(body.get("stop_sequences"), "stop_sequences")
    if reply.finish_reason == "stop" and reply.stopped_by in asked:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": reasons.get(reply.finish_reason, "end_turn"), "stop_sequence": None}


def _in_parts(block: Json, arguments: str) -> tuple[Json, list[Json]]:
    """Return the start of a block, and the deltas that complete the block."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return block | {"thinking": "", "signature": ""}, [thought, signed]
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
