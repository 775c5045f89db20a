"""Continuation of completions interrupted by a server, as pure functions.

asked for 8 tokens   sampled a b c, interrupted   asked for 5 behind prompt + a b c   sampled d e f g h   joined
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actors.engines.protocol import Completion, SampleRequest
from actors.engines.text import Detokenize, StopWatch
from schemas.routed import Experts

ABORTED = "abort"
"""Finish reason of a completion aborted for this engine, to be continued."""


def rest_of(asked: SampleRequest, number: int, so_far: Completion) -> SampleRequest:
    """Return the request that continues completion `number` behind the tokens so far.

    The new seed is a hash of the completion's seed and the place. With the old seed, the random numbers of the first
    tokens would be used again, for tokens that depend on these numbers already.

    For the server the tokens so far are part of the prompt, so `presence_penalty` and `frequency_penalty` do not see
    them any more.
    """
    done = len(so_far.token_ids)
    digest = hashlib.sha256(f"{asked.seed + number} {done}".encode()).digest()
    return replace(
        asked,
        prompt_ids=asked.prompt_ids + so_far.token_ids,
        num_completions=1,
        max_tokens=None if asked.max_tokens is None else asked.max_tokens - done,
        sampling=asked.sampling.model_copy(update={"min_tokens": max(0, asked.sampling.min_tokens - done)}),
        # 7 bytes, so that the seed is below 2**63
        seed=int.from_bytes(digest[:7]),
        on_piece=None,
    )


def joined(so_far: Completion, rest: Completion) -> Completion:
    """Return a completion with the continuation appended."""
    first = len(so_far.token_ids)
    segments = so_far.segments + [(first + start, lineage, version) for start, lineage, version in rest.segments]
    return Completion(
        so_far.token_ids + rest.token_ids,
        so_far.logprobs + rest.logprobs,
        # a continuation under the same policy continues its last segment
        [segment for i, segment in enumerate(segments) if i == 0 or segment[1:] != segments[i - 1][1:]],
        rest.finish_reason,
        stop_reason=rest.stop_reason,
        top_logprobs=so_far.top_logprobs + rest.top_logprobs,
        routed_experts=_joined_experts(so_far, rest),
    )


def _joined_experts(so_far: Completion, rest: Completion) -> Experts | None:
    """Return the experts of all tokens, each as it was computed first: the rest tells of all, the prompt included."""
    first, last = so_far.routed_experts, rest.routed_experts
    if last is None:
        # an abort before the next token tells none, and there are none to tell
        return None if rest.token_ids else first
    return last if first is None else np.concatenate([first, last[len(first) :]])


def cut_at_stop(whole: Completion, stop: Sequence[str], detokenize: Detokenize, min_tokens: int = 0) -> Completion:
    """Return a joined completion up to its first stop string.

    The server can't see a stop string that spans the seam.

    Args:
        min_tokens: number of tokens in which no stop string counts.
    """
    watch = StopWatch(stop, (), detokenize, min_tokens)
    for last, token in enumerate(whole.token_ids):
        reason = watch.add(token)
        if reason is not None:
            end = last + 1
            return Completion(
                whole.token_ids[:end],
                whole.logprobs[:end],
                [segment for segment in whole.segments if segment[0] < end],
                "stop",
                stop_reason=reason,
                top_logprobs=whole.top_logprobs[:end],
                routed_experts=whole.routed_experts[: end - len(whole.token_ids) or None]
                if whole.routed_experts is not None
                else None,
            )
    return whole
