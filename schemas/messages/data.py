"""The three messages of the data plane: sampled groups, scored groups, training batches.

Axes: G completions of a group, P prompt tokens, N tokens, A advantages of tokens, S segments, F reward functions,
B samples of a batch, M micro-batches, U minibatches, K groups of a step.
"""

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from schemas import arrays
from schemas.messages.base import Frozen, Message

Purpose = Literal["train", "eval"]
Prompt = str | list[dict[str, Any]]

SEGMENT_START, SEGMENT_LINEAGE, SEGMENT_VERSION = 0, 1, 2
"""Columns of `RolloutGroup.segments`."""


class Policy(Frozen):
    """Which weights: version v is the policy after v optimizer steps; a lineage is one start of the trainer.

    A trainer that starts again from step 36 is a new lineage, so its version 41 is not the dead one's version 41.
    """

    lineage: int
    version: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.version}"


class RolloutGroup(Message):
    """The completions of one prompt, as sampled: what a rollout actor sends to a reward actor.

    A completion is a list of segments: a run of tokens sampled by one policy at one temperature. Two completions of
    3 and 2 tokens, the first interrupted after its second token by an update from version 7 to 8:

        completion_offsets [0, 3, 5]     segments [[0, 1, 7], [2, 1, 8], [3, 1, 7]]    (start, lineage, version)
    """

    kind: ClassVar[str] = "rollout_group"

    sender: str
    ordinal: int
    attempt: int
    purpose: Purpose
    environment: str
    example_key: str
    prompt: Prompt
    columns: dict[str, Any]
    completions: list[str]
    finish_reasons: list[str]
    prompt_ids: arrays.Int32_P
    completion_offsets: arrays.Offsets_G
    token_ids: arrays.Int32_N
    loss_mask: arrays.UInt8_N
    logprobs: arrays.Float32_N
    segments: arrays.Segments_S
    segment_temperatures: arrays.Float32_S

    def check(self) -> None:
        """Offsets cover all tokens; texts and finish reasons are one per completion."""
        num_tokens, num_completions = len(self.token_ids), len(self.completion_offsets) - 1
        arrays.check_offsets("completion_offsets", self.completion_offsets, num_tokens)
        if not len(self.completions) == len(self.finish_reasons) == num_completions:
            raise ValueError(f"completions, finish_reasons: one per completion, so {num_completions}")
        arrays.check_starts("segments", self.segments[:, SEGMENT_START], num_tokens)

    @property
    def num_completions(self) -> int:
        """G."""
        return len(self.completion_offsets) - 1

    @property
    def lengths_G(self) -> NDArray[np.int64]:
        """Tokens per completion."""
        return self.completion_offsets[1:] - self.completion_offsets[:-1]  # np.diff takes ten times as long

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token of the group: what its lag is counted from (P4)."""
        return int(self.segments[:, SEGMENT_VERSION].min())

    def per_token(self, per_segment: NDArray[Any]) -> NDArray[Any]:
        """Spread one value per segment over the tokens of the segments, (S,) → (N,)."""
        starts = self.segments[:, SEGMENT_START]
        return np.repeat(per_segment, np.diff(starts, append=self.token_ids.size))


class ScoredGroup(RolloutGroup):
    """A group with its rewards and advantages: what a reward actor sends to the packer."""

    kind: ClassVar[str] = "scored_group"

    scorer: str
    reward_names: list[str]
    rewards_FG: arrays.Float64_FG
    """Per function and completion; NaN where the function returned None (not applicable)."""
    rewards_G: arrays.Float64_G
    """Weighted sum over the functions that applied; NaN where none did (unscorable)."""
    advantages_G: arrays.Float32_G
    """Of all tokens of a completion; where `token_advantages` are given, the mean of its own. Those of types whose
    level is `step` are made anew with the batches (`actors.algorithms.advantages`)."""
    token_advantages: arrays.Float32_A = np.zeros(0, np.float32)
    """Per token where they differ within a completion, A = N; else empty, A = 0."""

    def check(self) -> None:
        """One name per reward function; no infinite number anywhere."""
        super().check()
        if len(self.reward_names) != self.rewards_FG.shape[0]:
            raise ValueError(f"reward_names: {len(self.reward_names)} names for {self.rewards_FG.shape[0]} functions")
        if self.advantages_G.shape[0] != self.num_completions:
            raise ValueError(f"advantages_G: {self.advantages_G.shape[0]} for {self.num_completions} completions")
        if self.token_advantages.size not in (0, self.token_ids.size):
            raise ValueError(f"token_advantages: {self.token_advantages.size} for {self.token_ids.size} tokens")
        finite = np.isfinite(self.advantages_G).all() and np.isfinite(self.token_advantages).all()
        if np.isinf(self.rewards_G).any() or not finite:
            raise ValueError("rewards_G, advantages_G: a value is infinite or an advantage is NaN")

    @property
    def advantages(self) -> NDArray[np.float32]:
        """One per token where they differ within completions, else one per completion."""
        return self.token_advantages if self.token_advantages.size else self.advantages_G

    @property
    def advantages_N(self) -> NDArray[np.float32]:
        """Per token, (N,)."""
        return self.token_advantages if self.token_advantages.size else np.repeat(self.advantages_G, self.lengths_G)


class DroppedOrdinal(Frozen):
    """An ordinal that will never be trained, and why."""

    ordinal: int
    reason: str


class StepBatch(Message):
    """The share of one trainer rank in one training step, packed: what the packer sends to it.

    A sample is prompt and completion of one completion. Micro-batch m holds the samples
    `micro_batch_offsets[m]:micro_batch_offsets[m+1]`; sample b holds the tokens
    `sample_offsets[b]:sample_offsets[b+1]`, of which the first `prompt_lengths[b]` are its prompt. Logprobs,
    advantages, temperatures and versions of prompt tokens are 0, 0, 1 and 0.

    A minibatch is what one optimizer update is made of: minibatch u has the micro-batches
    `minibatch_offsets[u]:minibatch_offsets[u+1]`, as many on every rank, and its completions are on no other.
    """

    kind: ClassVar[str] = "step_batch"

    term: int
    incarnation: int
    rank: int
    num_ranks: int
    step: int
    dropped: list[DroppedOrdinal]
    """Ordinals dropped since the step before, for the witness (P20)."""
    digests: list[str]
    """sha256 of each group's stored payload, in the order of `ordinals`."""
    ordinals: arrays.Int64_K
    """All groups of the step, on whichever rank."""
    minibatch_offsets: arrays.Offsets_U
    loss_tokens: arrays.Int64_U
    """Tokens with loss mask 1 in each minibatch, over all ranks, at least 1: the loss normaliser."""
    num_completions: arrays.Int64_U
    """Completions of each minibatch, over all ranks."""
    micro_batch_offsets: arrays.Offsets_M
    sample_offsets: arrays.Offsets_B
    prompt_lengths: arrays.Int64_B
    sample_ordinals: arrays.Int64_B
    token_ids: arrays.Int32_N
    loss_mask: arrays.UInt8_N
    logprobs: arrays.Float32_N
    advantages: arrays.Float32_N
    temperatures: arrays.Float32_N
    versions: arrays.Int32_N
    """The policy version that sampled a token."""

    def check(self) -> None:
        """Minibatches cover the micro-batches, these the samples (a dummy may be empty), samples the tokens."""
        arrays.check_offsets("sample_offsets", self.sample_offsets, self.token_ids.size)
        bounds = self.micro_batch_offsets
        if bounds[0] != 0 or bounds[-1] != self.prompt_lengths.size or (np.diff(bounds) < 0).any():
            raise ValueError("micro_batch_offsets: must start at 0, not fall, and end at the number of samples")
        arrays.check_offsets("minibatch_offsets", self.minibatch_offsets, self.num_micro_batches)
        if len(self.digests) != self.ordinals.size:
            raise ValueError(f"digests: one per group, so {self.ordinals.size}, got {len(self.digests)}")

    @property
    def num_micro_batches(self) -> int:
        """M, the same on every rank."""
        return int(self.micro_batch_offsets.size - 1)

    @property
    def num_minibatches(self) -> int:
        """U, the same on every rank."""
        return int(self.minibatch_offsets.size - 1)
