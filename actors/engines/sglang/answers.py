"""Requests and answers in SGLang's terms, from and to ours; pure functions.

Each call is one completion, so images go to the server with each of them. SGLang would give all n completions of a
request the same seed, and the same request id to the copies. Every finished answer tells which weights sampled which
tokens:

    meta_info.weight_versions   [{"version": "b7f0:1.4.5", "start": 0, "end": 12}, …]     segments   [(0, 1, 4), …]

The engine sets the label with each update (see `labels`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from actors.engines.external.images import with_placeholders
from actors.engines.external.labels import ServedWeights, segments_of
from actors.engines.external.upstream import Json
from actors.engines.protocol import Completion, EngineStoppedError, RequestError, SampleRequest
from schemas.messages import PolicyVersion

LARGEST_SEED = 2**63
"""Bound of SGLang's seeds; larger seeds are taken modulo this number."""


def generate_body(
    asked: SampleRequest, number: int, max_tokens: int, eos: frozenset[int], salt: str, urls: Sequence[str] = ()
) -> Json:
    """Return the body of `/generate`, without `rid`, for completion `number` of a request.

    The completion's seed is the request's seed + number.

    The end of sequence is sent as stop tokens. So the model's generation_config decides, as in every engine
    here. `ignore_eos` switches off all stop tokens, so `SglangEngine` refuses it next to others.

    Args:
        salt: salt of the prefix cache, different for each version of the weights.
        urls: images of the request as data URLs.
    """
    params: Json = {
        "max_new_tokens": max_tokens,
        **asked.sampling.model_dump(),
        # SGLang's value for all tokens is −1
        "top_k": asked.sampling.top_k or -1,
        "sampling_seed": (asked.seed + number) % LARGEST_SEED,
        "stop_token_ids": asked.ends(eos),
    }
    # SGLang's name
    params["min_new_tokens"] = params.pop("min_tokens")
    if asked.ignore_eos:
        params["ignore_eos"] = True
    if asked.stop:
        params["stop"] = list(asked.stop)
    if asked.form is not None:
        params[asked.form.kind] = asked.form.text
    if asked.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    # one token for each image: the server repeats it, and tells the prompt that it has made
    images = {"image_data": list(urls), "return_prompt_token_ids": True} if urls else {}
    return {
        "input_ids": with_placeholders(asked) if urls else asked.prompt_ids,
        **images,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,  # logprobs of the completion alone, not of the prompt
        "top_logprobs_num": asked.num_top_logprobs,
        "cache_salt": salt,
    }


def completion_of(
    answer: Mapping[str, Any],
    asked: SampleRequest,
    max_tokens: int,
    eos: frozenset[int],
    labels: Mapping[str, PolicyVersion | None],
    sampled_by: ServedWeights | None = None,
) -> Completion:
    """Return the completion of an answer.

    Args:
        answer: answer of `/generate`.
        asked: the request.
        max_tokens: limit of new tokens in the request's body.
        eos: tokens at which a completion ends without a stop reason.
        labels: policies by label, for all labels set so far.
        sampled_by: requested adapter. The segments are then of this policy, and labels only prove the server to be
            ours.

    Raises:
        UnknownWeightsError: a label was not set by this engine, or there is none.
        RequestError: the server had no memory for the whole completion and cut the completion short.
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
        # a label set after the last token starts an empty span
        [segment for segment in segments if segment[0] < len(tokens)],
        finish["type"],
        # a stop token of the request counts as a stop reason even if it is an end of sequence too
        stop_reason=None if matched in eos and matched not in asked.stop_token_ids else matched,
        top_logprobs=[[(token, logprob) for logprob, token, _ in place] for place in meta["output_top_logprobs"]]
        if asked.num_top_logprobs
        else [],
    )


def _logprobs(entries: list[Any], tokens: list[int]) -> list[float]:
    """Return the logprobs of (logprob, token id, text) triples. NaN arrives as null."""
    if [token for _, token, _ in entries] != tokens:
        raise EngineStoppedError(f"SGLang answered {len(tokens)} tokens with {len(entries)} logprobs, not of these")
    logprobs = [logprob for logprob, _, _ in entries]
    if None in logprobs:
        raise EngineStoppedError("SGLang sampled tokens without a logprob: the model's logits are not finite")
    return logprobs
