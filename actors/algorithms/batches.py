"""Batches of all ranks, built from the scored groups of a step by a pure function (P18: batches are rebuilt on demand).

The tokens of a step are concatenated to one pool, all prompts first, then all completions. A rank's batch is gathered
from the pool with one index array, so a step costs a few dozen numpy calls, whatever its number of completions. Long
spans are copied one by one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages import with_step_advantages
from actors.algorithms.advantages.shaping import environment_weights
from actors.algorithms.packing import pack
from actors.algorithms.prefixes import nested
from schemas import routed
from schemas.config import RunConfig
from schemas.messages import SEGMENT_VERSION, ImagePlace, ScoredGroup, StepBatch

Ints = NDArray[np.int64]
LONG_SPAN = 256
"""Mean number of tokens from which on spans are copied one by one."""
BUNDLES_PER_ROW = (1, 2, 4, 8)
"""Bundles of a group's samples that are tried have at most the capacity divided by each of these."""


def batches_of_step(payloads: Sequence[ScoredGroup], config: RunConfig, **header: Any) -> list[StepBatch]:
    """Build the batches of a step from its payloads, one for each group of ranks with the same rows.

    Packer and replay build the same batches.

    Args:
        payloads: the step's groups, in the order of its ordinals.
        config: of the run.
        header: the fields of StepBatch that `build_batches` does not compute.
    """
    reference, reward = config.trainer.reference, config.reward
    # a KL in the rewards is known to the trainer only, and adv_norm follows after it, so the trainer normalises
    if reference is not None and reference.place != "loss":
        reward = reward.model_copy(update={"adv_norm": None})
    return build_batches(
        with_step_advantages(payloads, reward, environment_weights(config.environments)),
        config.trainer.row_groups,
        config.packer.sequence_len,
        config.trainer.num_minibatches,
        filter_zero_advantages=config.packer.filter_zero_advantages,
        weights={one.label: (one.rl_weight, one.ref_kl_weight) for one in config.environments},
        prompts_count_once=prompts_count_once(config),
        **header,
    )


def prompts_count_once(config: RunConfig) -> bool:
    """Return whether a group's prompt counts once, by the configuration alone: packer and replay pack alike."""
    asked = config.packer.count_prompts
    return asked == "once" or (asked == "auto" and config.model.device == "cuda")


def build_batches(
    groups: Sequence[ScoredGroup],
    num_ranks: int,
    sequence_len: int,
    num_minibatches: int = 1,
    *,
    filter_zero_advantages: bool = False,
    weights: Mapping[str, tuple[float, float]] | None = None,
    prompts_count_once: bool = False,
    **header: Any,
) -> list[StepBatch]:
    """Build the `StepBatch` of each rank; each minibatch is packed separately, so no micro-batch spans two minibatches.

    Args:
        groups: the step's groups, in the order of its ordinals.
        num_ranks: ranks of the gang.
        sequence_len: greatest number of tokens in a micro-batch.
        num_minibatches: parts of the step with an optimizer update each, see `split`.
        filter_zero_advantages: remove tokens with advantage 0 from the loss, and samples with no other loss token from
            the batches (prime-rl, `orchestrator/train_sink.py`).
        weights: environment label → factors of policy loss and distillation. None or a missing label: 1 and 0.
        prompts_count_once: pack completions of a group together where that makes fewer micro-batches.
        header: the remaining fields of StepBatch, equal on all ranks (run, term, incarnation, step, …).
    """
    arena = _TokenArena(groups, filter_zero_advantages, weights or {})
    # split first, then remove: which completions have advantage 0 must not move the others to another minibatch
    whole = [arena.samples_of(part) for part in split([group.num_completions for group in groups], num_minibatches)]
    parts = [part[arena.trained[part]] for part in whole]
    packed = [arena.packed(part, sequence_len, num_ranks, prompts_count_once) for part in parts]
    ranks = [
        [arena.arranged(micro_batch) for dealt in packed for micro_batch in dealt[rank]] for rank in range(num_ranks)
    ]
    return [
        StepBatch(
            **header,
            rank=rank,
            num_ranks=num_ranks,
            minibatch_offsets=_offsets([len(dealt[rank]) for dealt in packed]),
            loss_tokens=np.array([arena.loss_tokens[part][arena.rl[part] > 0].sum() for part in parts], np.int64),
            ref_kl_tokens=np.array([arena.loss_tokens[part][arena.ref_kl[part] > 0].sum() for part in parts], np.int64),
            num_completions=np.array([np.unique(arena.completions[part]).size for part in parts], np.int64),
            ordinals=np.array([group.ordinal for group in groups], np.int64),
            micro_batch_offsets=_offsets([samples.size for samples, _ in micro_batches]),
            **arena.take(
                _joined((samples for samples, _ in micro_batches), np.int64),
                _joined((shared for _, shared in micro_batches), np.int64),
            ),
        )
        for rank, micro_batches in enumerate(ranks)
    ]


