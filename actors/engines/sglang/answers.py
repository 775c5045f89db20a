"""Requests in SGLang's terms, and its answers as completions; all pure functions.

One call is one completion: SGLang gives all n of a request the same seed, and one request id to a request that it
multiplies by itself. Every finished answer says which weights sampled which of its tokens:

    meta_info.weight_versions   [{"version": "b7f0:1.4.5", "start": 0, "end": 12}, …]     segments   [(0, 1, 4), …]

The label is set by the engine with each update (see `labels`).
"""

from collections.abc import Mapping
from typing import Any

from actors.engines.labels import Version, segments_of
from actors.engines.protocol import Alternatives, Completion, EngineStoppedError, RequestError, SampleRequest
from actors.engines.upstream import Json
from schemas.messages import Policy

LARGEST_SEED = 2**63


def generate_body(asked: SampleRequest, number: int, max_tokens: int, eos: frozenset[int], salt: str) -> Json:
    """The body of `/generate`, but its `rid`, for completion `number` of a request, sampled with seed + number.

    The end of sequence is told as stop tokens, so that it is the model's generation_config that decides, as in every
    engine of ours. `ignore_eos` would switch these off as well.

    Args:
        salt: no two versions of the weights share keys and values.
    """
    params: Json = {
        "max_new_tokens": max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or -1,
        "min_p": asked.min_p,
        "sampling_seed": (asked.seed + number) % LARGEST_SEED,
        "stop_token_ids": sorted(eos | set(asked.stop_token_ids)),
    }
    if asked.stop:
        params["stop"] = list(asked.stop)
    if asked.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    return {
        "input_ids": asked.prompt_ids,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": asked.num_top_logprobs,
        "cache_salt": salt,
    }


def completion_of(
    answer: Mapping[str, Any],
    asked: SampleRequest,
    max_tokens: int,
    eos: frozenset[int],
    labels: Mapping[str, Policy | None],
    sampled_by: Version | None = None,
) -> Completion:
    """The completion of an answer.

    Args:
        answer: of `/generate`.
        asked: what it answers.
        max_tokens: as it was asked for.
        eos: tokens that end a completion without being a stop reason.
        labels: those that were set, with what they stand for.
        sampled_by: the adapter that was asked for; the labels then only prove that it is our server.

    Raises:
        UnknownWeightsError: a label was not set by us, or there is none.
        RequestError: the completion was cut short: the server had no room for all of it.
        EngineStoppedError: tokens without logprobs.
    """
    meta, tokens = answer["meta_info"], list(answer["output_ids"])
    segments = segments_of(meta.get("weight_versions"), labels)
    if sampled_by is not None and sampled_by.policy is not None:
        segments = [(0, sampled_by.policy.lineage, sampled_by.policy.version)]
    finish = meta["finish_reason"]
    if finish["type"] == "length" and len(tokens) < max_tokens:
        raise RequestError(
            f"max_tokens: SGLang ended a completion after {len(tokens)} tokens of {max_tokens}: prompt and completion "
            "must fit in its memory for keys and values (--mem-fraction-static, --max-total-tokens)"
        )
    matched = finish.get("matched")
    return Completion(
        tokens,
        _logprobs(meta["output_token_logprobs"], tokens),
        [segment for segment in segments if segment[0] < len(tokens)],
        finish["type"],
        stop_reason=None if matched in eos and matched not in asked.stop_token_ids else matched,
        top_logprobs=[_alternatives(place) for place in meta["output_top_logprobs"]] if asked.num_top_logprobs else [],
    )


def _logprobs(entries: list[Any], tokens: list[int]) -> list[float]:
    """Of (logprob, token id, text) triples. What is not a number comes as null."""
    if [token for _, token, _ in entries] != tokens:
        raise EngineStoppedError(f"SGLang answered {len(tokens)} tokens with {len(entries)} logprobs, not of these")
    logprobs = [logprob for logprob, _, _ in entries]
    if None in logprobs:
        raise EngineStoppedError("SGLang sampled tokens without a logprob: the model's logits are not finite")
    return logprobs


def _alternatives(place: list[Any]) -> Alternatives:
    return [(token, logprob) for logprob, token, _ in place]
