"""Messages of the control plane: heartbeats from each actor to the packer, directives from the packer to each actor.

Both carry absolute values only, so that any single message may be lost: the next one repeats everything that counts
(protocol rule P6). Arrays `holds`, `scoring` and `release` have a row (ordinal, attempt) per group.
"""

import hashlib
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from schemas import arrays, limits
from schemas.config.sampling import SamplingParams
from schemas.messages.base import Address, Frozen, Listed, Message, Name, Reason, Words
from schemas.messages.groups import PolicyVersion, Purpose

ActorPhase = Literal["starting", "running", "draining", "done"]
"""Phase of an actor. `draining`: takes no new work and finishes its own; `done`: exits."""
RunPhase = Literal["starting", "running", "finishing", "done", "failed"]
"""Phase of the run. `finishing`: all steps are trained, the last checkpoint or evaluation is under way."""
EngineState = Literal["starting", "clean", "updating", "dirty", "quarantined"]
"""State of an engine. `clean`: serves a known policy; `dirty`: must load a whole version before new work."""
DeviceUse = Literal["free", "wanted", "held"]
"""Use of a device by a trainer rank. `wanted`: it waits for its turn to load; `held`: it loads or trains."""
TrainerOrder = Literal["wait", "run", "exit", "finish"]
"""Order to a trainer rank. `exit`: the gang has broken, start over; `finish`: all steps are trained."""


class Ticket(Frozen):
    """Order to sample one group."""

    ordinal: int
    """Number of the group: 0, 1, … in training, −1, −2, … in evaluations."""
    attempt: int
    """Number of the attempt at this group."""
    purpose: Purpose
    environment: str
    """Label of the environment."""
    index: int
    """Index of the example in the environment."""
    example_key: str
    """Digest of environment and prompt, for a rollout to verify that its data are the packer's."""
    seed: int
    """Sampling seed of completion 0; completion i has seed + i."""
    num_completions: int
    sampling: SamplingParams
    max_tokens: int
    """Maximum number of new tokens per completion."""
    stop: Listed[str] = []
    """Texts that end a completion."""
    ignore_eos: bool = False
    """True: the end of sequence ends no completion."""
    min_version: int
    """Oldest policy version allowed to sample the group (protocol rule P10)."""
    policy: PolicyVersion | None = None
    """The only policy allowed to sample the group, in evaluations; None in training."""


class AttemptFailure(Frozen):
    """Failed attempt at a group, reported by its holder."""

    ordinal: int
    attempt: int
    reason: Name
    """Single word, the label of the counter, e.g. `timeout`."""
    detail: Words
    """Sentence for people, with the cause."""


class Manifest(Frozen):
    """Published version of the weights, and its location."""

    policy: PolicyVersion
    channel: Literal["filesystem", "rendezvous", "device"]
    content: Literal["full", "adapter"]
    """All weights, or those of the LoRA adapter."""
    uri: Address
    """Directory of the version (`filesystem`), or address of the trainer's store (`rendezvous`, `device`)."""
    digest: Name
    """Digest of the content. Equal weights have equal digests in the same channel, across runs."""
    num_bytes: int
    key: Name = Field(default="", repr=False)
    """Key in hex of the codes that authenticate the buckets of a broadcast; a secret, never written to disk. Empty in
    channel `filesystem`."""
    place: Name = ""
    """Machine and device of the trainer's copy, in channel `device`. Engines in the same place map the copy."""

    @property
    def is_broadcast(self) -> bool:
        """True if engines get the version by updates (P24), and do not read it by themselves."""
        return self.channel != "filesystem"


class WeightMember(Frozen):
    """Engine as a member of a weight update."""

    boot_id: Name
    """Id of the engine's process."""
    num_ranks: int
    """Number of ranks that the engine has in the update's process group; 0: it maps the trainer's copy."""


