"""From scored groups to the batches of all ranks: a pure function, so that a step can be rebuilt on demand (P18)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.packing import pack
from schemas.messages import SEGMENT_VERSION, ScoredGroup, StepBatch


@dataclass(frozen=True)
class Sample:
    """One completion behind its prompt, as views of its group's arrays."""

    group: ScoredGroup
    completion: int

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return int(self.group.prompt_ids.size + self.group.lengths_G[self.completion])


def build_batches(groups: Sequence[ScoredGroup], num_ranks: int, sequence_len: int, **header: Any) -> list[StepBatch]:
    """The `StepBatch` of each rank.

    Args:
        groups: of the step, in its order.
        num_ranks: ranks of the gang.
        sequence_len: tokens of a micro-batch at most.
        header: the remaining fields of StepBatch that do not depend on the rank (run, term, incarnation, step, …).
    """
    samples = [Sample(group, g) for group in groups for g in range(group.num_completions)]
    loss_tokens = sum(int(group.loss_mask.sum()) for group in groups)
    ranks = pack([sample.length for sample in samples], sequence_len, num_ranks)
    flat = [_flatten(group) for group in groups]
    versions = [group.per_token(group.segments[:, SEGMENT_VERSION]) for group in groups]
    position = {id(group): i for i, group in enumerate(groups)}
    ordinals = np.array([group.ordinal for group in groups], np.int64)
    batches = []
    for rank, micro_batches in enumerate(ranks):
        mine = [samples[i] for micro_batch in micro_batches for i in micro_batch]
        parts = [_sample_arrays(s, flat[position[id(s.group)]], versions[position[id(s.group)]]) for s in mine]
        batches.append(
            StepBatch(
                **header,
                rank=rank,
                num_ranks=num_ranks,
                loss_tokens=max(1, loss_tokens),
                num_completions=len(samples),
                ordinals=ordinals,
                micro_batch_offsets=_offsets([len(micro_batch) for micro_batch in micro_batches]),
                sample_offsets=_offsets([sample.length for sample in mine]),
                prompt_lengths=np.array([s.group.prompt_ids.size for s in mine], np.int64),
                sample_ordinals=np.array([s.group.ordinal for s in mine], np.int64),
                sample_versions=np.array([part["version"] for part in parts], np.int64),
                token_ids=_join(parts, "token_ids", np.int32),
                loss_mask=_join(parts, "loss_mask", np.uint8),
                logprobs=_join(parts, "logprobs", np.float32),
                advantages=_join(parts, "advantages", np.float32),
                temperatures=_join(parts, "temperatures", np.float32),
            )
        )
    return batches


def _flatten(group: ScoredGroup) -> dict[str, NDArray[Any]]:
    """Per-token arrays of all completions of a group."""
    return {
        "token_ids": group.token_ids,
        "loss_mask": group.loss_mask,
        "logprobs": group.logprobs,
        "advantages": np.repeat(group.advantages_G, group.lengths_G),
        "temperatures": group.per_token(group.segment_temperatures),
    }


_PROMPT_FILL = {"loss_mask": 0, "logprobs": 0.0, "advantages": 0.0, "temperatures": 1.0}


def _sample_arrays(sample: Sample, flat: dict[str, NDArray[Any]], versions_N: NDArray[np.int64]) -> dict[str, Any]:
    group = sample.group
    start, end = group.completion_offsets[sample.completion : sample.completion + 2]
    prompt = group.prompt_ids
    arrays: dict[str, Any] = {"token_ids": np.concatenate([prompt, flat["token_ids"][start:end]])}
    for name, fill in _PROMPT_FILL.items():
        part = flat[name][start:end]
        arrays[name] = np.concatenate([np.full(prompt.size, fill, part.dtype), part])
    arrays["version"] = int(versions_N[start:end].min())
    return arrays


def _join(parts: list[dict[str, Any]], name: str, dtype: type) -> NDArray[Any]:
    return np.concatenate([part[name] for part in parts]).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
