"""Messages of the data plane: sampled groups, scored groups, training batches.

Axes: G completions of a group, P prompt tokens, N tokens, A advantages of tokens, S segments, F reward functions,
B samples of a batch, M micro-batches, U minibatches, K groups of a step, D dropped ordinals.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from schemas import arrays
from schemas.messages.base import Frozen, Listed, Message, Name

Purpose = Literal["train", "eval"]
"""Use of a group: training or evaluation."""
Prompt = str | Listed[dict[str, Any]]
"""Prompt of an example: text, or a list of chat messages with `role` and `content`."""

SEGMENT_START, SEGMENT_LINEAGE, SEGMENT_VERSION = 0, 1, 2
"""Column indices of `RolloutGroup.segments`."""


class PolicyVersion(Frozen):
    """Identity of a policy's weights, written `lineage.version`.

    Version v is the policy after v training steps. Each start of the trainer is a new lineage: after a restart from
    step 36, version 41 differs from version 41 of the earlier lineage.
    """

    lineage: int
    """Number of the trainer's start: 1, 2, …"""
    version: int
    """Number of training steps; 0: the initial model."""

    def __str__(self) -> str:
        # also the name of the version's directory, by which `bus.run_folder` knows what it may remove
        return f"{self.lineage}.{self.version}"


