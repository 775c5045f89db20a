"""OpenAI's chat completions, with vLLM's extensions (`return_token_ids`) and the token endpoint of verifiers.

`/v1/chat/completions/tokens` (verifiers' token client) is the same body with `tokens`, the prompt's token ids.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.rollout.sessions.dialects.calls import Call, CallError, Json, Reply, sse, unheeded
from actors.trajectories.bridges import Message
from schemas import limits

KNOWN = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "response_format",
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
        "tokens",
        "user",
    }
)
"""Parameters that are obeyed, or that change no answer."""
READS_TOKENS = ("return_token_ids", "tokens", "logprobs")
"""Parameters of clients that read the prompt's tokens."""
IN_MESSAGES = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
"""Fields of a message that a chat template may read."""
IMAGE_TYPES = ("image_url", "input_image")
"""Types of parts that are images, in the chat API and in the Responses API."""
NOT_LOADED = "images are not loaded from elsewhere, since the trainer must see the same bytes"
"""Words on images of other machines."""


def call(body: Json) -> Call:
    """Return the call of a body."""
    if body.get("n") not in (None, 1):
        raise CallError(400, "n: a session answers with one choice; ask several times")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CallError(400, "messages: must be a list with at least one message")
    max_tokens = body.get("max_completion_tokens")
    return Call(
        messages=[message_of(one, f"messages.{number}") for number, one in enumerate(messages)],
        prompt=None if body.get("tokens") is None else ids_of(body["tokens"], "tokens"),
        tools=tools_of(body.get("tools")),
        max_tokens=number_of(body.get("max_tokens") if max_tokens is None else max_tokens, "max_tokens"),
        stop=stops_of(body.get("stop")),
        response_format=body.get("response_format"),
        tool_choice=body.get("tool_choice"),
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        stream=bool(body.get("stream")),
        **unheeded(body, KNOWN),
    )


def whole(body: Json, reply: Reply) -> Json:
    """Return the body of an answer."""
    answer = _head(reply, "chat.completion") | {"usage": reply.usage}
    choice: Json = {"index": 0, "message": {"role": "assistant", **_shown(reply)}}
    answer["choices"] = [choice | _beside(body, reply) | {"finish_reason": reply.finish_reason}]
    if any(body.get(name) for name in READS_TOKENS):
        # of a long prompt it is most of the answer, and most clients overlook it
        answer["prompt_token_ids"] = list(reply.turn.prompt_ids)
    return answer


def events(body: Json, reply: Reply) -> Iterator[bytes]:
    """Yield the answer as chunks: the role, the message, the reason of its end, and the usage if asked for."""
    head = _head(reply, "chat.completion.chunk")

    def chunk(delta: Json, reason: str | None = None, **beside: Any) -> bytes:
        return sse(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, **beside}]})

    yield chunk({"role": "assistant", "content": ""})
    delta = _shown(reply)
    # OpenAI's client joins the parts of a call by this number
    if "tool_calls" in delta:
        delta["tool_calls"] = [one | {"index": number} for number, one in enumerate(delta["tool_calls"])]
    yield chunk(delta, **_beside(body, reply))
    yield chunk({}, reply.finish_reason)
    if wants_usage(body):
        yield sse(head | {"choices": [], "usage": reply.usage})
    yield sse("[DONE]")


def problem(status: int, words: str, code: str) -> Json:
    """Return the body of a failed request, as OpenAI's API has it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": words, "type": kind, "param": words.partition(":")[0], "code": code}}


def message_of(given: Any, place: str) -> Message:
    """Return a message with the fields that chat templates read; parts of text are joined.

    Raises:
        CallError: it is no message, or has other contents than text and images; answers of the model are text alone.
    """
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise CallError(400, f"{place}: must be a message with a role")
    message = {name: given[name] for name in IN_MESSAGES if given.get(name) is not None}
    read = text_of if message["role"] == "assistant" else content_of
    message["content"] = read(given.get("content"), f"{place}.content")
    if message["role"] == "developer":
        # OpenAI's newer name; chat templates know the older one
        message["role"] = "system"
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise CallError(400, f"{place}.tool_calls: must be a list")
        message["tool_calls"] = [
            _tool_call(one, f"{place}.tool_calls.{number}") for number, one in enumerate(message["tool_calls"])
        ]
    return message


def content_of(content: Any, place: str) -> str | list[Json]:
    """Return a content as a text; as parts, each a text or an image (`image_url`), if an image is among them.

    Raises:
        CallError: a part is neither text nor image, or the URL of an image is no data URL.
    """
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, place, " and images")
    return [_part(part, f"{place}.{number}") for number, part in enumerate(content)]


def text_of(content: Any, place: str, also: str = "") -> str:
    """Return a content as a text: parts are joined with line breaks, as vLLM does; nothing is an empty text.

    Raises:
        CallError: it has other parts than texts. `also` names the other parts that this place may have.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(texts)  # type: ignore[arg-type]
    raise CallError(400, f"{place}: must be a text, or parts of text{also}; the policy sees nothing else")


