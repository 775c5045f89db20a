"""The nouns of the ledger: groups, steps, and the settings that rule them.

A group's life (P21); each arrow is one commit:

    issued ──▶ settled ──▶ composed ──▶ trained ──▶ durable
       │           │           ▲            │           │
       │           │           └────────────┴───────────┘  a new lineage starts from an older checkpoint
       └───────────┴─────▶ dropped (poison, stale, eval_void, forked, or the word of a group filter)

Train ordinals are 0, 1, 2, …; eval ordinals −1, −2, …, so that one int64 names any group and train ordinals have no
gap.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from schemas.config.actors import TemperatureScheduleConfig
from schemas.messages import DroppedOrdinal, Policy, Purpose

MAX_FAILURES = 3
"""Failed attempts after which an ordinal is dropped as poison (P11)."""
DEATHS_UNTIL_ALONE = 2
"""Deaths of holders after which an ordinal is issued alone (P11)."""


class GroupState(StrEnum):
    """Where a group stands (P21)."""

    ISSUED = "issued"
    SETTLED = "settled"
    COMPOSED = "composed"
    TRAINED = "trained"
    DURABLE = "durable"
    DROPPED = "dropped"


class Attempt(StrEnum):
    """What is known of a group's newest attempt (P11): whether it may still bring a group, whether it has been counted.

    open ──holder dies──▶ open, or died if it was the only one held ──holder comes back──▶ open
    """

    OPEN = "open"
    DIED = "died"
    """Counted as failed, because its holder died with nothing else in hand; a copy of it may come all the same."""
    FAILED = "failed"
    """Ended: whoever still names it shall let it go."""


@dataclass(frozen=True)
class ExampleRef:
    """An example by environment, number and content key."""

    environment: str
    index: int
    key: str


@dataclass
class Group:
    """One ordinal. `holder` is the identity of the rollout that samples it; None: waiting to be issued (again)."""

    ordinal: int
    example: ExampleRef
    seed: int
    num_completions: int
    min_version: int
    policy: Policy | None = None
    """For evaluations: exactly this policy."""
    state: GroupState = GroupState.ISSUED
    attempt: int = 0
    outcome: Attempt = Attempt.OPEN
    """Of the newest attempt."""
    failures: int = 0
    deaths: int = 0
    holder: str | None = None
    oldest_version: int | None = None
    arrival: int | None = None
    """Rank in the order of settlement."""
    step: int | None = None
    reason: str | None = None
    origin: int | None = None
    """The ordinal in whose place this one is: with its example again if that was stale (P17), with another one if it
    was filtered (P15)."""
    resamples: int = 0
    """Groups that were filtered in this one's place before it (P15)."""
    position: int = 0
    """Of train groups: how many undropped ordinals were issued before it; its step's temperature follows from it."""
    issued_at: float = 0.0
    """Packer's clock when the current attempt was issued; not stored."""

    @property
    def purpose(self) -> Purpose:
        """Train ordinals are ≥ 0, eval ordinals < 0."""
        return purpose_of(self.ordinal)

    @property
    def alone(self) -> bool:
        """Whether it may only be issued to a rollout that holds nothing else."""
        return self.deaths >= DEATHS_UNTIL_ALONE


def purpose_of(ordinal: int) -> Purpose:
    """The sign tells."""
    return "train" if ordinal >= 0 else "eval"


@dataclass(frozen=True)
class Step:
    """A composed step, durable before its first byte leaves (P18). `chain` ends the chain of witnesses (P20)."""

    step: int
    ordinals: tuple[int, ...]
    dropped: tuple[DroppedOrdinal, ...]
    digests: tuple[str, ...]
    chain: str


@dataclass(frozen=True)
class GroupFacts:
    """What the machine needs to know of a scored group; the tensors stay outside."""

    ordinal: int
    attempt: int
    example_key: str
    num_completions: int
    oldest_version: int
    policies: frozenset[Policy]
    longest_sample: int
    digest: str
    rejected_as: str = ""
    """Why a group filter would drop it; empty: it would not."""


@dataclass(frozen=True)
class Settings:
    """The configuration as far as the protocol is concerned. Times in seconds."""

    groups_per_step: int
    max_steps: int
    group_size: int
    sequence_len: int
    num_ranks: int = 1
    order: Literal["ordinal", "arrival"] = "ordinal"
    max_async_level: int = 1
    max_off_policy_steps: int = 8
    lease: float = 3.0
    group_timeout: float = 300.0
    reward_timeout: float = 300.0
    surplus: int = 0
    """Groups asked for beyond a step's."""
    max_resample_times: int = 0
    """Groups that filters may drop in one place (P15)."""
    temperature: float = 1.0
    temperature_schedule: TemperatureScheduleConfig | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    seed: int = 0
    eval_every_steps: int = 0
    eval_at_start: bool = False
    eval_at_end: bool = False
    eval_completions: int = 1
    eval_temperature: float = 0.0
    keep_steps: int = 0


@dataclass
class Changes:
    """What one round of the machine wants written, in one transaction, before anything is said to anybody."""

    groups: dict[int, Group] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    gone_groups: list[int] = field(default_factory=list)
    """Ordinals whose rows and payloads go, since they have been folded."""
    gone_steps: list[int] = field(default_factory=list)
    pools: dict[str, str] = field(default_factory=dict)
    """Pool by example key, of those that have moved; the packer's curriculum adds them."""

    def __bool__(self) -> bool:
        return bool(self.groups or self.steps or self.values or self.gone_groups or self.gone_steps or self.pools)