def split(sizes: Sequence[int], num_parts: int) -> list[Ints]:
    """Split the completions of a step into parts; return the indices of each part.

    Parts are equally many whole groups if num_parts divides the number of groups, else equally many completions (±1).
    Two parts of groups with 2, 4, 1 and 3 completions are 0–5 and 6–9; of groups with 2, 4 and 4, parts are 0–4 and
    5–9, which cuts the second group.

    Args:
        sizes: completions of each group.
        num_parts: number of parts, at most the number of completions.

    Raises:
        ValueError: there are more parts than completions.
    """
    bounds = _offsets(sizes)
    if num_parts > bounds[-1]:
        raise ValueError(f"trainer.num_minibatches: {num_parts} parts of a step of {bounds[-1]} completions")
    if len(sizes) % num_parts:
        return np.array_split(np.arange(bounds[-1]), num_parts)
    return np.split(np.arange(bounds[-1]), bounds[len(sizes) // num_parts : -1 : len(sizes) // num_parts])


class _TokenArena:
    """Samples of a step: arrays per sample (a completion, or one of its branches), and arrays per token of the pool.

    Two completions of 3 and 2 tokens with one prompt of 4 tokens: places 0–3 hold the prompt, once for both samples,
    places 4–6 and 7–8 the completions.
    """

    def __init__(
        self, groups: Sequence[ScoredGroup], filter_zero_advantages: bool, weights: Mapping[str, tuple[float, float]]
    ) -> None:
        sizes = [group.sample_prompts.size for group in groups]
        self._groups = np.repeat(np.arange(len(groups)), sizes)
        self._has_one_prompt = [group.prompt_offsets.size == 2 for group in groups]
        prompts = _joined((np.diff(group.prompt_offsets) for group in groups), np.int64)
        # one value per segment of a sample (a run of tokens by the same policy), repeated over its tokens
        segments = _joined((np.diff(g.segments[:, 0], append=g.token_ids.size) for g in groups), np.int64)
        versions = repeated(
            _joined((g.segments[:, SEGMENT_VERSION].astype(np.int32) for g in groups), np.int32), segments
        )
        temperatures = repeated(_joined((g.segment_temperatures for g in groups), np.float32), segments)
        self.lengths: Ints = _joined((np.diff(group.sample_offsets) for group in groups), np.int64)
        self.completions = _numbered([(g.sample_completions, g.num_completions) for g in groups])
        self._prompts = _numbered([(g.sample_prompts, g.prompt_offsets.size - 1) for g in groups])
        self.prompt_lengths: Ints = prompts[self._prompts]
        self._starts = _offsets(self.lengths)[:-1]
        self._prompt_starts = _offsets(prompts)[:-1][self._prompts]
        self._num_prompt_tokens = int(prompts.sum())
        pairs = np.array([weights.get(group.environment, (1.0, 0.0)) for group in groups], np.float32).reshape(-1, 2)
        self.rl, self.ref_kl = np.repeat(pairs, sizes, axis=0).T
        self._rewards = _joined((group.rewards_G[group.sample_completions] for group in groups), np.float64)
        self._ordinals = np.repeat(np.array([group.ordinal for group in groups], np.int64), sizes)
        loss_mask = _joined((group.loss_mask for group in groups), np.uint8)
        advantages = _joined((group.advantages_N for group in groups), np.float32)
        left = np.where(advantages == 0, np.uint8(0), loss_mask) if filter_zero_advantages else loss_mask
        # reduceat would give an empty sample the next one's value, but no sample is empty
        self.loss_tokens: Ints = np.add.reduceat(left, self._starts, dtype=np.int64)
        lost: Ints = np.add.reduceat(loss_mask, self._starts, dtype=np.int64) - self.loss_tokens
        # a sample masked out whole by other filters stays: only zero advantages remove a sample
        self.trained = (self.loss_tokens > 0) | (lost == 0)
        self._shares = _shares(self.loss_tokens, self.trained, self.completions)
        self._token_ids = _joined([*(g.prompt_ids for g in groups), *(g.token_ids for g in groups)], np.int32)
        self._images, self._image_places = _images_in_pool(groups)
        self._content = _content(self._token_ids, self._image_places)
        self._experts = _experts_in_pool(groups)
        self._per_token = {
            "loss_mask": self._behind_prompts(0, left),
            "logprobs": self._behind_prompts(0.0, *(group.logprobs for group in groups)),
            "advantages": self._behind_prompts(0.0, advantages),
            "temperatures": self._behind_prompts(1.0, temperatures),
            "versions": self._behind_prompts(0, versions),
        }

    def samples_of(self, completions: Ints) -> Ints:
        """Return the samples of completions with consecutive numbers."""
        first, end = np.searchsorted(self.completions, [completions[0], completions[-1] + 1])
        return np.arange(first, end)

    def packed(self, samples: Ints, capacity: int, num_ranks: int, prompts_count_once: bool) -> list[list[Ints]]:
        """Return ranks → micro-batches → samples; equally many micro-batches on each rank.

        Large bundles waste the room that they do not fill, small ones count a prompt many times. So bundles of groups
        are tried in several sizes, and taken if they make fewer micro-batches than completions packed apart.
        """
        if not samples.size:
            return [[samples] for _ in range(num_ranks)]  # ranks run in lockstep: a dummy on each
        best = self._dealt(*self.bundles(samples, capacity), capacity, num_ranks)
        if prompts_count_once:
            lengths = self.prompt_lengths + self.lengths
            for divisor in BUNDLES_PER_ROW:
                # a completion alone may be longer than the bundle
                limit = max(capacity // divisor, int(lengths[samples].max()))
                found = self._dealt(*self.bundles(samples, limit, of_groups=True), capacity, num_ranks)
                best = min(best, found, key=lambda ranks: len(ranks[0]))  # of equally many the first
        return best

    @staticmethod
    def _dealt(members: list[Ints], sizes: list[int], capacity: int, num_ranks: int) -> list[list[Ints]]:
        return [
            [_joined((members[number] for number in micro_batch), np.int64) for micro_batch in rank]
            for rank in pack(sizes, capacity, num_ranks)
        ]

    def bundles(self, samples: Ints, capacity: int, of_groups: bool = False) -> tuple[list[Ints], list[int]]:
        """Return the samples that are packed together, and the tokens of each bundle in a row.

        A bundle is the samples of one completion that share prefixes, as many as fit into `capacity`; the prefix counts
        once. Samples of different completions are packed apart, so each counts its whole prompt; with `of_groups`
        samples of one group are packed together.
        """
        lengths = self.prompt_lengths + self.lengths
        owners = self._groups if of_groups else self.completions
        firsts = np.flatnonzero(np.diff(owners[samples])) + 1
        if firsts.size + 1 >= samples.size:  # each completion has one sample
            return list(samples[:, None]), lengths[samples].tolist()
        found: list[list[int]] = []
        sizes: list[int] = []
        for members in np.split(samples, firsts):
            for sample, shared in zip(*self._nested(members), strict=True):
                added = int(lengths[sample]) - shared
                if shared and sizes[-1] + added <= capacity:
                    found[-1].append(sample)
                    sizes[-1] += added
                else:
                    found.append([sample])
                    sizes.append(int(lengths[sample]))
        return [np.array(bundle, np.int64) for bundle in found], sizes

    def arranged(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the samples of a micro-batch in the order of the row, and the tokens shared with the one before."""
        order, shared = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        ascending = np.sort(samples)
        for members in np.split(ascending, np.flatnonzero(np.diff(self._groups[ascending])) + 1):
            found, tokens = self._nested(members)
            order.append(np.array(found, np.int64))
            shared.append(np.array(tokens, np.int64))
        return np.concatenate(order), np.concatenate(shared)

    def _nested(self, samples: Ints) -> tuple[list[int], list[int]]:
        """Return samples of one group as `nested` does."""
        prompts = self.prompt_lengths[samples].tolist()
        if not samples.size or self._has_one_prompt[self._groups[samples[0]]]:  # nothing but the prompt is shared
            return samples.tolist(), [0, *prompts[1:]][: samples.size]
        tokens = [
            np.concatenate([self._content[start : start + size], self._content[first : first + length]])
            for start, size, first, length in zip(
                self._prompt_starts[samples],
                prompts,
                self._num_prompt_tokens + self._starts[samples],
                self.lengths[samples],
                strict=True,
            )
        ]
        order, shared = nested(tokens, prompts)
        return samples[order].tolist(), shared

    def _behind_prompts(self, fill: float, *values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([np.full(self._num_prompt_tokens, fill, values[0].dtype), *values])

    def take(self, samples: Ints, shared: Ints) -> dict[str, Any]:
        """Return the fields of a StepBatch with these samples, in this order, prompt before completion.

        Args:
            samples: numbers of the samples.
            shared: tokens that each sample shares with the sample before it.
        """
        # two spans per sample, (B, 2): the prompt, shared by the samples of a group, and the completion
        starts = np.stack([self._prompt_starts[samples], self._num_prompt_tokens + self._starts[samples]], axis=1)
        lengths = np.stack([self.prompt_lengths[samples], self.lengths[samples]], axis=1)
        part = spans_of(starts.ravel(), lengths.ravel())
        return {
            "sample_offsets": _offsets(lengths.sum(axis=1)),
            "prompt_lengths": lengths[:, 0].copy(),
            "sample_ordinals": self._ordinals[samples],
            "completions": self.completions[samples],
            "sample_shared": shared,
            "sample_shares": self._shares[samples],
            "rewards": self._rewards[samples],
            "rl_weights": self.rl[samples],
            "ref_kl_weights": self.ref_kl[samples],
            "token_ids": part(self._token_ids),
            **self._images_of(starts, lengths, shared),
            **self._experts_of(starts, lengths, shared),
        } | {name: part(values) for name, values in self._per_token.items()}

    def _images_of(self, starts: Ints, lengths: Ints, shared: Ints) -> dict[str, Any]:
        """Return the images of samples, each once, and their places outside of shared tokens; empty without images.

        Args:
            starts: start of prompt and completion of each sample in the pool, (B, 2).
            lengths: tokens of each, (B, 2).
            shared: tokens that each sample shares with the sample before it, (B,).
        """
        if not self._images:
            return {}
        numbers, found, sample = dict[int, int](), list[ImagePlace](), 0
        for spans, sizes, prefix in zip(starts.tolist(), lengths.tolist(), shared.tolist(), strict=True):
            for first, size, before in ((spans[0], sizes[0], 0), (spans[1], sizes[1], sizes[0])):
                for place in self._places_in(first + max(0, prefix - before), first + size):
                    number = numbers.setdefault(place.image, len(numbers))
                    start = sample + before + place.start - first
                    found.append(ImagePlace(image=number, start=start, length=place.length))
            sample += sum(sizes)
        return {"images": [self._images[number] for number in numbers], "image_places": found}

    def _experts_of(self, starts: Ints, lengths: Ints, shared: Ints) -> dict[str, Any]:
        """Return the experts of samples outside of shared tokens, for arguments of `_images_of`; empty: unknown."""
        if self._experts is None:
            return {}
        in_prompt = np.minimum(shared, lengths[:, 0])
        left = np.stack([in_prompt, shared - in_prompt], axis=1)
        part = spans_of((starts + left).ravel(), (lengths - left).ravel())
        pieces, layout = routed.packed(part(self._experts))
        return {"routed_experts": pieces, "expert_layout": layout}

    def _places_in(self, start: int, end: int) -> Iterator[ImagePlace]:
        """Yield the places of images that start in a part of the pool."""
        for number in range(bisect_left(self._image_places, start, key=_start), len(self._image_places)):
            if self._image_places[number].start >= end:
                break
            yield self._image_places[number]


def _images_in_pool(groups: Sequence[ScoredGroup]) -> tuple[list[bytes], list[ImagePlace]]:
    """Return the images of a step, each once, and their places in the pool, in the order of tokens."""
    images, prompts, behind = dict[bytes, int](), list[ImagePlace](), list[ImagePlace]()
    prompt, sample = 0, sum(group.prompt_ids.size for group in groups)
    for group in groups:
        numbers = [images.setdefault(image, len(images)) for image in group.images]
        for place in group.image_places:
            is_prompt = place.start < group.prompt_ids.size
            start = place.start + (prompt if is_prompt else sample - group.prompt_ids.size)
            moved = ImagePlace(image=numbers[place.image], start=start, length=place.length)
            (prompts if is_prompt else behind).append(moved)
        prompt, sample = prompt + group.prompt_ids.size, sample + group.token_ids.size
    return [*images], prompts + behind


def _experts_in_pool(groups: Sequence[ScoredGroup]) -> routed.Experts | None:
    """Return the experts of a step's prompts, and then of its samples; None if no group tells any."""
    found = [group.experts for group in groups]
    like = next((experts for experts in found if experts is not None), None)
    if like is None:
        return None
    prompts, behind = list[routed.Experts](), list[routed.Experts]()
    for group, experts in zip(groups, found, strict=True):
        num_prompt_tokens, num_tokens = group.prompt_ids.size, group.prompt_ids.size + group.token_ids.size
        # sampled before the run asked for experts, or by an engine with another number of layers: nothing is known
        if experts is None or experts.shape[1:] != like.shape[1:]:
            experts = routed.unknown(num_tokens, like)
        prompts.append(experts[:num_prompt_tokens])
        behind.append(experts[num_prompt_tokens:])
    return np.concatenate([*prompts, *behind])


def _content(token_ids: NDArray[np.int32], places: Sequence[ImagePlace]) -> NDArray[np.int32]:
    """Return token ids in which each image has an id of its own, below 0: images have equal token ids.

    Prefixes that are equal in these ids have equal images, and cut none, since an image has the same number of tokens
    everywhere.
    """
    if not places:
        return token_ids
    found = token_ids.copy()
    for place in places:
        found[place.start : place.start + place.length] = -1 - place.image
    return found


def _start(place: ImagePlace) -> int:
    return place.start


def _numbered(parts: Sequence[tuple[Ints, int]]) -> Ints:
    """Join indices within groups to indices within the step; each part has its indices and the number of the group's.

    ([0, 1], 2) and ([0, 0], 1) become [0, 1, 2, 2].
    """
    firsts = _offsets([number for _, number in parts])
    return _joined((indices + first for (indices, _), first in zip(parts, firsts, strict=False)), np.int64)


def _shares(loss_tokens: Ints, trained: NDArray[np.bool_], completions: Ints) -> NDArray[np.float32]:
    """Return the share of each sample in the loss tokens of its completion; equal shares where there is none."""
    num_completions = int(completions[-1]) + 1 if completions.size else 0
    tokens = np.bincount(completions, loss_tokens * trained, num_completions)[completions]
    samples = np.bincount(completions, trained, num_completions)[completions]
    return np.where(tokens > 0, loss_tokens / np.maximum(tokens, 1), 1 / np.maximum(samples, 1)).astype(np.float32)


def repeated(values: NDArray[Any], counts: Ints) -> NDArray[Any]:
    """Return `np.repeat(values, counts)` of two arrays (S,), without holding up other threads for long.

    numpy keeps Python's lock while it repeats, for a second with 200 million tokens; a slice is filled without it.
    """
    bounds = _offsets(counts)
    if bounds[-1] < LONG_SPAN * len(counts):
        return np.repeat(values, counts)
    found = np.empty(bounds[-1], values.dtype)
    for value, start, end in zip(values.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        found[start:end] = value
    return found


def spans_of(starts: Ints, lengths: Ints) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that joins spans of an array: starts [7, 0] with lengths [2, 3] are places 7, 8, 0, 1, 2.

    Args:
        starts: (S,).
        lengths: (S,).
    """
    bounds = _offsets(lengths)
    if bounds[-1] >= LONG_SPAN * len(lengths):  # copies are faster than an index of eight bytes per token
        spans = [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        return lambda values: np.concatenate([values[:0], *(values[span] for span in spans)])
    places = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)
    return lambda values: values[places]


def _joined(parts: Iterable[NDArray[Any]], dtype: type) -> NDArray[Any]:
    # the empty array in front sets the dtype where there are no parts
    return np.concatenate([np.zeros(0, dtype), *parts])


def _offsets(lengths: Sequence[int] | Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
