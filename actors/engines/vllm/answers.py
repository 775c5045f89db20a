"""vLLM's answers as completions; all pure functions.

The server labels what it samples with the weights that it holds, and each choice of an answer comes with spans:

    spans     {"version": "b7f0:1.4.5", "start": 0, "end": 12}, {"version": "b7f0:1.5.6", "start": 12, "end": 40}
    segments  [(0, 1, 4), (12, 1, 5)]

The label is set by the engine with each update (see `labels`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from actors.engines.labels import Version, segments_of
from actors.engines.protocol import Alternatives, Completion, EngineStoppedError, SampleRequest
from schemas.messages import Policy

NO_LOGPROB = -9999.0
"""What the server writes for a logprob that is not a number."""


def sampling_params(asked: SampleRequest, eos: frozenset[int]) -> dict[str, Any]:
    """A request in vLLM's terms; it samples completion i of n with seed + i, as is our contract.

    The end of sequence is told as stop tokens, so that it is the model's generation_config that decides, as in every
    engine of ours, and not the tokenizer's.
    """
    params: dict[str, Any] = {
        "n": asked.num_completions,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "seed": asked.seed,
        "logit_bias": {str(token): bias for token, bias in asked.logit_bias.items()} or None,
        "stop": list(asked.stop),
        "stop_token_ids": sorted(eos | set(asked.stop_token_ids)),
        "ignore_eos": True,
        "detokenize": bool(asked.stop),
        "logprobs": asked.num_top_logprobs and asked.num_top_logprobs + 1,
    }
    return params | ({} if asked.max_tokens is None else {"max_tokens": asked.max_tokens})


def completions_of(
    answer: Mapping[str, Any],
    asked: SampleRequest,
    eos: frozenset[int],
    labels: Mapping[str, Policy | None],
    sampled_by: Version | None = None,
) -> list[Completion]:
    """The choices of an answer.

    Args:
        answer: of `/inference/v1/generate`.
        asked: what it answers.
        eos: tokens that end a completion without being a stop reason.
        labels: those that were set, with what they stand for.
        sampled_by: the adapter that was asked for; the labels then only prove that it is our server.

    Raises:
        UnknownWeightsError: a label was not set by us, or there is none.
        EngineStoppedError: the model's logits are not finite.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [_completion(choice, asked, eos, labels, sampled_by) for choice in choices]


def _completion(
    choice: Mapping[str, Any],
    asked: SampleRequest,
    eos: frozenset[int],
    labels: Mapping[str, Policy | None],
    sampled_by: Version | None,
) -> Completion:
    content, stop_reason = choice["logprobs"]["content"], choice["stop_reason"]
    segments = segments_of(choice["weight_versions"], labels)
    if sampled_by is not None:
        policy = sampled_by.policy
        segments = [(0, policy.lineage, policy.version)] if policy and content else []
    logprobs = [token["logprob"] for token in content]
    if any(logprob <= NO_LOGPROB for logprob in logprobs):
        raise EngineStoppedError("vLLM sampled tokens without a logprob: the model's logits are not finite")
    return Completion(
        choice["token_ids"],
        logprobs,
        segments,
        choice["finish_reason"],
        stop_reason=None if stop_reason in eos and stop_reason not in asked.stop_token_ids else stop_reason,
        top_logprobs=[alternatives(token["top_logprobs"], asked.num_top_logprobs) for token in content]
        if asked.num_top_logprobs
        else [],
    )


def alternatives(candidates: Sequence[Mapping[str, Any]], k: int) -> Alternatives:
    """The k most probable tokens of one place.

    The server lists the sampled token first and cuts the list, so of k candidates the last may be missing: it is asked
    for one more.
    """
    return sorted(((c["token_id"], c["logprob"]) for c in candidates), key=lambda c: -c[1])[:k]
