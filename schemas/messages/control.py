"""The control plane: a Beat from each actor to the packer, a State from the packer to each actor.

Both carry absolute values only. Any single one may be lost: the next one says everything again (P6).
`holds` and `release` are pairs (ordinal, attempt).
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from schemas import arrays
from schemas.messages.base import Frozen, Message
from schemas.messages.data import Policy, Purpose

ActorPhase = Literal["starting", "running", "draining", "done"]
RunPhase = Literal["starting", "running", "finishing", "done", "failed"]
EngineState = Literal["starting", "clean", "updating", "dirty", "quarantined"]
TrainerOrder = Literal["wait", "run", "exit", "finish"]


class Ticket(Frozen):
    """The order to sample one group. `seed + i` is the sampling seed of completion i."""

    ordinal: int
    attempt: int
    purpose: Purpose
    environment: str
    index: int
    example_key: str
    seed: int
    num_completions: int
    temperature: float
    top_p: float
    max_tokens: int
    min_version: int
    """Oldest version that may sample it (P10)."""
    policy: Policy | None = None
    """Exactly this policy and no other (evaluations)."""
    top_k: int = 0
    min_p: float = 0.0


class AttemptFailure(Frozen):
    """An attempt that its holder could not finish. `reason` is a word for counters, `detail` a sentence for people."""

    ordinal: int
    attempt: int
    reason: str
    detail: str


class Manifest(Frozen):
    """One published version of the weights and where it lies."""

    policy: Policy
    channel: Literal["filesystem", "rendezvous"]
    content: Literal["full", "adapter"]
    uri: str
    digest: str
    """Of the content: by the same channel the same weights have the same one, in whatever run."""
    num_bytes: int
    key: str = Field(default="", repr=False)
    """Of the codes by which members of a broadcast check what comes over the wire, hex; a secret, kept in memory."""


class WeightMember(Frozen):
    """An engine in a weight update: its process, and how many ranks of the group it brings (its parallel workers)."""

    boot_id: str
    num_ranks: int


class WeightUpdate(Frozen):
    """One update of the rendezvous channel, as the packer names it (P24). Members are frozen.

    `group` changes when members change or an update has failed; the trainer is rank 0 of it, members follow in order.
    """

    update: str
    """Named once and never again, by any packer of the run."""
    group: str
    policy: Policy
    members: list[WeightMember]

    @property
    def num_ranks(self) -> int:
        """Of the group, the trainer's among them."""
        return 1 + sum(member.num_ranks for member in self.members)

    def names(self, boot_id: str) -> bool:
        """Whether this process is a member."""
        return any(member.boot_id == boot_id for member in self.members)

    def first_rank(self, boot_id: str) -> int:
        """The first rank of a member.

        Raises:
            KeyError: it is none.
        """
        rank = 1
        for member in self.members:
            if member.boot_id == boot_id:
                return rank
            rank += member.num_ranks
        raise KeyError(boot_id)


class UpdateFailure(Frozen):
    """An update that its teller could not finish. Of the trainer: who missed it, where it knows."""

    update: str
    missed: list[str]
    """Boot ids."""
    detail: str


class CheckpointInfo(Frozen):
    """A checkpoint that a trainer rank has read back and found good; `chain` ends its chain of witnesses (P20)."""

    step: int
    chain: str


class StepReport(Frozen):
    """What one rank measured in one step. `values` are the reporter's keys, all plain numbers."""

    step: int
    values: dict[str, float]
    weights: str = ""
    """Digest of the version that the step made, as published."""


class EnginePeer(Frozen):
    """An engine that may be asked for completions of a policy."""

    name: str
    boot_id: str
    url: str
    policy: Policy
    load: int
    """Completions running or waiting there."""


class RewardPeer(Frozen):
    """A reward actor that takes groups."""

    name: str
    boot_id: str
    address: str
    load: int