class WeightUpdate(Frozen):
    """One update in channel `rendezvous` or `device`, announced by the packer (protocol rule P24).

    Its members never change.
    """

    update: Name
    """Name of the update, never used again by any packer of the run."""
    process_group: Name
    """Name of the process group; changes if members change or an update has failed. The trainer is rank 0, members
    follow in order."""
    policy: PolicyVersion
    members: Listed[WeightMember]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the process group, the trainer's included."""
        return 1 + sum(member.num_ranks for member in self.members)

    def names(self, boot_id: str) -> bool:
        """Return whether the process with this boot id is a member."""
        return any(member.boot_id == boot_id for member in self.members)

    def has_rank(self, boot_id: str) -> bool:
        """Return whether a member has ranks in the process group, and does not map the trainer's copy."""
        return any(member.boot_id == boot_id and member.num_ranks for member in self.members)

    def first_rank(self, boot_id: str) -> int:
        """Return the first rank of a member in the process group.

        Raises:
            KeyError: the process is no member.
        """
        # rank 0 is the trainer
        rank = 1
        for member in self.members:
            if member.boot_id == boot_id:
                return rank
            rank += member.num_ranks
        raise KeyError(boot_id)


class UpdateFailure(Frozen):
    """Failed weight update, reported by a member or the trainer."""

    update: Name
    missed: Listed[Name]
    """Boot ids of the engines at fault, as far as known: in the trainer's report the members that missed the update, in
    an engine's report at most the engine itself."""
    detail: Words
    """Sentence for people, with the cause."""


class CheckpointInfo(Frozen):
    """Checkpoint that a trainer rank has read back and found intact."""

    step: int
    chain: Name
    """Last digest in the chain of witnesses (protocol rule P20), equal to the ledger's for a usable checkpoint."""


class StepReport(Frozen):
    """Measurements of one trainer rank in one step."""

    step: int
    values: dict[str, float]
    """Plain numbers by name, as in `metrics.jsonl`."""
    weights: str = ""
    """Digest of the weights that the step produced, as published; empty if none was."""


class EngineAddress(Frozen):
    """Live engine, as listed in `Neighbours`."""

    name: Name
    boot_id: Name
    url: Address
    """URL of the completions API; empty while the engine starts."""


class RewardAddress(Frozen):
    """Live reward actor, as listed in `Neighbours`."""

    name: Name
    boot_id: Name
    address: Address
    """Socket address for groups."""


class EnginePeer(EngineAddress):
    """Engine that accepts requests for completions, as told to rollout actors."""

    policy: PolicyVersion
    load: int
    """Number of completions running or waiting at the engine, at most `limits.LOAD_SHOWN`."""


class RewardPeer(RewardAddress):
    """Reward actor that accepts groups, as told to rollout actors."""

    load: int
    """Number of groups held and not yet scored, at most `limits.LOAD_SHOWN`."""


