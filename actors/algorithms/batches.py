"""From scored groups to the batches of all ranks: a pure function, so that a step can be rebuilt on demand (P18).

The tokens of a step lie in one pool, first all prompts, then all completions, and a rank's batch is gathered from it by
one array of places. So a step costs a few dozen calls of numpy, however many completions it has.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.packing import pack
from schemas.messages import SEGMENT_VERSION, ScoredGroup, StepBatch

Ints = NDArray[np.int64]


def build_batches(groups: Sequence[ScoredGroup], num_ranks: int, sequence_len: int, **header: Any) -> list[StepBatch]:
    """The `StepBatch` of each rank.

    Args:
        groups: of the step, in its order.
        num_ranks: ranks of the gang.
        sequence_len: tokens of a micro-batch at most.
        header: the remaining fields of StepBatch that do not depend on the rank (run, term, incarnation, step, …).
    """
    pool = _Pool(groups)
    ranks = pack((pool.prompt_lengths + pool.lengths).tolist(), sequence_len, num_ranks)
    return [
        StepBatch(
            **header,
            rank=rank,
            num_ranks=num_ranks,
            loss_tokens=max(1, sum(int(group.loss_mask.sum()) for group in groups)),
            num_completions=pool.lengths.size,
            ordinals=np.array([group.ordinal for group in groups], np.int64),
            micro_batch_offsets=_offsets([len(micro_batch) for micro_batch in micro_batches]),
            **pool.take(np.array([i for micro_batch in micro_batches for i in micro_batch], np.int64)),
        )
        for rank, micro_batches in enumerate(ranks)
    ]


class _Pool:
    """The samples of a step: arrays per sample, one per completion of each group, and per token of the pool.

    Two completions of 3 and 2 tokens behind one prompt of 4: places 0–3 are the prompt, 4–6 and 7–8 the completions.
    """

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        sizes = [group.num_completions for group in groups]
        prompts = np.array([group.prompt_ids.size for group in groups], np.int64)
        segments = _joined((_lengths(g.segments[:, 0], g.token_ids.size) for g in groups), np.int64)
        versions = np.repeat(_joined((g.segments[:, SEGMENT_VERSION] for g in groups), np.int64), segments)
        heats = np.repeat(_joined((g.segment_temperatures for g in groups), np.float32), segments)
        self.lengths: Ints = _joined((group.lengths_G for group in groups), np.int64)
        self.prompt_lengths: Ints = np.repeat(prompts, sizes)
        self._starts = _offsets(self.lengths)[:-1]
        self._prompt_starts = np.repeat(_offsets(prompts)[:-1], sizes)
        self._num_prompt_tokens = int(prompts.sum())
        self._ordinals = np.repeat(np.array([group.ordinal for group in groups], np.int64), sizes)
        # no completion is empty, so each has an oldest token
        self._versions = np.minimum.reduceat(versions, self._starts) if versions.size else versions
        advantages = np.repeat(_joined((group.advantages_G for group in groups), np.float32), self.lengths)
        self._token_ids = _joined([*(g.prompt_ids for g in groups), *(g.token_ids for g in groups)], np.int32)
        self._per_token = {
            "loss_mask": self._behind_prompts(0, _joined((group.loss_mask for group in groups), np.uint8)),
            "logprobs": self._behind_prompts(0.0, _joined((group.logprobs for group in groups), np.float32)),
            "advantages": self._behind_prompts(0.0, advantages),
            "temperatures": self._behind_prompts(1.0, heats),
        }

    def _behind_prompts(self, fill: float, values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([np.full(self._num_prompt_tokens, fill, values.dtype), values])

    def take(self, samples: Ints) -> dict[str, Any]:
        """The arrays of a batch of these samples, in this order: prompt and completion of each."""
        starts = np.stack([self._prompt_starts[samples], self._num_prompt_tokens + self._starts[samples]], axis=1)
        lengths = np.stack([self.prompt_lengths[samples], self.lengths[samples]], axis=1)
        places = _spans(starts.ravel(), lengths.ravel())
        return {
            "sample_offsets": _offsets(lengths.sum(axis=1)),
            "prompt_lengths": lengths[:, 0].copy(),
            "sample_ordinals": self._ordinals[samples],
            "sample_versions": self._versions[samples],
            "token_ids": self._token_ids[places],
        } | {name: values[places] for name, values in self._per_token.items()}


def _spans(starts: Ints, lengths: Ints) -> Ints:
    """The places of spans one after the other: starts [7, 0] of lengths [2, 3] are 7, 8, 0, 1, 2."""
    offsets = _offsets(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)


def _lengths(starts: Ints, end: int) -> Ints:
    """Of parts that begin where the one before ends, the last one at `end`."""
    return np.append(starts[1:], end) - starts


def _joined(parts: Iterable[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _offsets(lengths: Sequence[int] | Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
