"""Answers to rollout actors in msgpack: numbers travel as arrays of bytes, which large groups are read from faster.

    {"boot_id": str, "choices": [{"text": str, "token_ids": int32, "logprobs": float64, "segments": [[int, int, int]],
                                  "finish_reason": str, "routed_experts": bytes, "expert_layout": [int, int, int]}]}

`int32` and `float64` stand for the little-endian bytes of such an array, an element per token. float64 holds what JSON
holds, so a group has the same bits either way. The last two keys are there with `trainer.router_replay` alone, and hold
the experts of the prompt's tokens and of all sampled ones but the last (`schemas.routed`).
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from actors.engines.protocol import Completion
from schemas import routed

CONTENT_TYPE = "application/msgpack"
"""Value of `Accept` in a request for such an answer, and of `Content-Type` in the answer."""


def encode(boot_id: str, completions: Sequence[Completion], texts: Sequence[str]) -> bytes:
    """Return the body of an answer.

    Args:
        boot_id: answering process.
        completions: all completions, in the order of their numbers.
        texts: text of each completion.
    """
    choices = [
        {
            "text": text,
            "token_ids": np.asarray(completion.token_ids, "<i4").tobytes(),
            "logprobs": np.asarray(completion.logprobs, "<f8").tobytes(),
            "segments": completion.segments,
            "finish_reason": completion.finish_reason,
            **_experts_of(completion),
        }
        for completion, text in zip(completions, texts, strict=True)
    ]
    # a text from bytes that are no UTF-8 may hold half a surrogate pair
    packed: bytes = msgpack.packb({"boot_id": boot_id, "choices": choices}, unicode_errors="surrogatepass")
    return packed


def _experts_of(completion: Completion) -> dict[str, Any]:
    if completion.routed_experts is None:
        return {}
    pieces, layout = routed.packed(completion.routed_experts)
    return {"routed_experts": b"".join(pieces), "expert_layout": layout}


def decode(body: bytes) -> tuple[str, list[tuple[Completion, str]]]:
    """Return the answering process, and the completions with their texts.

    Raises:
        ValueError: the body is no such answer.
    """
    try:
        answer = msgpack.unpackb(body, unicode_errors="surrogatepass")
        return _text(answer["boot_id"]), [_completion(choice) for choice in answer["choices"]]
    # of msgpack: no msgpack, or nested too deeply
    except (KeyError, IndexError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"no answer of an engine: {error!r}") from None


def _completion(choice: dict[str, Any]) -> tuple[Completion, str]:
    completion = Completion(
        np.frombuffer(choice["token_ids"], "<i4").tolist(),
        np.frombuffer(choice["logprobs"], "<f8").tolist(),
        [(int(start), int(lineage), int(version)) for start, lineage, version in choice["segments"]],
        _text(choice["finish_reason"]),
    )
    if "routed_experts" in choice:
        pieces, layout = [choice["routed_experts"]], choice["expert_layout"]
        num_tokens = len(choice["routed_experts"]) // max(1, layout[0] * layout[1] * layout[2])
        routed.check(pieces, layout, num_tokens)
        completion.routed_experts = routed.unpacked(pieces, layout)
    return completion, _text(choice["text"])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    return value
