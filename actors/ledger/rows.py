"""Data classes of the ledger: groups, steps, settings, and the changes of a round.

States of a group (P21); each arrow is one commit:

    issued ──▶ settled ──▶ composed ──▶ trained ──▶ durable
       │           │           ▲            │           │
       │           │           └────────────┴───────────┘  a new lineage starts from an older checkpoint
       └───────────┴─────▶ dropped (poison, stale, eval_void, forked, or the reason of a group filter)

A fork drops all groups that no step up to its checkpoint has trained, composed and trained groups included.

Train ordinals are 0, 1, 2, …; eval ordinals are −1, −2, …, so that an int64 names any group and train ordinals have no
gap.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from schemas.config.actors import TemperatureScheduleConfig
from schemas.config.sampling import SamplingParams
from schemas.messages import DroppedOrdinal, PolicyVersion, Purpose

MAX_FAILURES = 3
"""Failed attempts after which an ordinal is dropped as poison (P11)."""
DROP_WINDOW = 100
"""Number of newest finished train groups over which the share of poison is measured."""
DEATHS_UNTIL_ALONE = 2
"""Deaths of holders after which an ordinal is issued alone (P11)."""


class GroupState(StrEnum):
    """State of a group (P21)."""

    ISSUED = "issued"
    """Has an ordinal; is sampled, scored, or waits for a rollout actor."""
    SETTLED = "settled"
    """Scored and stored; not in a step yet."""
    COMPOSED = "composed"
    """Part of a composed step, not trained by all ranks yet."""
    TRAINED = "trained"
    """Trained by all ranks; no good checkpoint has the step yet."""
    DURABLE = "durable"
    """Trained, and in a good checkpoint."""
    DROPPED = "dropped"
    """Never to be trained, for a counted reason."""


class AttemptOutcome(StrEnum):
    """Outcome of a group's newest attempt (P11): open or ended, counted as failed or not.

    open ──holder dies──▶ open, or died if the holder held nothing else ──holder comes back──▶ open
    """

    OPEN = "open"
    """Under way, or lost with a holder of several groups; not counted."""
    DIED = "died"
    """Counted as failed, since the holder died while holding nothing else; a copy may still arrive and win."""
    FAILED = "failed"
    """Counted as failed and ended; peers still naming the attempt are told to release the group."""


@dataclass(frozen=True)
class ExampleRef:
    """Reference to an example."""

    environment: str
    """Label of the environment."""
    index: int
    """Number of the example in the environment."""
    key: str
    """Key of the content (`Example.key`), checked against the sampled group."""


@dataclass
class Group:
    """Row of a group in the ledger."""

    ordinal: int
    """Number of the group: ≥ 0 for training, < 0 for evaluation."""
    example: ExampleRef
    """Example to sample."""
    seed: int
    """Sampling seed; completion i has seed + i (P10)."""
    num_completions: int
    """Completions to sample."""
    min_version: int
    """Oldest version allowed to sample the group (P10)."""
    policy: PolicyVersion | None = None
    """Only policy allowed to sample the group of an evaluation; None for training."""
    state: GroupState = GroupState.ISSUED
    """Current state."""
    attempt: int = 0
    """Number of the newest attempt; 0: never given to a holder."""
    # the outcome is a part of its own, not a state: a failed attempt's group is still issued, and may settle late
    outcome: AttemptOutcome = AttemptOutcome.OPEN
    """Outcome of the newest attempt."""
    failures: int = 0
    """Failed attempts (P11)."""
    deaths: int = 0
    """Deaths of holders (P11)."""
    holder: str | None = None
    """Identity of the rollout actor with the group; None: waits to be issued, or has ended."""
    oldest_version: int | None = None
    """Version of the oldest token, from settlement on."""
    arrival: int | None = None
    """Rank in the order of settlement, from settlement on."""
    step: int | None = None
    """Step of the group, from composition on."""
    reason: str | None = None
    """Reason of the drop; None for all other states."""
    origin: int | None = None
    """Ordinal of the dropped group replaced by this group: with the same example after `stale` (P17) or `forked`
    (P23), with another after a group filter (P15)."""
    resamples: int = 0
    """Groups filtered in this place before (P15)."""
    # not the ordinal: drops leave gaps, and a step takes groups by their place among the others
    position: int = 0
    """Number of undropped train ordinals issued before this one; determines the step, and so the temperature."""
    sampled_from: int = 0
    """Version served when the current attempt was issued, or `min_version` after a restart; not stored."""
    issued_at: float = 0.0
    """Time on the packer's clock at which the current attempt was issued; not stored."""

    @property
    def purpose(self) -> Purpose:
        """`train` or `eval`, from the sign of the ordinal."""
        return purpose_of(self.ordinal)

    @property
    def alone(self) -> bool:
        """True if the group may only be issued to a rollout actor without other groups."""
        return self.deaths >= DEATHS_UNTIL_ALONE


def purpose_of(ordinal: int) -> Purpose:
    """Return `train` for ordinals ≥ 0, `eval` for ordinals < 0."""
    return "train" if ordinal >= 0 else "eval"


@dataclass(frozen=True)
class Step:
    """A composed step, committed before the first byte of its batches is sent (P18)."""

    step: int
    """Number of the step, from 1."""
    ordinals: tuple[int, ...]
    """Groups of the step, in order."""
    dropped: tuple[DroppedOrdinal, ...]
    """Train ordinals dropped since the step before."""
    digests: tuple[str, ...]
    """sha256 of each group's payload, in the order of `ordinals`."""
    chain: str
    """Chain of witnesses after this step (P20)."""