class RolloutGroup(Message):
    """Completions of one prompt as sampled, sent by a rollout actor to a reward actor.

    A completion consists of segments, tokens in a row sampled by one policy at one temperature. Two completions of 3
    and 2 tokens, the first interrupted after its second token by an update from version 7 to 8:

        completion_offsets [0, 3, 5]     segments [[0, 1, 7], [2, 1, 8], [3, 1, 7]]    (start, lineage, version)
    """

    kind: ClassVar[str] = "rollout_group"
    texts: ClassVar[tuple[str, ...]] = ("prompt", "completions")

    sender: Name
    """Name of the rollout actor."""
    ordinal: int
    attempt: int
    purpose: Purpose
    environment: str
    """Label of the environment."""
    example_key: str
    """Digest of environment and prompt."""
    prompt: Prompt
    columns: dict[str, Any]
    """Further columns of the example, for reward functions."""
    completions: Listed[str]
    """Texts of the G completions."""
    finish_reasons: Listed[str]
    """Reason of each completion's end: `stop`, or `length` if cut off at `rollout.max_tokens`."""
    prompt_ids: arrays.Int32_P
    """Shape (P,). Token ids of the prompt, the same for all completions."""
    completion_offsets: arrays.Offsets_G
    """Shape (G + 1,). Starts of the completions in the N tokens, and N."""
    token_ids: arrays.Int32_N
    """Shape (N,). Token ids of all completions, one after the other, without prompts."""
    loss_mask: arrays.UInt8_N
    """Shape (N,). 1 for tokens in the loss, else 0."""
    logprobs: arrays.Float32_N
    """Shape (N,). The engine's logprobs, of the distribution at the token's temperature."""
    segments: arrays.Segments_S
    """Shape (S, 3). Start in the N tokens, lineage and version of each segment."""
    segment_temperatures: arrays.Float32_S
    """Shape (S,). Sampling temperature of each segment."""

    def check(self) -> None:
        """Check that offsets and segments cover all tokens, and that texts and finish reasons are one per completion.

        Raises:
            ValueError: names the field.
        """
        num_tokens, num_completions = len(self.token_ids), len(self.completion_offsets) - 1
        arrays.check_offsets("completion_offsets", self.completion_offsets, num_tokens)
        if not len(self.completions) == len(self.finish_reasons) == num_completions:
            raise ValueError(f"completions, finish_reasons: one per completion, so {num_completions}")
        arrays.check_starts("segments", self.segments[:, SEGMENT_START], num_tokens)

    @property
    def num_completions(self) -> int:
        """Number of completions, G."""
        return len(self.completion_offsets) - 1

    @property
    def lengths_G(self) -> NDArray[np.int64]:
        """Shape (G,). Number of tokens of each completion."""
        # not np.diff, which takes ten times as long
        return self.completion_offsets[1:] - self.completion_offsets[:-1]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token. The lag of the group in step k is k − 1 − oldest_version (protocol rule P4)."""
        return int(self.segments[:, SEGMENT_VERSION].min())

    def per_token(self, per_segment: NDArray[Any]) -> NDArray[Any]:
        """Return per token the value of its segment, (S,) → (N,)."""
        starts = self.segments[:, SEGMENT_START]
        return np.repeat(per_segment, np.diff(starts, append=self.token_ids.size))


class ScoredGroup(RolloutGroup):
    """Group with rewards and advantages, sent by a reward actor to the packer."""

    kind: ClassVar[str] = "scored_group"

    scorer: Name
    """Name of the reward actor."""
    reward_names: Listed[str]
    """Names of the F reward functions."""
    rewards_FG: arrays.Float64_FG
    """Shape (F, G). Value per function and completion; NaN: None was returned (not applicable)."""
    rewards_G: arrays.Float64_G
    """Shape (G,). Reward: weighted sum over applicable functions, then shaped; NaN: none applied (unscorable)."""
    advantages_G: arrays.Float32_G
    """Shape (G,). Advantage of all tokens of a completion, or their mean if `token_advantages` is set. Advantages of
    level `step` are provisional here: the packer computes them over all groups of a step."""
    token_advantages: arrays.Float32_A = np.zeros(0, np.float32)
    """Shape (A,). Advantage per token with A = N if advantages differ within a completion; else empty, A = 0."""

    def check(self) -> None:
        """Check counts of names and advantages, and that rewards are not infinite and advantages are finite.

        Raises:
            ValueError: names the field.
        """
        super().check()
        if len(self.reward_names) != self.rewards_FG.shape[0]:
            raise ValueError(f"reward_names: {len(self.reward_names)} names for {self.rewards_FG.shape[0]} functions")
        if self.advantages_G.shape[0] != self.num_completions:
            raise ValueError(f"advantages_G: {self.advantages_G.shape[0]} for {self.num_completions} completions")
        if self.token_advantages.size not in (0, self.token_ids.size):
            raise ValueError(f"token_advantages: {self.token_advantages.size} for {self.token_ids.size} tokens")
        finite = np.isfinite(self.advantages_G).all() and np.isfinite(self.token_advantages).all()
        # a NaN reward means unscorable and is allowed
        if np.isinf(self.rewards_G).any() or not finite:
            raise ValueError("rewards_G, advantages_G: a value is infinite or an advantage is NaN")

    @property
    def advantages(self) -> NDArray[np.float32]:
        """Advantages (N,) per token if set, else (G,) per completion."""
        return self.token_advantages if self.token_advantages.size else self.advantages_G

    @property
    def advantages_N(self) -> NDArray[np.float32]:
        """Shape (N,). Advantage of each token."""
        return self.token_advantages if self.token_advantages.size else np.repeat(self.advantages_G, self.lengths_G)


class DroppedOrdinal(Frozen):
    """Ordinal that will never be trained, with the counted reason."""

    ordinal: int
    reason: str
    """Single word, e.g. `poison`, `stale`, `zero_variance`."""


class StepBatch(Message):
    """Share of one trainer rank in one training step, packed, sent by the packer.

    A sample is a prompt with one completion. Micro-batch m has samples
    `micro_batch_offsets[m]:micro_batch_offsets[m+1]`. Sample b has tokens `sample_offsets[b]:sample_offsets[b+1]`; the
    first `prompt_lengths[b]` are the prompt. Logprobs, advantages, temperatures and versions of prompt tokens are 0, 0,
    1 and 0.

    A minibatch is the data of one optimizer update. Minibatch u has micro-batches
    `minibatch_offsets[u]:minibatch_offsets[u+1]`, the same number on every rank. Each completion is in one minibatch
    and on one rank.

        minibatch_offsets [0, 1, 2]       micro_batch_offsets [0, 2, 3]
        sample_offsets [0, 5, 9, 16]      prompt_lengths [2, 2, 3]

    are two updates: samples of 5 and 4 tokens in the first, a sample of 7 tokens (4 of them sampled) in the second.
    """

    kind: ClassVar[str] = "step_batch"

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
    """Shape (B,). Index of each sample among all completions of the step, in the order of the groups."""
    rewards: arrays.Float64_B
    """Shape (B,). Reward of each sample, NaN: unscorable. Used if a KL enters the reward (`group_reward`)."""
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
        """Check that minibatches cover the micro-batches, micro-batches the samples and samples the tokens.

        Raises:
            ValueError: names the field.
        """
        arrays.check_offsets("sample_offsets", self.sample_offsets, self.token_ids.size)
        # offsets of micro-batches may repeat, unlike other offsets: dummy micro-batches are empty
        bounds = self.micro_batch_offsets
        if bounds[0] != 0 or bounds[-1] != self.prompt_lengths.size or (np.diff(bounds) < 0).any():
            raise ValueError("micro_batch_offsets: must start at 0, not fall, and end at the number of samples")
        arrays.check_offsets("minibatch_offsets", self.minibatch_offsets, self.num_micro_batches)
        if self.drops_D.size and not 0 <= self.drops_D[:, 1].min() <= self.drops_D[:, 1].max() < len(self.drop_reasons):
            raise ValueError(f"drops_D: an index beyond the {len(self.drop_reasons)} drop_reasons")
        if len(self.digests) != self.ordinals.size:
            raise ValueError(f"digests: one per group, so {self.ordinals.size}, got {len(self.digests)}")

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


def drop_fields(dropped: Sequence[DroppedOrdinal]) -> dict[str, Any]:
    """Return the fields `drop_reasons` and `drops_D` of a StepBatch for these drops."""
    # sorted: a batch is a pure function of its groups
    reasons = sorted({drop.reason for drop in dropped})
    drops = [(drop.ordinal, reasons.index(drop.reason)) for drop in dropped]
    # reshaped, since an array made of an empty list has one axis
    return {"drop_reasons": reasons, "drops_D": np.array(drops, np.int64).reshape(-1, 2)}
