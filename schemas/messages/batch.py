"""Messages of a training step: the packed batch of a trainer rank, whole or in parts.

Axes: B samples, N tokens, M micro-batches, U minibatches, K groups of a step, D dropped ordinals.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from schemas import arrays, limits, routed
from schemas.messages.base import Frozen, Listed, Message
from schemas.messages.groups import ImagePlace, check_places_name_images


class DroppedOrdinal(Frozen):
    """Ordinal that will never be trained, with the counted reason."""

    ordinal: int
    reason: str
    """Single word, e.g. `poison`, `stale`, `zero_variance`."""


class StepBatch(Message):
    """Share of one trainer rank in one training step, packed, sent by the packer.

    A sample is a prompt with a completion, or with one of a completion's branches. Micro-batch m has samples
    `micro_batch_offsets[m]:micro_batch_offsets[m+1]`. Sample b has tokens `sample_offsets[b]:sample_offsets[b+1]`; the
    first `prompt_lengths[b]` are the prompt. Logprobs, advantages, temperatures and versions of prompt tokens are 0, 0,
    1 and 0; of an environment's tokens behind the prompt, versions are NO_POLICY.

    A minibatch is the data of one optimizer update. Minibatch u has micro-batches
    `minibatch_offsets[u]:minibatch_offsets[u+1]`, the same number on every rank. Each completion is in one minibatch,
    its samples may be on several ranks.

        minibatch_offsets [0, 1, 2]       micro_batch_offsets [0, 2, 3]
        sample_offsets [0, 5, 9, 16]      prompt_lengths [2, 2, 3]

    are two updates: samples of 5 and 4 tokens in the first, a sample of 7 tokens (4 of them sampled) in the second.
    """

    kind: ClassVar[str] = "step_batch"
    version: ClassVar[int] = 3
    blobs: ClassVar[tuple[str, ...]] = ("images", "routed_experts")
    rare: ClassVar[tuple[str, ...]] = ("images", "image_places", "routed_experts", "expert_layout")

    term: int
    """Term of the packer; ranks drop batches of older terms (protocol rule P2)."""
    incarnation: int
    """Gang that the batch is for; other gangs drop it (protocol rule P19)."""
    rank: int
    num_ranks: int
    step: int
    drop_reasons: Listed[str]
    """Reasons that `drops_D` refers to, each once."""
    drops_D: arrays.Drops_D
    """Shape (D, 2). Ordinal and index of the reason, for each ordinal dropped since the previous step; recorded in the
    checkpoint's witness (protocol rule P20). An array, since a fork may drop more than a header holds."""
    digests: Listed[str]
    """sha256 of the stored payload of each group, in the order of `ordinals`."""
    ordinals: arrays.Int64_K
    """Shape (K,). All groups of the step, on all ranks."""
    minibatch_offsets: arrays.Offsets_U
    """Shape (U + 1,). Starts of the minibatches in the M micro-batches, and M."""
    loss_tokens: arrays.Int64_U
    """Shape (U,). Number of tokens of the policy loss per minibatch over all ranks, its denominator."""
    ref_kl_tokens: arrays.Int64_U
    """Shape (U,). Number of tokens with distillation (`ref_kl_weights`) per minibatch over all ranks."""
    num_completions: arrays.Int64_U
    """Shape (U,). Number of completions per minibatch over all ranks."""
    micro_batch_offsets: arrays.Offsets_M
    """Shape (M + 1,). Starts of the micro-batches in the B samples, and B. A dummy micro-batch may be empty."""
    sample_offsets: arrays.Offsets_B
    """Shape (B + 1,). Starts of the samples in the N tokens, and N."""
    prompt_lengths: arrays.Int64_B
    """Shape (B,). Number of prompt tokens of each sample."""
    sample_ordinals: arrays.Int64_B
    """Shape (B,). Ordinal of each sample's group."""
    completions: arrays.Int64_B
    """Shape (B,). Index of each sample's completion among all completions of the step, in the order of the groups."""
    sample_shared: arrays.Int64_B
    """Shape (B,). Number of leading tokens that each sample has in common with the sample before it in its
    micro-batch: a part of its prompt, or all of it. The row holds these tokens once."""
    sample_shares: arrays.Float32_B
    """Shape (B,). Share of each sample in the loss tokens of its completion; 1 for a completion's only sample."""
    images: Listed[bytes] = Field(default_factory=list)
    """Files of the images that the rank's samples show, each once."""
    image_places: Listed[ImagePlace] = Field(default_factory=list)
    """Places of the images, in the order of tokens. Tokens that a sample shares with the sample before it have no
    places here: their images are those of the sample before."""
    routed_experts: Listed[bytes] = Field(default_factory=list)
    """Experts that the engine's routers chose for each token of the samples in turn, in each layer (`schemas.routed`),
    without tokens that a sample shares with the sample before it. Empty without `trainer.router_replay`."""
    expert_layout: Listed[int] = Field(default_factory=list)
    """Bytes per index, layers, and experts per token, if there are `routed_experts`."""
    rewards: arrays.Float64_B
    """Shape (B,). Reward of each sample's completion, NaN: unscorable. Used if a KL enters the reward
    (`group_reward`)."""
    rl_weights: arrays.Float32_B
    """Shape (B,). Factor of the policy loss on each sample's tokens."""
    ref_kl_weights: arrays.Float32_B
    """Shape (B,). Factor of distillation on each sample's tokens."""
    token_ids: arrays.Int32_N
    """Shape (N,). Token ids of all samples, prompts included."""
    loss_mask: arrays.UInt8_N
    """Shape (N,). 1 for tokens in the loss, else 0."""
    logprobs: arrays.Float32_N
    """Shape (N,). The engine's logprobs."""
    advantages: arrays.Float32_N
    """Shape (N,). Advantage of each token."""
    temperatures: arrays.Float32_N
    """Shape (N,). Sampling temperature of each token."""
    versions: arrays.Int32_N
    """Shape (N,). Policy version that sampled each token."""

    def check(self) -> None:
        """Check samples, and that minibatches cover the micro-batches, micro-batches the samples, samples the tokens.

        Raises:
            ValueError: names the field.
        """
        arrays.check_offsets("sample_offsets", self.sample_offsets, self.token_ids.size)
        # offsets of micro-batches may repeat, unlike other offsets: dummy micro-batches are empty
        bounds = self.micro_batch_offsets
        # compared, since differences of hostile numbers overflow
        if bounds[0] != 0 or bounds[-1] != self.prompt_lengths.size or (bounds[1:] < bounds[:-1]).any():
            raise ValueError("micro_batch_offsets: must start at 0, not fall, and end at the number of samples")
        self._check_samples()
        if self.images or self.image_places:
            self._check_images()
        if self.routed_experts:
            routed.check(self.routed_experts, self.expert_layout, self.token_ids.size - int(self.sample_shared.sum()))
        arrays.check_offsets("minibatch_offsets", self.minibatch_offsets, self.num_micro_batches)
        if self.drops_D.size and not 0 <= self.drops_D[:, 1].min() <= self.drops_D[:, 1].max() < len(self.drop_reasons):
            raise ValueError(f"drops_D: an index beyond the {len(self.drop_reasons)} drop_reasons")
        if len(self.digests) != self.ordinals.size:
            raise ValueError(f"digests: one per group, so {self.ordinals.size}, got {len(self.digests)}")

    def experts_of(self, first: int, last: int) -> list[routed.Experts]:
        """Return the experts of samples `first` to `last` (exclusive), without shared tokens; empty if unknown."""
        if not self.routed_experts:
            return []
        ends = np.cumsum(np.diff(self.sample_offsets) - self.sample_shared)
        start = int(ends[first - 1]) if first else 0
        found = routed.unpacked(self.routed_experts, self.expert_layout, start, int(ends[last - 1]))
        return np.split(found, ends[first : last - 1] - start)

    def _check_samples(self) -> None:
        """Check prompts, and that each sample has in common with the sample before it what it shares.

        Raises:
            ValueError: names the field, the sample and the value.
        """
        sizes, prompts, shared = np.diff(self.sample_offsets), self.prompt_lengths, self.sample_shared
        for b in np.flatnonzero((prompts < 1) | (prompts > sizes))[:1]:
            raise ValueError(f"prompt_lengths: of the {sizes[b]} tokens of sample {b}, 1 to all, got {prompts[b]}")
        for b in np.flatnonzero((shared < 0) | (shared > prompts))[:1]:
            raise ValueError(
                f"sample_shared: of the {prompts[b]} prompt tokens of sample {b}, 0 to all, got {shared[b]}"
            )
        firsts = self.micro_batch_offsets[:-1]
        firsts = firsts[firsts < self.micro_batch_offsets[1:]]  # an empty micro-batch has no first sample
        for b in firsts[shared[firsts] > 0][:1]:
            raise ValueError(f"sample_shared: sample {b} is the first of its micro-batch, so 0, got {shared[b]}")
        followers = np.flatnonzero(shared)
        before, ordinals = followers - 1, self.sample_ordinals
        for b in followers[ordinals[before] != ordinals[followers]][:1]:
            raise ValueError(
                f"sample_shared: sample {b - 1} is of group {ordinals[b - 1]} and sample {b} of {ordinals[b]}, so 0, "
                f"got {shared[b]}"
            )
        # the row leaves out the last token of a completion
        held = sizes - (sizes > prompts)
        for b in followers[shared[followers] > held[before]][:1]:
            raise ValueError(
                f"sample_shared: the row holds {held[b - 1]} tokens of sample {b - 1}, sample {b} shares {shared[b]}"
            )
        if not followers.size:  # the copy of all tokens would be for nothing
            return
        # as bytes: slices of numpy would take most of the time
        ids, starts = self.token_ids.tobytes(), (self.sample_offsets * self.token_ids.itemsize).tolist()
        lengths = (shared[followers] * self.token_ids.itemsize).tolist()
        for b, length in zip(followers.tolist(), lengths, strict=True):
            if ids[starts[b] : starts[b] + length] != ids[starts[b - 1] : starts[b - 1] + length]:
                raise ValueError(f"sample_shared: samples {b - 1} and {b} differ in their first {shared[b]} tokens")

    def _check_images(self) -> None:
        """Check that each place is in what the row holds of its sample, and that no shared tokens cut an image.

        Raises:
            ValueError: names the field, the sample and the value.
        """
        check_places_name_images(self.images, self.image_places)
        end = 0
        for place in self.image_places:
            if place.length < 1 or not end <= place.start < self.token_ids.size:
                raise ValueError(f"image_places: a place at {place.start} with {place.length} tokens, behind {end}")
            end = place.start + place.length
        sizes, prompts, shared = np.diff(self.sample_offsets), self.prompt_lengths, self.sample_shared
        held, before = (sizes - (sizes > prompts)).tolist(), list[ImagePlace]()
        for b, (places, prefix) in enumerate(zip(self.places_of_samples(), shared.tolist(), strict=True)):
            if places and places[-1].start + places[-1].length > held[b]:
                raise ValueError(f"image_places: an image ends behind the {held[b]} tokens in the row of sample {b}")
            common = [place for place in before if place.start < prefix]
            if any(place.start + place.length > prefix for place in common):
                raise ValueError(f"sample_shared: the {prefix} tokens that sample {b} shares cut an image")
            if any(place.start < prefix for place in places[len(common) :]):
                raise ValueError(f"image_places: sample {b} has a place in the {prefix} tokens that it shares")
            before = places

    def places_of_samples(self) -> list[list[ImagePlace]]:
        """Return the places of the images of each sample, shared ones included; starts count from the sample's."""
        offsets = self.sample_offsets
        owners = np.searchsorted(offsets, [place.start for place in self.image_places], side="right") - 1
        own = [list[ImagePlace]() for _ in range(offsets.size - 1)]
        for b, place in zip(owners.tolist(), self.image_places, strict=True):
            own[b].append(place.model_copy(update={"start": place.start - int(offsets[b])}))
        found, before = [], list[ImagePlace]()
        for places, prefix in zip(own, self.sample_shared.tolist(), strict=True):
            before = [place for place in before if place.start < prefix] + places
            found.append(before)
        return found

    @property
    def dropped(self) -> list[DroppedOrdinal]:
        """Ordinals dropped since the previous step, with their reasons."""
        return [DroppedOrdinal(ordinal=o, reason=self.drop_reasons[i]) for o, i in self.drops_D.tolist()]

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches M, the same on every rank."""
        return int(self.micro_batch_offsets.size - 1)

    @property
    def num_minibatches(self) -> int:
        """Number of minibatches U, the same on every rank."""
        return int(self.minibatch_offsets.size - 1)


class BatchPart(Message):
    """Part of a StepBatch that is larger than a message: bytes of its frames, joined in their order.

    All parts of a batch name its frames; parts in any order, without gap or overlap, are the batch.
    """

    kind: ClassVar[str] = "batch_part"

    term: int
    """The batch's own, like the three fields below: receivers drop a part where they would drop the batch."""
    incarnation: int
    rank: int
    step: int
    frame_bytes: Listed[int]
    """Bytes of each frame of the batch."""
    start: int
    """First byte of this part among those of all frames."""
    data: arrays.UInt8_N
    """Shape (N,). Bytes of this part."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole batch."""
        return sum(self.frame_bytes)

    def check(self) -> None:
        """Check that the part is within the frames, and these within the limits.

        Raises:
            ValueError: names the field.
        """
        if not 1 <= len(self.frame_bytes) <= limits.FRAMES or min(self.frame_bytes) < 0:
            raise ValueError(f"frame_bytes: sizes of 1 to {limits.FRAMES} frames, got {len(self.frame_bytes)}")
        if self.num_bytes > limits.BATCH_BYTES:
            raise ValueError(f"frame_bytes: {limits.BATCH_BYTES} bytes at most, got {self.num_bytes}")
        if not self.data.size or not 0 <= self.start <= self.num_bytes - self.data.size:
            raise ValueError(f"start: {self.data.size} bytes from {self.start} on are not in {self.num_bytes}")


def drop_fields(dropped: Sequence[DroppedOrdinal]) -> dict[str, Any]:
    """Return the fields `drop_reasons` and `drops_D` of a StepBatch for these drops."""
    # sorted: a batch is a pure function of its groups
    reasons = sorted({drop.reason for drop in dropped})
    drops = [(drop.ordinal, reasons.index(drop.reason)) for drop in dropped]
    # reshaped, since an array made of an empty list has one axis
    return {"drop_reasons": reasons, "drops_D": np.array(drops, np.int64).reshape(-1, 2)}
