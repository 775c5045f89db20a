"""vLLM's answers as completions; all pure functions.

The server labels what it samples with the weights that it holds, and each choice of an answer comes with spans:

    spans     {"version": "b7f0:1.4.5", "start": 0, "end": 12}, {"version": "b7f0:1.5.6", "start": 12, "end": 40}
    segments  [(0, 1, 4), (12, 1, 5)]

The label is set by the engine with each update: its boot id, the policy, and a number of the update, so that one
policy that is loaded twice is two versions. A label that the engine has not set means that somebody else has changed
the weights, or that another server answers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.engines.protocol import Alternatives, Completion, EngineStoppedError, SampleRequest, Segment
from actors.engines.text import Detokenize, StopWatch
from schemas.messages import Policy

ABORTED = "abort"
"""Finish reason of a choice that was ended by the server's owner, and is to be continued."""
NO_LOGPROB = -9999.0
"""What the server writes for a logprob that is not a number."""


class UnknownWeightsError(Exception):
    """The answer was not sampled by weights that this engine has loaded: it is nobody's."""


@dataclass(frozen=True)
class Version:
    """Weights as the server has them, and everything that is named after them."""

    boot: str
    policy: Policy | None
    """None: as the server has started with."""
    update: int

    @property
    def name(self) -> str:
        """Salt of the prefix cache: no two versions share keys and values."""
        return f"{self.policy or 'base'}.{self.update}"

    @property
    def label(self) -> str:
        """Of the tokens that these weights sample."""
        return f"{self.boot}:{self.name}"

    @property
    def adapter(self) -> str:
        """As the server knows it."""
        return f"policy-{self.name}"


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


def segments_of(spans: Sequence[Mapping[str, Any]] | None, labels: Mapping[str, Policy | None]) -> list[Segment]:
    """Which policy sampled from which token on.

    Raises:
        UnknownWeightsError: a label was not set by us, or there is none.
    """
    if spans is None:
        raise UnknownWeightsError("vLLM does not say which weights sampled")
    segments: list[Segment] = []
    for span in spans:
        if span["version"] not in labels:
            raise UnknownWeightsError(f"vLLM sampled with weights {span['version']!r}, which this engine did not load")
        policy = labels[span["version"]]
        if policy is not None and (not segments or segments[-1][1:] != (policy.lineage, policy.version)):
            segments.append((span["start"], policy.lineage, policy.version))
    return segments


def alternatives(candidates: Sequence[Mapping[str, Any]], k: int) -> Alternatives:
    """The k most probable tokens of one place.

    The server lists the sampled token first and cuts the list, so of k candidates the last may be missing: it is asked
    for one more.
    """
    return sorted(((c["token_id"], c["logprob"]) for c in candidates), key=lambda c: -c[1])[:k]


def rest_of(asked: SampleRequest, number: int, so_far: Completion) -> SampleRequest:
    """The request that continues completion `number` behind what it has.

    Its seed is a hash of the completion's own and of the place: with the same one the random numbers of the first
    tokens would be used once more, for tokens that depend on them.
    """
    done = len(so_far.token_ids)
    digest = hashlib.sha256(f"{asked.seed + number} {done}".encode()).digest()
    return replace(
        asked,
        prompt_ids=asked.prompt_ids + so_far.token_ids,
        num_completions=1,
        max_tokens=None if asked.max_tokens is None else asked.max_tokens - done,
        seed=int.from_bytes(digest[:7]),
        on_piece=None,
    )


def joined(so_far: Completion, rest: Completion) -> Completion:
    """A completion and its continuation as one."""
    first = len(so_far.token_ids)
    segments = so_far.segments + [(first + start, lineage, version) for start, lineage, version in rest.segments]
    return Completion(
        so_far.token_ids + rest.token_ids,
        so_far.logprobs + rest.logprobs,
        [segment for i, segment in enumerate(segments) if i == 0 or segment[1:] != segments[i - 1][1:]],
        rest.finish_reason,
        stop_reason=rest.stop_reason,
        top_logprobs=so_far.top_logprobs + rest.top_logprobs,
    )


def cut_at_stop(whole: Completion, stop: Sequence[str], detokenize: Detokenize) -> Completion:
    """A joined completion up to its first stop string: the server has not seen one that lies across the seam."""
    watch = StopWatch(stop, (), detokenize)
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
            )
    return whole