class Beat(Message):
    """What every actor says of itself, every second and on change."""

    name: str
    boot_id: str
    sequence: int
    phase: ActorPhase
    fingerprint: str | None = None
    """Of all message kinds; said until the packer has answered."""
    metrics_url: str = ""
    term: int = 0
    """Of the packer that was heard last."""


class RolloutBeat(Beat):
    """Holds: tickets being sampled and groups kept until the packer releases them (P13)."""

    kind: ClassVar[str] = "rollout_beat"

    free_slots: int
    failures: list[AttemptFailure]
    holds: arrays.Holds_H


class RewardBeat(Beat):
    """Holds: groups read or scored and not yet released."""

    kind: ClassVar[str] = "reward_beat"

    address: str
    load: int
    failures: list[AttemptFailure]
    holds: arrays.Holds_H


class TrainerBeat(Beat):
    """`next_step` is the step that the rank trains next; `received` are steps whose batch it has."""

    kind: ClassVar[str] = "trainer_beat"

    rank: int
    num_ranks: int
    address: str
    incarnation: int
    """0 until the packer has named one."""
    next_step: int
    checkpoints: list[CheckpointInfo]
    published: list[Manifest]
    reports: list[StepReport]
    """Of steps that State has not yet confirmed as recorded."""
    received: arrays.Int64_K
    failure: str = ""
    """Not empty: why the run can't go on, for everybody to be told."""
    failed_update: UpdateFailure | None = None
    """The last one of the rendezvous channel that failed here."""


class InferenceBeat(Beat):
    """One engine: where it is reached, what it serves, how busy it is."""

    kind: ClassVar[str] = "inference_beat"

    url: str
    engine_state: EngineState
    policy: Policy | None
    load: int
    generated_tokens: int
    holds_two_versions: bool
    update_seconds: dict[str, float]
    """Of the last weight update: pause, gather, wire, load."""
    weight_ranks: int = 0
    """Ranks that it brings to a rendezvous; 0: it takes part in none."""
    failed_update: UpdateFailure | None = None
    error: str = ""


class ObserverBeat(Beat):
    """A screen that watches the run (`actors up`, `actors top`)."""

    kind: ClassVar[str] = "observer_beat"


class State(Message):
    """What the packer says to every actor: the run's absolute state."""

    term: int
    phase: RunPhase
    step: int
    """Steps trained by all ranks in the live lineage."""
    max_steps: int
    refusal: str = ""
    """Not empty: this process is refused, why, and it shall exit."""


class RolloutState(State):
    """Tickets of this holder that its beat does not name; holds that are no longer its business; where to send what."""

    kind: ClassVar[str] = "rollout_state"

    tickets: list[Ticket]
    engines: list[EnginePeer]
    live_engines: list[str]
    """Boot ids of all engines that beat, also of those that take no new work: they still answer."""
    rewards: list[RewardPeer]
    release: arrays.Holds_H


class RewardState(State):
    """Where scored groups go, and which holds are settled."""

    kind: ClassVar[str] = "reward_state"

    packer_address: str
    release: arrays.Holds_H


class TrainerState(State):
    """What the gang shall do. `checkpoint` is the step to start from (0: the model as configured)."""

    kind: ClassVar[str] = "trainer_state"

    order: TrainerOrder
    incarnation: int
    lineage: int
    checkpoint: int
    recorded_step: int
    keep_version: int
    """Published versions from this one on may still be asked for."""
    update: WeightUpdate | None = None
    """What rank 0 shall broadcast now."""


class InferenceState(State):
    """The version that this engine shall serve, if one is published."""

    kind: ClassVar[str] = "inference_state"

    update_id: int
    manifest: Manifest | None
    update: WeightUpdate | None = None
    """Of the rendezvous channel: the manifest's version comes by this one, or not yet."""


class ObserverState(State):
    """Progress as plain values, for screens."""

    kind: ClassVar[str] = "observer_state"

    progress: dict[str, Any]
