"""Messages of groups: completions of one example as sampled, and with rewards and advantages.

Axes: G completions of a group, B samples, Q prompts, P prompt tokens, N tokens, A advantages of tokens, S segments,
E rewards of an environment, R rewards of turns, F reward functions.
"""

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from schemas import arrays, limits, routed
from schemas.messages.base import Frozen, Listed, Message, Name

Purpose = Literal["train", "eval"]
"""Use of a group: training or evaluation."""
Prompt = str | Listed[dict[str, Any]]
"""Prompt of an example: text, or a list of chat messages with `role` and `content`."""

SEGMENT_START, SEGMENT_LINEAGE, SEGMENT_VERSION, SEGMENT_ORIGIN, SEGMENT_TURN = range(5)
"""Column indices of `RolloutGroup.segments`."""
TURNS_REWARD = "turns"
"""Name of the sum of the rewards of a trajectory's turns, among the rewards of its environment."""
TURNS, TOOL_CALLS, TOOL_FAILURES = range(3)
"""Column indices of `RolloutGroup.counts`."""
NO_POLICY = -1
"""Lineage and version of tokens that no policy has sampled."""
StopCondition = Literal[
    "stop",
    "length",
    "done",
    "env_truncated",
    "max_turns",
    "max_total_tokens",
    "context_full",
    "timeout",
    "failed",
]
"""Why a completion ended: of a single turn `stop`, or `length` if cut off at `rollout.max_tokens`.

With an environment: `done`, or `env_truncated` if it ran out of turns of its own; `length`, if the last turn was cut
off; a limit of the trajectory, reached before the next turn; or `failed`, if the environment failed.
"""
EnvironmentFailure = Literal["env_load", "env_reset", "env_step", "env_score", "env_timeout", "env_lost", "agent_exit"]
"""Part of an environment that failed: loading the user's code, one of its functions, a function's time limit, the
worker process, or an agent that is a program, by its exit status or a signal."""
TRUNCATED = frozenset({"length", "max_total_tokens", "context_full", "timeout"})
"""Stop conditions of completions that ran out of tokens or time."""


class Origin(IntEnum):
    """Source of a segment's tokens."""

    MODEL = 0
    """Sampled by a policy."""
    ENVIRONMENT = 1
    """From the environment or the caller: messages, tool results, and the template around them."""
    BOUNDARY = 2
    """Added to close a turn that was cut off."""


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


class ImagePlace(Frozen):
    """Place of an image in the tokens of a message: a run of equal placeholder tokens."""

    image: int
    """Index in the message's `images`."""
    start: int
    """Position of the first placeholder. A group counts its P prompt tokens, and behind them the N tokens of samples; a
    batch counts its N tokens."""
    length: int
    """Number of placeholders."""


