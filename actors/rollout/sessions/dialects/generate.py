"""vLLM's `/inference/v1/generate`, tokens in and tokens out, as the training client of verifiers asks."""

from collections.abc import Iterator, Mapping

from actors.rollout.sessions.dialects import chat
from actors.rollout.sessions.dialects.calls import Call, CallError, Json, Reply, sse, unheeded

KNOWN = frozenset(
    {"model", "request_id", "token_ids", "sampling_params", "stream", "stream_options", "cache_salt", "priority"}
)
"""Parameters that are obeyed, or that change no answer."""
KNOWN_SAMPLING = frozenset({"max_tokens", "stop", "logprobs", "skip_special_tokens", "n", "detokenize"})
"""Keys of `sampling_params` that are obeyed, or that change no answer."""


def call(body: Json) -> Call:
    """Return the call of a body."""
    for name in ("features", "content_parts"):
        if body.get(name):
            raise CallError(400, f"{name}: the policy sees nothing but tokens; leave {name} out")
    if body.get("output_mode") not in (None, "tokens"):
        raise CallError(400, "output_mode: a session answers with tokens")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise CallError(400, "sampling_params: must be an object")
    if sampling.get("n") not in (None, 1):
        raise CallError(400, "sampling_params.n: a session answers with one choice; ask several times")
    unknown, unheeded_keys = unheeded(body, KNOWN), unheeded(sampling, KNOWN_SAMPLING)
    return Call(
        prompt=chat.ids_of(body.get("token_ids"), "token_ids"),
        max_tokens=chat.number_of(sampling.get("max_tokens"), "sampling_params.max_tokens"),
        stop=chat.stops_of(sampling.get("stop"), "sampling_params.stop"),
        stream=bool(body.get("stream")),
        pinned=unheeded_keys["pinned"],
        ignored=(*unknown["pinned"], *unknown["ignored"], *unheeded_keys["ignored"]),
    )


def whole(body: Json, reply: Reply) -> Json:
    """Return the body of an answer."""
    answer = reply.turn.answer
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    choice: Json = {
        "index": 0,
        "token_ids": list(answer.token_ids),
        "logprobs": {"content": [chat.logprob_of(token, value) for token, value in pairs]},
        "finish_reason": answer.finish_reason,
    }
    return {"request_id": reply.id, "choices": [choice], "prompt_token_ids": list(reply.turn.prompt_ids)}


def events(body: Json, reply: Reply) -> Iterator[bytes]:
    """Yield the answer as one chunk."""
    yield sse(whole(body, reply))
    yield sse("[DONE]")


problem = chat.problem