class Neighbours(Message):
    """Live engines and reward actors: the part of a directive that is equal for all rollout actors.

    A message of its own, sent only to a process whose heartbeats do not name this table (protocol rule P6). It changes
    when a process comes, goes or moves; versions and loads are in the directives.
    """

    kind: ClassVar[str] = "neighbours"

    table: Name
    """Digest of the content. Equal tables have equal names, whichever packer has made them."""
    engines: Listed[EngineAddress]
    rewards: Listed[RewardAddress]

    @classmethod
    def of(cls, run: str, engines: list[EngineAddress], rewards: list[RewardAddress]) -> "Neighbours":
        """Return the table of these processes, with its name."""
        rows = [(e.name, e.boot_id, e.url) for e in engines], [(r.name, r.boot_id, r.address) for r in rewards]
        table = hashlib.blake2b(repr((run, *rows)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return cls(run=run, table=table, engines=engines, rewards=rewards)


class ActorTask(Frozen):
    """Long work under way in an actor, for screens."""

    name: Words
    """Verb with its object, e.g. `load model`."""
    done: float
    """Amount that is done."""
    total: float
    """Amount of all work; 0: unknown."""
    unit: Words
    """Unit of both amounts, in the plural; empty: none."""
    since: float
    """Start, in seconds since 1970 on the actor's clock."""


class Heartbeat(Message):
    """Base of the actors' reports to the packer, sent every `bus.beat_interval` seconds and on change."""

    version: ClassVar[int] = 2

    name: Name
    """Name of the actor, e.g. `rollout-0`."""
    boot_id: Name
    """Random id of the process."""
    sequence: int
    """Number of the heartbeat, rising; the packer ignores older ones."""
    phase: ActorPhase
    fingerprint: Name | None = None
    """Fingerprint of all message types, sent until the packer has answered; None afterwards."""
    metrics_url: Address = ""
    term: int = 0
    """Newest term heard from a packer (each start of the packer is a term); 0: none. A packer that reads a newer term
    than its own exits."""
    neighbours: Name = ""
    """Name of the newest `Neighbours` that this process has; empty: none."""
    task: ActorTask | None = None
    """Long work under way; None: none, or none that is told."""

    counters: ClassVar[frozenset[str]] = frozenset({"task"})
    """Fields that change all the time, for which the packer need not be woken."""
    quiet: ClassVar[bool] = False
    """True for kinds whose repetitions need not wake the packer. Trainers and screens are few, and what they are told
    changes without them."""

    @property
    def at_rest(self) -> bool:
        """True if a repetition of this heartbeat only says that its sender is alive."""
        return self.quiet and not any(getattr(self, name).size for name in self.layout.specs)

    def numbered(self, sequence: int) -> Self:
        """Return this heartbeat with another number. All other values are the same objects."""
        # a third of the time of `model_copy`; a message has neither extra nor private values
        other = self.__class__.__new__(self.__class__)
        object.__setattr__(other, "__dict__", self.__dict__ | {"sequence": sequence})
        object.__setattr__(other, "__pydantic_fields_set__", self.__pydantic_fields_set__)
        object.__setattr__(other, "__pydantic_extra__", None)
        object.__setattr__(other, "__pydantic_private__", None)
        return other

    def repeats(self, earlier: "Heartbeat | None", but: frozenset[str] = frozenset()) -> bool:
        """Return whether this heartbeat says what an earlier one of the same process said.

        Args:
            earlier: the earlier heartbeat; None: there is none.
            but: fields that may differ, besides `sequence`. Arrays with rows always count as different.
        """
        if type(earlier) is not type(self):
            return False
        before, arrays = earlier.__dict__, self.layout.specs
        for name, value in self.__dict__.items():
            known = before[name]
            if name in arrays:
                # also if both are the same object, as after `numbered`
                if value.size or known.size:
                    return False
            elif value is not known and name != "sequence" and name not in but and value != known:
                return False
        return True


class RolloutHeartbeat(Heartbeat):
    """Report of a rollout actor."""

    kind: ClassVar[str] = "rollout_heartbeat"
    quiet: ClassVar[bool] = True

    free_slots: int
    """Number of further tickets wanted."""
    failures: Listed[AttemptFailure]
    """Oldest failures that the packer has not confirmed, at most `limits.HEARTBEAT_FAILURES`."""
    holds: arrays.Holds_H
    """Shape (H, 2). Tickets being sampled, and groups kept until the packer releases them (protocol rule P13)."""


class RewardHeartbeat(Heartbeat):
    """Report of a reward actor."""

    kind: ClassVar[str] = "reward_heartbeat"
    quiet: ClassVar[bool] = True
    counters: ClassVar[frozenset[str]] = Heartbeat.counters | {"load", "calls", "scored", "busy_seconds"}

    address: Address
    """Socket address for groups."""
    load: int
    """Number of groups held and not yet scored."""
    failures: Listed[AttemptFailure]
    """Oldest failures that the packer has not confirmed, at most `limits.HEARTBEAT_FAILURES`."""
    holds: arrays.Holds_H
    """Shape (H, 2). Groups received or scored and not yet released by the packer."""
    calls: int = 0
    """Number of calls of reward functions since the start of the process."""
    late_calls: int = 0
    """Number of these calls that took longer than `reward.timeout`."""
    scored: int = 0
    """Number of groups scored since the start of the process."""
    busy_seconds: float = 0.0
    """Seconds in which groups were scored since the start of the process, added up over groups scored at once."""
    notes: Annotated[Listed[Words], Field(max_length=limits.HEARTBEAT_NOTES)] = []
    """Notes for screens on reward functions, e.g. on a function that returns the same value for all completions."""


class TrainerHeartbeat(Heartbeat):
    """Report of a trainer rank."""

    kind: ClassVar[str] = "trainer_heartbeat"

    rank: int
    num_ranks: int
    address: Address
    """Socket address for batches."""
    incarnation: int
    """Number of the gang that the rank is a member of; 0 until the packer has assigned one."""
    next_step: int
    """Step that the rank trains next."""
    checkpoints: Listed[CheckpointInfo]
    """Intact checkpoints that the rank sees."""
    published: Listed[Manifest]
    """Versions of the weights that engines can still receive, oldest first; rank 0 only."""
    reports: Listed[StepReport]
    """Oldest measurements of steps that the directive has not confirmed as recorded."""
    received: arrays.Int64_K
    """Shape (K,). Steps whose batch the rank has."""
    failure: Reason = ""
    """Reason why the run can't continue, to be told to all actors; empty: none."""
    failed_update: UpdateFailure | None = None
    """Last update that failed at this rank."""
    device: DeviceUse = "free"
    """Use of the device that engines share, with `up.colocate: turns`; else always free."""


class InferenceHeartbeat(Heartbeat):
    """Report of an inference actor: address, served policy and load of its engine."""

    kind: ClassVar[str] = "inference_heartbeat"
    quiet: ClassVar[bool] = True
    counters: ClassVar[frozenset[str]] = Heartbeat.counters | {"load", "generated_tokens", "busy_seconds"}

    url: Address
    """URL of the completions API; empty while the engine starts."""
    engine_state: EngineState
    policy: PolicyVersion | None
    """Policy served; None if the engine serves none."""
    load: int
    """Number of completions running or waiting."""
    generated_tokens: int
    """Number of tokens sampled since the start of the process."""
    busy_seconds: float = 0.0
    """Seconds of the engine's work since the start of the process."""
    holds_two_versions: bool
    """True if running requests finish under their version after an update (adapters)."""
    update_seconds: dict[str, float]
    """Seconds of the last weight update by part: pause, wire, load."""
    weight_ranks: int = 0
    """Number of ranks in an update's process group; 0: the engine takes part in no update."""
    weight_place: Name = ""
    """Machine and device on which the engine receives weights, in channel `device`; see `Manifest.place`."""
    failed_update: UpdateFailure | None = None
    """Last update that failed at this engine."""
    update_progress: int = 0
    """Counter that grows while data of the current update arrive. The packer gives up an update without progress."""
    error: Words = ""
    """Cause of the engine's last trouble, for people; empty: none."""
    turn: int = 0
    """Newest `InferenceDirective.turn` that the engine has followed."""
    holds_device: bool = False
    """Whether the engine has memory of the device that it shares with the trainer (`up.colocate: turns`)."""


class ObserverHeartbeat(Heartbeat):
    """Report of a process that only watches the run (`actors up`, `actors top`)."""

    kind: ClassVar[str] = "observer_heartbeat"


class Directive(Message):
    """Base of the packer's answers to heartbeats: the absolute state of the run."""

    version: ClassVar[int] = 2

    term: int
    """Number of the packer's start. Receivers drop directives of an older term (protocol rule P2)."""
    phase: RunPhase
    step: int
    """Number of steps trained by all ranks in the current lineage."""
    max_steps: int
    refusal: Reason = ""
    """Reason why the packer refuses this process, which must then exit; empty: not refused."""


class RolloutDirective(Directive):
    """Directive for a rollout actor: new tickets, engines and reward actors to use, and groups to release."""

    kind: ClassVar[str] = "rollout_directive"
    version: ClassVar[int] = 4
    apart: ClassVar[str] = "neighbours"
    loads: ClassVar[str] = "neighbour_loads"

    tickets: Listed[Ticket]
    """Tickets of this rollout actor that its heartbeat does not name, at most `limits.DIRECTIVE_TICKETS`. Further
    tickets follow once a heartbeat names these (protocol rule P9)."""
    neighbours: Neighbours
    """All live engines and reward actors, including processes that accept no new work: running requests are still
    answered, and groups held there still scored."""
    policies: Listed[PolicyVersion]
    """Policies that engines serve, each once: the newest `limits.POLICIES_SHOWN`."""
    engine_policies: arrays.Int8_E
    """Shape (E,), per engine of `neighbours`: place of its policy in `policies`; −1: accepts no new requests."""
    open_rewards: arrays.UInt8_R
    """Shape (R,), per reward actor of `neighbours`: 1 if it accepts new groups, else 0."""
    scoring: arrays.Holds_K
    """Shape (K, 2). Holds of this rollout actor named by a live reward actor: these groups have arrived."""
    release: arrays.Holds_H
    """Shape (H, 2). Holds to discard: settled, dropped, or given to another holder."""
    neighbour_loads: arrays.Int16_L
    """Shape (E + R,). Completions running or waiting at each engine, then groups held by each reward actor and not yet
    scored; at most `limits.LOAD_SHOWN`."""

    def check(self) -> None:
        """Check that policies and loads are those of the processes in `neighbours`."""
        shown = (len(self.engine_policies), len(self.open_rewards), len(self.neighbour_loads))
        engines, rewards = len(self.neighbours.engines), len(self.neighbours.rewards)
        if shown != (engines, rewards, engines + rewards):
            raise ValueError(
                f"values of {shown} engines, reward actors and both, and neighbours lists {engines} and {rewards}"
            )
        if self.engine_policies.size and int(self.engine_policies.max()) >= len(self.policies):
            raise ValueError(f"engine_policies: a place beyond the {len(self.policies)} of policies")

    @property
    def engines(self) -> list[EnginePeer]:
        """Engines that accept new requests."""
        engines = self.neighbours.engines
        loads = self.neighbour_loads[: len(engines)].tolist()
        shown = zip(engines, self.engine_policies.tolist(), loads, strict=True)
        return [
            EnginePeer(name=e.name, boot_id=e.boot_id, url=e.url, policy=self.policies[place], load=load)
            for e, place, load in shown
            if place >= 0
        ]

    @property
    def rewards(self) -> list[RewardPeer]:
        """Reward actors that accept new groups."""
        loads = self.neighbour_loads[len(self.neighbours.engines) :].tolist()
        shown = zip(self.neighbours.rewards, self.open_rewards.tolist(), loads, strict=True)
        return [
            RewardPeer(name=r.name, boot_id=r.boot_id, address=r.address, load=load)
            for r, is_open, load in shown
            if is_open
        ]

    @property
    def live_engines(self) -> list[str]:
        """Boot ids of all live engines."""
        return [engine.boot_id for engine in self.neighbours.engines]

    @property
    def live_rewards(self) -> list[str]:
        """Boot ids of all live reward actors."""
        return [reward.boot_id for reward in self.neighbours.rewards]


class RewardDirective(Directive):
    """Directive for a reward actor."""

    kind: ClassVar[str] = "reward_directive"

    packer_address: Address
    """Socket address for scored groups."""
    release: arrays.Holds_H
    """Shape (H, 2). Holds to discard: settled, dropped or failed."""


class TrainerDirective(Directive):
    """Directive for a trainer rank. All ranks form a gang, which starts and exits together (protocol rule P19)."""

    kind: ClassVar[str] = "trainer_directive"

    order: TrainerOrder
    incarnation: int
    """Number of the gang; 0 for a process that is no member."""
    lineage: int
    """Number of the trainer's start, part of every policy that the gang publishes."""
    checkpoint: int
    """Step of the checkpoint to start from; 0: the model as configured."""
    recorded_step: int
    """Last step whose measurements are recorded; reports up to this step need not be sent again."""
    keep_version: int
    """Oldest published version that may still be requested."""
    update: WeightUpdate | None = None
    """Update for rank 0 to broadcast now; None: none."""
    has_turn: bool = True
    """False: the rank must not begin to load a model on the device, which engines use (`up.colocate: turns`)."""


class InferenceDirective(Directive):
    """Directive for an inference actor: the version to serve."""

    kind: ClassVar[str] = "inference_directive"

    update_id: int
    """Number of the target, rising with each change."""
    manifest: Manifest | None
    """Version to serve; None: none is published."""
    update: WeightUpdate | None = None
    """Update that brings the manifest's version; None: not announced yet, or files that engines read by themselves."""
    trainer_ready: bool = False
    """True if the living gang has published, and so holds the memory of a step. An engine on a GPU of the trainer
    starts only then."""
    turn: int = 0
    """Number of the turn on devices that trainer and engines share; 0: no turns."""
    has_turn: bool = True
    """False: the engine gives the memory of its cache back, and samples nothing until its next turn."""


class ObserverDirective(Directive):
    """Directive for an observer, and for a process that is refused or waits to be admitted."""

    kind: ClassVar[str] = "observer_directive"

    progress: dict[str, Any]
    """Progress of the run as plain values, for screens."""
    name_taken: bool = False
    """True if the refusal is for the process's name only, which another process may free later."""