class RolloutGroup(Message):
    """Completions of one example as sampled, sent by a rollout actor to a reward actor.

    A completion is one attempt at the example, a trajectory: of a single turn, or of several turns with an environment.
    A sample is a row of tokens that is trained. A completion has one sample; it has several if its conversation has
    branches. Each sampled token is in the loss of exactly one sample.

    A sample's tokens consist of segments: tokens in a row sampled by one policy at one temperature, or tokens of the
    environment. Two completions of a single turn, of 3 and 2 tokens, the first interrupted after its second token by an
    update from version 7 to 8:

        sample_offsets [0, 3, 5]   sample_completions [0, 1]   sample_prompts [0, 0]   prompt_offsets [0, P]
        segments [[0, 1, 7, 0, 0], [2, 1, 8, 0, 0], [3, 1, 7, 0, 0]]      (start, lineage, version, origin, turn)
    """

    kind: ClassVar[str] = "rollout_group"
    version: ClassVar[int] = 2
    texts: ClassVar[tuple[str, ...]] = ("prompt", "completions", "transcripts")
    blobs: ClassVar[tuple[str, ...]] = ("images", "routed_experts")
    rare: ClassVar[tuple[str, ...]] = ("images", "image_places", "routed_experts", "expert_layout")

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
    # a factory, since pydantic copies another default deeply, which takes 7 % of the time to decode a small group
    images: Listed[bytes] = Field(default_factory=list)
    """Files of the group's images, each once, in the order in which prompts show them first. A part of a message with
    an image has its digest (BLAKE3, 32 hex digits)."""
    image_places: Listed[ImagePlace] = Field(default_factory=list)
    """Places of the images, in the order of tokens. Completions with a common prompt share its places."""
    routed_experts: Listed[bytes] = Field(default_factory=list)
    """Experts that the engine's routers chose for the P prompt tokens, and behind them for the N tokens of samples, in
    each layer (`schemas.routed`); empty without `trainer.router_replay`."""
    expert_layout: Listed[int] = Field(default_factory=list)
    """Bytes per index, layers, and experts per token, if there are `routed_experts`."""
    completions: Listed[str]
    """Texts of the G completions: of each, the model's last answer."""
    transcripts: Listed[str] = []
    """Conversation of each completion as JSON: [messages of the prompt, messages behind the prompt, the environment's
    info]. Empty without an environment: the completion is then the only message."""
    stop_conditions: Listed[str]
    """Reason of each completion's end, a `StopCondition`."""
    failures: Listed[str] = []
    """Error of each completion whose environment failed, which is unscorable; empty texts for the others. Empty: none
    failed."""
    prompt_ids: arrays.Int32_P
    """Shape (P,). Token ids of the Q prompts, one after the other. Completions of a single turn share one prompt."""
    prompt_offsets: arrays.Offsets_Q
    """Shape (Q + 1,). Starts of the prompts in the P tokens, and P. No prompt is empty."""
    sample_offsets: arrays.Offsets_B
    """Shape (B + 1,). Starts of the samples in the N tokens, and N."""
    sample_completions: arrays.Int64_B
    """Shape (B,). Completion of each sample; does not fall, and names each completion."""
    sample_prompts: arrays.Int64_B
    """Shape (B,). Prompt of each sample."""
    token_ids: arrays.Int32_N
    """Shape (N,). Token ids of all samples, one after the other, without prompts."""
    loss_mask: arrays.UInt8_N
    """Shape (N,). 1 for tokens in the loss, else 0."""
    logprobs: arrays.Float32_N
    """Shape (N,). The engine's logprobs, of the distribution at the token's temperature; 0 for tokens not sampled."""
    segments: arrays.Segments_S
    """Shape (S, 5). Start in the N tokens, lineage, version, `Origin` and turn of each segment. Lineage and version are
    NO_POLICY for tokens not sampled."""
    segment_temperatures: arrays.Float32_S
    """Shape (S,). Sampling temperature of each segment; 1 for tokens not sampled."""
    counts: arrays.Counts_G
    """Shape (G, 3). Turns, tool calls and failed tool calls of each completion."""
    environment_reward_names: Listed[str] = []
    """Names of the E rewards that the environment gives."""
    environment_rewards_EG: arrays.Float64_EG
    """Shape (E, G). Rewards by the environment; NaN: none."""
    turn_rewards: arrays.Float64_R = np.zeros((0, 3))
    """Shape (R, 3). Completion, turn and reward of each turn that the environment rewarded."""

    def check(self) -> None:
        """Check that offsets and segments cover all tokens, and that samples, texts and conditions fit together.

        Raises:
            ValueError: names the field.
        """
        num_tokens, num_completions = len(self.token_ids), self.num_completions
        arrays.check_offsets("sample_offsets", self.sample_offsets, num_tokens)
        prompts = self.prompt_offsets
        if prompts[0] != 0 or prompts[-1] != len(self.prompt_ids) or (prompts[1:] < prompts[:-1]).any():
            raise ValueError(f"prompt_offsets: must start at 0, not fall, and end at {len(self.prompt_ids)}")
        for prompt in np.flatnonzero(prompts[1:] == prompts[:-1])[:1]:
            raise ValueError(
                f"prompt_offsets: prompt {prompt} has no token; it needs at least one, since a token is predicted by "
                "those before it"
            )
        if not len(self.completions) == len(self.stop_conditions) == num_completions:
            raise ValueError(f"completions, stop_conditions: one per completion, so {num_completions}")
        for name in ("transcripts", "failures"):
            if len(getattr(self, name)) not in (0, num_completions):
                raise ValueError(f"{name}: one per completion, so {num_completions}, or none")
        if len(self.environment_reward_names) != len(self.environment_rewards_EG):
            raise ValueError(f"environment_reward_names: {len(self.environment_rewards_EG)} rewards have names")
        owners, of_samples = self.sample_completions.tolist(), self.sample_prompts.tolist()
        if sorted(owners) != owners or set(owners) != set(range(num_completions)):
            raise ValueError(f"sample_completions: must name each of {num_completions} completions, and not fall")
        if not 0 <= min(of_samples) <= max(of_samples) < len(prompts) - 1:
            raise ValueError(f"sample_prompts: there are {len(prompts) - 1} prompts")
        arrays.check_starts("segments", self.segments[:, SEGMENT_START], num_tokens)
        places = self.turn_rewards[:, 0]
        if places.size and not 0 <= places.min() <= places.max() < num_completions:
            raise ValueError(f"turn_rewards: there are {num_completions} completions")
        if not self.is_sampled_whole and self.loss_mask[~self.sampled_N].any():
            raise ValueError("loss_mask: a token that no policy has sampled is in the loss")
        self._check_rare()

    def _check_rare(self) -> None:
        """Check what few groups have.

        Raises:
            ValueError: names the field.
        """
        if self.images or self.image_places:
            self._check_images()
        if self.routed_experts:
            routed.check(self.routed_experts, self.expert_layout, len(self.prompt_ids) + len(self.token_ids))

    def _check_images(self) -> None:
        """Check that images are few and small enough, and that each has places in a prompt or a sample.

        Raises:
            ValueError: names the field.
        """
        num_bytes = sum(map(len, self.images))
        if len(self.images) > limits.GROUP_IMAGES or num_bytes > limits.IMAGES_BYTES:
            raise ValueError(
                f"images: {len(self.images)} with {num_bytes} bytes, and at most {limits.GROUP_IMAGES} with "
                f"{limits.IMAGES_BYTES} bytes travel"
            )
        check_places_name_images(self.images, self.image_places)
        # ends of prompts and samples, in which no place may begin in one and end in another
        ends = np.concatenate([self.prompt_offsets, len(self.prompt_ids) + self.sample_offsets[1:]])
        end = 0
        for place in self.image_places:
            if place.length < 1 or not end <= place.start < ends[-1]:
                raise ValueError(f"image_places: a place at {place.start} with {place.length} tokens, behind {end}")
            end = place.start + place.length
            own_end = ends[np.searchsorted(ends, place.start, side="right")]
            if end > own_end:
                raise ValueError(f"image_places: the place at {place.start} ends behind its prompt or sample")
            # a packed row leaves out the last token of a sample
            if end == own_end and place.start >= len(self.prompt_ids):
                raise ValueError(f"image_places: the place at {place.start} is the end of its sample")

    @property
    def experts(self) -> routed.Experts | None:
        """Shape (P + N, layers, experts per token). Experts by the engine's routers; None: unknown."""
        return routed.unpacked(self.routed_experts, self.expert_layout) if self.routed_experts else None

    @property
    def num_completions(self) -> int:
        """Number of completions, G."""
        return len(self.counts)

    @property
    def completion_offsets(self) -> NDArray[np.int64]:
        """Shape (G + 1,). Starts of the completions in the N tokens, and N."""
        if len(self.sample_completions) == self.num_completions:
            return self.sample_offsets
        firsts = np.searchsorted(self.sample_completions, np.arange(self.num_completions + 1))
        return self.sample_offsets[firsts]

    @property
    def num_tokens_G(self) -> NDArray[np.int64]:
        """Shape (G,). Number of tokens of each completion in all of its samples, those of the environment included."""
        offsets = self.completion_offsets
        # not np.diff, which takes ten times as long
        return offsets[1:] - offsets[:-1]

    @property
    def lengths_G(self) -> NDArray[np.int64]:
        """Shape (G,). Number of sampled tokens of each completion."""
        if self.is_sampled_whole:
            return self.num_tokens_G
        # reduceat would give an empty completion the next one's value, but no completion is empty
        return np.add.reduceat(self.sampled_N, self.completion_offsets[:-1], dtype=np.int64)

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled by policies, of all completions."""
        return int(self.lengths_G.sum())

    @property
    def is_sampled_whole(self) -> bool:
        """True if policies have sampled all of the N tokens."""
        return not self.segments[:, SEGMENT_ORIGIN].any()

    @property
    def sampled_N(self) -> NDArray[np.bool_]:
        """Shape (N,). Mask of the tokens sampled by a policy."""
        return self.per_token(self.segments[:, SEGMENT_ORIGIN] == Origin.MODEL)

    @property
    def policies(self) -> set[tuple[int, int]]:
        """Policies (lineage, version) that sampled the tokens."""
        sampled = self.segments[self.segments[:, SEGMENT_ORIGIN] == Origin.MODEL]
        return {(lineage, version) for _, lineage, version, *_ in sampled.tolist()}

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token. The lag of the group in step k is k − 1 − oldest_version (P4)."""
        return min(version for _, version in self.policies)

    @property
    def truncated_G(self) -> NDArray[np.bool_]:
        """Shape (G,). Mask of the completions that ran out of tokens or time."""
        return np.array([condition in TRUNCATED for condition in self.stop_conditions], np.bool_)

    @property
    def failed_G(self) -> NDArray[np.bool_]:
        """Shape (G,). Mask of the completions whose environment failed."""
        return np.array([bool(failure) for failure in self.failures] or [False] * self.num_completions, np.bool_)

    @property
    def longest_sample(self) -> int:
        """Number of tokens of the longest sample, prompt included."""
        prompts = (self.prompt_offsets[1:] - self.prompt_offsets[:-1])[self.sample_prompts]
        return int((prompts + self.sample_offsets[1:] - self.sample_offsets[:-1]).max())

    def transcript(self, completion: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the messages of a completion's prompt, and those behind the prompt; only with an environment."""
        prompt, behind, *_ = json.loads(self.transcripts[completion])
        return prompt, behind

    def info(self, completion: int) -> dict[str, Any]:
        """Return numbers and short texts that the environment told of a completion; only with an environment."""
        # a group stored by an earlier build has none
        _, _, *info = json.loads(self.transcripts[completion])
        return dict(info[0]) if info else {}

    def per_token(self, per_segment: NDArray[Any]) -> NDArray[Any]:
        """Return per token the value of its segment, (S,) → (N,)."""
        starts = self.segments[:, SEGMENT_START]
        return np.repeat(per_segment, np.diff(starts, append=self.token_ids.size))


def check_places_name_images(images: Sequence[bytes], places: Sequence[ImagePlace]) -> None:
    """Check that places name each image, and that an image has as many tokens at each of its places.

    Raises:
        ValueError: names the field.
    """
    if {place.image for place in places} != set(range(len(images))):
        raise ValueError(f"image_places: must name each of {len(images)} images, and no other")
    if len({(place.image, place.length) for place in places}) > len(images):
        raise ValueError("image_places: an image has places of different lengths")


def single_turn(
    prompt_ids: NDArray[np.int32], offsets: NDArray[np.int64], segments: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Return the fields of a `RolloutGroup` that say which token belongs where, for completions of a single turn.

    Args:
        prompt_ids: prompt of all completions, (P,).
        offsets: starts of the completions in the N tokens, and N, (G + 1,).
        segments: start, lineage and version of each segment, (S, 3).
    """
    size = len(offsets) - 1
    return {
        "prompt_ids": prompt_ids,
        "prompt_offsets": np.array([0, len(prompt_ids)], np.int64),
        "sample_offsets": offsets,
        "sample_completions": np.arange(size),
        "sample_prompts": np.zeros(size, np.int64),
        "segments": np.pad(segments, ((0, 0), (0, 2))),
        "counts": np.tile(np.array([1, 0, 0], np.int64), (size, 1)),
        "environment_rewards_EG": np.zeros((0, size)),
    }


class ScoredGroup(RolloutGroup):
    """Group with rewards and advantages, sent by a reward actor to the packer."""

    kind: ClassVar[str] = "scored_group"
    version: ClassVar[int] = 2

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
    logged_columns: dict[str, Any] = {}
    """Values that reward functions have logged, by name: a list with a text, number or None for each completion."""
    logged_metrics: dict[str, float] = {}
    """Numbers that reward functions have logged, by name."""

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
        return self.token_advantages if self.token_advantages.size else np.repeat(self.advantages_G, self.num_tokens_G)
