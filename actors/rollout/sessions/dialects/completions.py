"""OpenAI's completions: the client's own prompt, as a text or as token ids, and the answer as the model wrote it."""

from collections.abc import Iterator
from typing import Any

from actors.rollout.sessions.dialects import chat
from actors.rollout.sessions.dialects.calls import Call, CallError, Json, Reply, sse, unheeded

KNOWN = frozenset(
    {
        "model",
        "prompt",
        "max_tokens",
        "stop",
        "stream",
        "stream_options",
        "n",
        "best_of",
        "echo",
        "suffix",
        "logprobs",
        "return_token_ids",
        "user",
    }
)
"""Parameters that are obeyed, or that change no answer."""


def call(body: Json) -> Call:
    """Return the call of a body. Without max_tokens the run's limit holds, not OpenAI's 16."""
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise CallError(400, f"{name}: a session answers with one choice; ask several times")
    for name in ("echo", "suffix"):
        if body.get(name):
            raise CallError(400, f"{name}: a session answers with new tokens behind the prompt alone; leave {name} out")
    logprobs = body.get("logprobs")
    if logprobs is not None and (not isinstance(logprobs, int) or logprobs < 0):
        raise CallError(400, "logprobs: must be a whole number; the sampled token's alone is told")
    return Call(
        prompt=_prompt(body.get("prompt")),
        max_tokens=chat.number_of(body.get("max_tokens"), "max_tokens"),
        stop=chat.stops_of(body.get("stop")),
        stream=bool(body.get("stream")),
        **unheeded(body, KNOWN),
    )


def whole(body: Json, reply: Reply) -> Json:
    """Return the body of an answer."""
    return _head(reply) | {"choices": [_choice(body, reply)], "usage": reply.usage}


def events(body: Json, reply: Reply) -> Iterator[bytes]:
    """Yield the answer as one chunk, and the usage if asked for."""
    yield sse(_head(reply) | {"choices": [_choice(body, reply)]})
    if chat.wants_usage(body):
        yield sse(_head(reply) | {"choices": [], "usage": reply.usage})
    yield sse("[DONE]")


problem = chat.problem


def _prompt(prompt: Any) -> str | list[int]:
    """Return the prompt: a text, token ids, or a list with one of these.

    Raises:
        CallError: there are several, or none.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise CallError(400, f"prompt: {len(prompt)} are more than one; ask for each by itself")
        [prompt] = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    if not prompt or isinstance(prompt, str):
        raise CallError(400, "prompt: must be a text or token ids, and not empty")
    return chat.ids_of(prompt, "prompt")


def _head(reply: Reply) -> Json:
    return {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": reply.created, "model": reply.model}


def _choice(body: Json, reply: Reply) -> Json:
    answer = reply.turn.answer
    logprobs = None
    # `logprobs: 0` asks for the sampled token's
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        tokens = [f"token_id:{token}" for token in answer.token_ids]
        # the text of one token alone may be half a character, and so there are no places in the text
        logprobs = {"tokens": tokens, "token_logprobs": list(answer.logprobs), "top_logprobs": None, "text_offset": []}
    return {
        "index": 0,
        "text": reply.message.get("content") or "" if reply.text is None else reply.text,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "prompt_token_ids": list(reply.turn.prompt_ids),
        "token_ids": list(answer.token_ids),
    }