@dataclass(frozen=True)
class RewindOrder:
    """Order to start the next gang from the newest good checkpoint (`Machine.rewind`, P23)."""

    at_most: int | None
    """Greatest step of the checkpoint; None: no limit."""
    sample_anew: bool
    """True: groups after the checkpoint are dropped and sampled again, as by a fork. False: the later steps are trained
    again as they were composed."""


@dataclass(frozen=True)
class Rewound:
    """Completed return to an older checkpoint."""

    step: int
    """Step of the checkpoint."""
    sample_anew: bool
    """Value of `RewindOrder.sample_anew`."""
    given_up: int
    """Number of groups dropped as `forked`."""


@dataclass(frozen=True)
class GroupFacts:
    """Facts about a scored group for the machine's decisions; tensors stay outside."""

    ordinal: int
    """Ordinal named by the group."""
    attempt: int
    """Attempt named by the group."""
    example_key: str
    """Key of the sampled example."""
    num_completions: int
    """Completions in the group."""
    oldest_version: int
    """Version of the oldest token."""
    # several: an engine may take new weights between two tokens of a completion
    policies: frozenset[PolicyVersion]
    """Policies of all segments."""
    longest_sample: int
    """Tokens of the longest prompt + completion."""
    digest: str
    """sha256 of the payload."""
    rejected_as: str = ""
    """Reason for which a group filter rejects the group; empty: no filter does."""


@dataclass(frozen=True)
class EvalRule:
    """When and how the examples of an evaluation are sampled."""

    every_steps: int = 0
    """Steps between two evaluations; 0: none in between."""
    at_start: bool = False
    """Evaluation of version 0."""
    at_end: bool = False
    """Evaluation of the last version."""
    completions: int = 1
    """Completions of each example."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    """Sampling parameters."""
    max_tokens: int | None = None
    """Maximum number of new tokens; None: as in training."""

    def is_due(self, version: int, max_steps: int) -> bool:
        """Return whether a version is evaluated."""
        if version == max_steps:
            return self.at_end or (version == 0 and self.at_start)
        return self.at_start if version == 0 else bool(self.every_steps) and version % self.every_steps == 0

    def next_after(self, last: int, max_steps: int) -> int | None:
        """Return the lowest version above `last` to evaluate; None: none is left."""
        due = [0] * self.at_start + [max_steps] * self.at_end  # a bool times a list: the list or []
        if self.every_steps:
            # max_steps itself is a matter of at_end
            periodic = (max(last, 0) // self.every_steps + 1) * self.every_steps
            due += [periodic] * (periodic < max_steps)
        return min((version for version in due if version > last), default=None)


@dataclass(frozen=True)
class Settings:
    """Part of the configuration read by the protocol. Times are in seconds.

    Fields without a docstring have the meaning of the configuration key with the same name.
    """

    groups_per_step: int
    max_steps: int
    group_size: int
    sequence_len: int
    num_ranks: int = 1
    order: Literal["ordinal", "arrival"] = "ordinal"
    max_async_level: int = 1
    max_off_policy_steps: int = 8
    strict_async_level: bool = False
    lease: float = 3.0
    group_timeout: float = 300.0
    reward_timeout: float = 300.0
    weights_timeout: float = 120.0
    turns: bool = False
    """Whether trainer and engines use devices in turns (`up.colocate: turns`)."""
    surplus: int = 0
    """Groups asked for beyond the need of a step (`surplus_groups`)."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of each environment in the training examples."""
    allowance: int = 0
    """Overtaken groups that need no place in the window (`allowance_of`); 0: no fair shares."""
    max_concurrent_groups: int = 16
    """Sampling slots of a rollout actor."""
    max_resample_times: int = 0
    """Groups that filters may drop in one place (P15)."""
    max_drop_fraction: float = 1.0
    """Share of poison among the last 100 groups above which the run fails (P11)."""
    fails_on_reward_error: bool = False
    """True: the first error of a reward function ends the run (`reward.on_error: fail`)."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of train groups; the schedule changes their temperature."""
    temperature_schedule: TemperatureScheduleConfig | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    evaluation: EvalRule = EvalRule()
    """Rule of evaluations without a rule of their own."""
    eval_rules: Mapping[str, EvalRule] = field(default_factory=dict)
    """Rules by the name of the evaluation, which is the label of its examples."""
    keep_steps: int = 0
    min_checkpoints: int = 2
    """Number of kept checkpoints from which on older steps are compacted (P21)."""

    def eval_rule(self, label: str) -> EvalRule:
        """Return the rule of an evaluation."""
        return self.eval_rules.get(label, self.evaluation)


@dataclass
class Changes:
    """Changes of a round of the machine, written in a single transaction before any message of the round is sent."""

    groups: dict[int, Group] = field(default_factory=dict)
    """New and changed rows, by ordinal."""
    steps: list[Step] = field(default_factory=list)
    """Composed steps."""
    # a value replaces the stored one: only what has changed in this round is here
    values: dict[str, Any] = field(default_factory=dict)
    """Single values by key, ready for JSON."""
    gone_groups: list[int] = field(default_factory=list)
    """Compacted ordinals; rows and payloads are deleted."""
    gone_steps: list[int] = field(default_factory=list)
    """Compacted or forked steps; the records are deleted."""
    pools: dict[str, str] = field(default_factory=dict)
    """New difficulty pool by example key, for moved examples; added by the packer's curriculum."""

    def __bool__(self) -> bool:  # a round without changes needs no commit
        return bool(self.groups or self.steps or self.values or self.gone_groups or self.gone_steps or self.pools)
