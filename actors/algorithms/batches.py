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


def build_batches(
    groups: Sequence[ScoredGroup], num_ranks: int, sequence_len: int, num_minibatches: int = 1, **header: Any
) -> list[StepBatch]:
    """The `StepBatch` of each rank. Each minibatch is packed on its own, so no micro-batch is in two of them.

    Args:
        groups: of the step, in its order.
        num_ranks: ranks of the gang.
        sequence_len: tokens of a micro-batch at most.
        num_minibatches: parts that the step falls into, see `split`.
        header: the remaining fields of StepBatch that do not depend on the rank (run, term, incarnation, step, …).
    """
    pool = _Pool(groups)
    parts = split([group.num_completions for group in groups], num_minibatches)
    lengths = pool.prompt_lengths + pool.lengths
    packed = [pack(lengths[part].tolist(), sequence_len, num_ranks) for part in parts]
    ranks = [
        [part[micro_batch] for part, dealt in zip(parts, packed, strict=True) for micro_batch in dealt[rank]]
        for rank in range(num_ranks)
    ]
    return [
        StepBatch(
            **header,
            rank=rank,
            num_ranks=num_ranks,
            minibatch_offsets=_offsets([len(dealt[rank]) for dealt in packed]),
            loss_tokens=np.array([max(1, pool.loss_tokens[part].sum()) for part in parts], np.int64),
            num_completions=np.array([part.size for part in parts], np.int64),
            ordinals=np.array([group.ordinal for group in groups], np.int64),
            micro_batch_offsets=_offsets([len(micro_batch) for micro_batch in micro_batches]),
            **pool.take(_joined(micro_batches, np.int64)),
        )
        for rank, micro_batches in enumerate(ranks)
    ]


def split(sizes: Sequence[int], num_parts: int) -> list[Ints]:
    """The completions of a step in parts: whole groups, equally many, or where that can't be, whole completions.

    Two parts of groups of 2, 4, 1 and 3 completions are 0–5 and 6–9; of groups of 2, 4 and 4 they are 0–4 and 5–9,
    with the second group cut.

    Args:
        sizes: completions of each group.
        num_parts: at most as many as completions.

    Raises:
        ValueError: there are more parts than completions.
    """
    bounds = _offsets(sizes)
    if num_parts > bounds[-1]:
        raise ValueError(f"trainer.num_minibatches: {num_parts} parts of a step of {bounds[-1]} completions")
    if len(sizes) % num_parts:
        return np.array_split(np.arange(bounds[-1]), num_parts)
    return np.split(np.arange(bounds[-1]), bounds[len(sizes) // num_parts : -1 : len(sizes) // num_parts])


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
        loss_mask = _joined((group.loss_mask for group in groups), np.uint8)
        # no completion is empty, so each start is of a part of its own
        self.loss_tokens: Ints = np.add.reduceat(loss_mask, self._starts, dtype=np.int64)
        self._token_ids = _joined([*(g.prompt_ids for g in groups), *(g.token_ids for g in groups)], np.int32)
        self._per_token = {
            "loss_mask": self._behind_prompts(0, loss_mask),
            "logprobs": self._behind_prompts(0.0, _joined((group.logprobs for group in groups), np.float32)),
            "advantages": self._behind_prompts(0.0, _joined((group.advantages_N for group in groups), np.float32)),
            "temperatures": self._behind_prompts(1.0, heats),
            "versions": self._behind_prompts(0, versions.astype(np.int32)),
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
