"""vLLM's answers as completions, as pure functions.

The server labels sampled tokens with the version of the weights, and each choice of an answer has spans:

    spans     {"version": "b7f0:1.4.5", "start": 0, "end": 12}, {"version": "b7f0:1.5.6", "start": 12, "end": 40}
    segments  [(0, 1, 4), (12, 1, 5)]

The engine sets the label with each update (see `labels`).
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.engines.external.images import with_placeholders
from actors.engines.external.labels import ServedWeights, segments_of
from actors.engines.protocol import Alternatives, Completion, EngineStoppedError, SampleRequest
from schemas.messages import PolicyVersion
from schemas.routed import Experts, narrow

NO_LOGPROB = -9999.0
"""Value sent by the server for a logprob that is NaN or infinite."""


def prompt_of(asked: SampleRequest, urls: Sequence[str] = ()) -> dict[str, Any]:
    """Return a request's prompt in vLLM's terms.

    The server keeps what it has computed of an image under the image's digest, also keys and values.

    Args:
        asked: the request.
        urls: its images as data URLs.
    """
    if not asked.images:
        return {"token_ids": asked.prompt_ids}
    parts = [
        {"type": "image_url", "url": url, "uuid": image.digest} for image, url in zip(asked.images, urls, strict=True)
    ]
    return {"token_ids": with_placeholders(asked), "content_parts": parts, "return_token_ids": True}


def sampling_params(asked: SampleRequest, eos: frozenset[int]) -> dict[str, Any]:
    """Return a request in vLLM's terms. vLLM samples completion i of n with seed + i, as `SampleRequest` demands.

    The end of sequence is sent as stop tokens. So the model's generation_config decides, as in every engine
    here, and not the tokenizer.
    """
    params: dict[str, Any] = {
        "n": asked.num_completions,
        **asked.sampling.model_dump(),
        "seed": asked.seed,
        "logit_bias": {str(token): bias for token, bias in asked.logit_bias.items()} or None,
        "stop": list(asked.stop),
        "stop_token_ids": asked.ends(eos),
        "ignore_eos": True,
        # the server finds stop strings in text alone
        "detokenize": bool(asked.stop),
        # one more: see `alternatives`
        "logprobs": asked.num_top_logprobs and asked.num_top_logprobs + 1,
    }
    if asked.form is not None:
        key = "json" if asked.form.kind == "json_schema" else asked.form.kind
        params["structured_outputs"] = {key: asked.form.text}
    return params | ({} if asked.max_tokens is None else {"max_tokens": asked.max_tokens})


def completions_of(
    answer: Mapping[str, Any],
    asked: SampleRequest,
    eos: frozenset[int],
    labels: Mapping[str, PolicyVersion | None],
    sampled_by: ServedWeights | None = None,
) -> list[Completion]:
    """Return the choices of an answer, in order.

    Args:
        answer: answer of `/inference/v1/generate`.
        asked: the request.
        eos: tokens at which a completion ends without a stop reason.
        labels: policies by label, for all labels set so far.
        sampled_by: requested adapter. The segments are then of this policy, and labels only prove the server to be
            ours.

    Raises:
        UnknownWeightsError: a label was not set by this engine, or there is none.
        EngineStoppedError: the model's logits are not finite.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [_completion(choice, asked, eos, labels, sampled_by) for choice in choices]


def _completion(
    choice: Mapping[str, Any],
    asked: SampleRequest,
    eos: frozenset[int],
    labels: Mapping[str, PolicyVersion | None],
    sampled_by: ServedWeights | None,
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
        # a stop token of the request counts as a stop reason even if it is an end of sequence too
        stop_reason=None if stop_reason in eos and stop_reason not in asked.stop_token_ids else stop_reason,
        top_logprobs=[alternatives(token["top_logprobs"], asked.num_top_logprobs) for token in content]
        if asked.num_top_logprobs
        else [],
        routed_experts=_experts(choice.get("routed_experts")),
    )


def _experts(text: str | None) -> Experts | None:
    """Return the experts that a server with --enable-return-routed-experts tells, base64 of a file of numpy."""
    if text is None:
        return None
    return narrow(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))


def alternatives(candidates: Sequence[Mapping[str, Any]], k: int) -> Alternatives:
    """Return the k most probable tokens of a position.

    The server lists the sampled token first and cuts the list after k, so the last of the k most probable tokens may be
    missing. Requests therefore ask for k + 1 candidates.
    """
    return sorted(((c["token_id"], c["logprob"]) for c in candidates), key=lambda c: -c[1])[:k]