def tools_of(tools: Any) -> tuple[Json, ...]:
    """Return the tools of a body.

    Raises:
        CallError: one is no function with a name, or there are too many.
    """
    if not tools:
        return ()
    if not isinstance(tools, list) or len(tools) > limits.HTTP_TOOLS:
        raise CallError(400, f"tools: must be a list of at most {limits.HTTP_TOOLS}")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise CallError(400, f'tools.{number}: must be {{"type": "function", "function": {{"name": …}}}}')
    return tuple(tools)


def number_of(value: Any, name: str) -> int | None:
    """Return a number of tokens; None if there is none.

    Raises:
        CallError: it is no whole number above 0.
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CallError(400, f"{name}: must be a whole number above 0")
    return value


def stops_of(stop: Any, name: str = "stop") -> tuple[str, ...]:
    """Return texts that end an answer: one, or a list.

    Raises:
        CallError: one is no text, or empty, or there are too many.
    """
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise CallError(400, f"{name}: must be a text, or a list of texts")
    if len(stops) > limits.HTTP_STOPS or any(len(one) > limits.HTTP_STOP_CHARACTERS for one in stops):
        raise CallError(400, f"{name}: at most {limits.HTTP_STOPS} texts of {limits.HTTP_STOP_CHARACTERS} characters")
    return tuple(stops)


def ids_of(ids: Any, name: str) -> list[int]:
    """Return token ids.

    Raises:
        CallError: it is no list of token ids.
    """
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise CallError(400, f"{name}: must be a list of token ids")
    return ids


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with the numbers of tokens."""
    options = body.get("stream_options")
    return isinstance(options, Mapping) and bool(options.get("include_usage"))


def logprob_of(token: int, value: float) -> Json:
    """Return the logprob of a token in vLLM's form for tokens by id: the text of a token may be half a character."""
    return {"token": f"token_id:{token}", "logprob": value, "bytes": [], "top_logprobs": []}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def _part(part: Any, place: str) -> Json:
    """Return a part of a content with images."""
    if not _is_image(part):
        return {"type": "text", "text": text_of([part], place)}
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith("data:"):
        raise CallError(
            400,
            f"{place}.image_url: must be a data URL (data:image/png;base64,…); {NOT_LOADED}",
        )
    return image_part(url)


def image_part(url: str) -> Json:
    """Return an image as a part of a content, in the form of the chat API."""
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(given: Any, place: str) -> Json:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CallError(400, f"{place}: must be a call of a function with a name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        raise CallError(400, f"{place}.function.arguments: must be JSON as a text")
    return {
        "id": str(given.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _head(reply: Reply, kind: str) -> Json:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _shown(reply: Reply) -> Json:
    """Return the fields of the message; a content beside tool calls is null if empty, as in OpenAI's API."""
    message = {name: value for name, value in reply.message.items() if name != "role"}
    if message.get("tool_calls"):
        message["content"] = message.get("content") or None
    return message


def _beside(body: Json, reply: Reply) -> Json:
    """Return the fields beside a message: its tokens, and their logprobs if asked for."""
    ids: Sequence[int] = reply.turn.answer.token_ids
    told: Json = {"token_ids": list(ids), "logprobs": None}
    if body.get("logprobs"):
        pairs = zip(ids, reply.turn.answer.logprobs, strict=True)
        told["logprobs"] = {"content": [logprob_of(token, value) for token, value in pairs]}
    return told
