"""Keys of the actors that sample, score and pack groups, and the number of processes (`up`)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas import limits
from schemas.config.advantages import AdvantageConfig, NormConfig, ZScoreAdvantageConfig
from schemas.config.base import Section
from schemas.config.data import RewardFunctionConfig, ShapingConfig, StepRewardConfig
from schemas.config.difficulty_pools import DifficultyPoolsConfig
from schemas.config.filters import CompletionFilterConfig
from schemas.config.resume_classes import Free, Identity, Repack
from schemas.config.sampling import SamplingParams

StopText = Annotated[str, Field(min_length=1, max_length=limits.HTTP_STOP_CHARACTERS)]
"""Text that ends a completion."""


class TemperatureScheduleConfig(Section):
    """Schedule of the sampling temperature over the steps, from `rollout.temperature` to `end`.

    Each token keeps the temperature that it was sampled at; logprobs are of the distribution at that temperature.
    """

    type: Free[Literal["linear", "cosine"]]
    """Shape of the schedule: a straight line or half a cosine (Surogate: temp_scheduler.type)."""
    end: Free[float] = Field(gt=0)
    """Temperature at the last step of the schedule and at all later steps."""
    steps: Free[int | None] = Field(None, ge=1)
    """Number of steps of the schedule. Empty: `trainer.max_steps`."""


class SessionsConfig(Section):
    """HTTP server of each rollout actor on which agents are recorded (`environments[].type: agent`)."""

    host: Free[str] = "127.0.0.1"
    """Address to bind. Agents on other machines need one that they reach; a session's key is all that they must show,
    so use TLS there."""
    port: Free[int] = Field(0, ge=0, le=65535)
    """Port to bind. 0: any free one, which suits several rollout actors on a machine; services of `external` agents
    need a known one."""
    advertise: Free[str] = ""
    """Host name or address that agents are given. Empty: `host`."""
    tls_cert: Free[str] = ""
    """File of the TLS certificate (PEM). Empty: plain HTTP."""
    tls_key: Free[str] = ""
    """File of the private key of `tls_cert`. Set both or none."""
    admin_key_env: Free[str] = ""
    """Name of the environment variable with the key by which services take trajectories (`/rl/start_session`).
    Required for `external` agents unless `host` is a loopback address."""

    @model_validator(mode="after")
    def _tls_whole(self) -> "SessionsConfig":
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key: set both or none")
        return self


class RolloutConfig(SamplingParams):
    """Sampling: group size, sampling parameters, time limits. A group is all completions sampled for one prompt."""

    # the texts and finish reasons of a group are lists of a message, whose length is bounded
    group_size: Identity[int] = Field(16, ge=1, le=limits.LIST_ITEMS)
    """Completions per prompt (TRL: num_generations; Surogate: rollouts_per_example)."""
    max_tokens: Free[int] = Field(512, ge=1)
    """Maximum number of new tokens per completion; below `packer.sequence_len`, which holds the prompt too."""
    # above 0, unlike in evaluations: the completions of a greedy group would all be equal, with advantage 0
    temperature: Free[float] = Field(1.0, gt=0)
    """Sampling temperature of train groups. Logprobs are of the distribution at this temperature, in engine and
    trainer. Evaluations have `eval.temperature`."""
    temperature_schedule: Free[TemperatureScheduleConfig | None] = None
    """Course of the temperature over the run. Empty: constant."""
    stop: Free[list[StopText]] = Field([], max_length=limits.HTTP_STOPS)
    """Texts that end a completion, in evaluations too (ms-swift: stop_words). The tokens stay as they were sampled, up
    to the one that completes the text; reward functions see the completion without the text. Such a completion counts
    as ended (`stop`), not as cut off, and its ratio is unbiased."""
    ignore_eos: Free[bool] = False
    """Sampling beyond the end of sequence, in training: each completion ends at `max_tokens`, or at a text of `stop`
    (AReaL: ignore_eos). The distribution stays the model's, so the ratio is unbiased."""
    max_concurrent_groups: Free[int] = Field(16, ge=1)
    """Groups sampled at once by each rollout actor."""
    group_timeout: Free[float] = Field(300.0, gt=0)
    """Seconds from the acceptance of a ticket (the order to sample one group) until the group is sampled and a reward
    actor has it. After that the attempt fails as `timeout` and the group is sampled again. After three failed attempts
    the group is dropped (protocol rules P11 and P12)."""
    completion_retries: Free[int] = Field(2, ge=0)
    """Number of times that a failed request to an engine is repeated before the attempt at the whole group fails
    (protocol rule P11)."""
    sessions: Free[SessionsConfig] = SessionsConfig()
    """Server of agents' sessions; started where an environment is an agent."""


class RewardConfig(Section):
    """Scoring: reward functions, shaping, advantages, masks, time limits."""

    functions: Identity[list[RewardFunctionConfig]] = []
    """Reward functions. A completion's reward is their weighted sum, with the rewards of its environment; a function
    that returns None for a completion is left out of its sum. May be empty if all environments give rewards."""
    shaping: Identity[ShapingConfig] = ShapingConfig()
    """Shaping of the weighted sum of rewards. Has no effect on advantage `gdpo`, which is computed from the rewards of
    each function."""
    none_as_zero: Identity[bool] = False
    """Reward of a completion for which every function returned None. `true`: 0 (ms-swift). `false`: unscorable, with
    advantage 0 and left out of every mean (TRL)."""
    steps: Identity[StepRewardConfig | None] = None
    """Function that rewards steps inside a completion (process rewards). Required for advantage `process`, possible for
    `gae`, refused for all others. Empty: none."""
    advantage: Identity[AdvantageConfig] = ZScoreAdvantageConfig(std="population", eps=1e-8)
    """Formula from rewards to advantages. Default: as in TRL's AsyncGRPOTrainer."""
    adv_norm: Identity[NormConfig | None] = None
    """Normalisation of the advantages over the loss tokens of the step, after all other changes (AReaL: adv_norm).
    Empty: none."""
    filters: Identity[list[CompletionFilterConfig]] = []
    """Filters that count unfit completions or mask them out of the loss."""
    mask_truncated_completions: Identity[bool] = False
    """Masking of completions cut off at `rollout.max_tokens`: their tokens leave the loss, their rewards stay in the
    baseline (TRL's name; ms-swift: overlong_filter)."""
    mask_no_eos_with_zero: Identity[bool] = False
    """Reward 0, set after normalisation of the rewards, for completions cut off at `rollout.max_tokens` (AReaL). Their
    advantage is then 0, except for what `adv_norm` and a KL in the reward add; their tokens stay in the loss. Not with
    advantage `process`."""
    timeout: Free[float] = Field(300.0, gt=0)
    """Time limit in seconds for all reward functions on one group. The functions of `steps` and of advantage `custom`
    have the same limit, each for itself. A late function is called again `timeout_retries` times."""
    timeout_retries: Free[int] = Field(1, ge=0)
    """Number of further calls of a late function, each with the full `timeout`."""
    on_timeout: Free[Literal["none", "zero", "fail"]] = "none"
    """Result of a function that is late in all calls, in training. `none`: None for each completion. `zero`: reward 0.
    `fail`: the attempt fails as `reward_timeout` and the group is sampled again. Evaluations always use `fail`."""
    on_error: Free[Literal["retry", "fail"]] = "retry"
    """Reaction to a function that raises, or that returns anything but a number or None per completion. `retry`: the
    attempt fails and the group is sampled again; after three failed attempts it is dropped as `poison`. `fail`: the run
    fails at the first error, as in TRL."""
    max_concurrent_groups: Free[int] = Field(8, ge=1)
    """Groups scored at once by each reward actor."""
    max_groups_per_process: Free[int] = Field(0, ge=0)
    """Number of groups after which a reward actor is replaced by a new process, for functions that leak memory. 0:
    never."""

    @property
    def steps_are_turns(self) -> bool:
        """True if rewards of steps are those that environments give to turns, so that no function is asked."""
        return self.steps is not None and self.steps.path is None

    @property
    def longest_seconds(self) -> float:
        """Longest time in seconds from the first call of a function on a group until the group is scored or fails."""
        # one after the other: the functions, then `steps`, then the advantage, which reads the rewards
        rounds = 1 + (self.steps is not None) + (self.advantage.type == "custom")
        # a call of a worker may have to wait for the worker's successor
        starts = max((one.load_timeout for one in self.functions if one.has_workers), default=0.0)
        starts += self.steps.load_timeout if self.steps and self.steps.python else 0.0
        return (rounds * self.timeout + starts) * (1 + self.timeout_retries)

    @model_validator(mode="after")
    def _steps_for_who_uses_them(self) -> "RewardConfig":
        if self.advantage.type == "process" and self.steps is None:
            raise ValueError("advantage process needs steps: {path: file.py:function}")
        if self.advantage.type == "process" and self.mask_no_eos_with_zero:
            raise ValueError("mask_no_eos_with_zero: advantage process has no reward at the end; remove one of the two")
        if self.advantage.type not in ("process", "gae") and self.steps is not None:
            raise ValueError(f"steps are used by advantage process and gae, not by {self.advantage.type}")
        return self


class PackerConfig(Section):
    """Choice of the groups that are sampled and trained, and their packing into steps and micro-batches."""

    # a batch has a list with a digest per group
    groups_per_step: Identity[int] = Field(8, ge=1, le=limits.LIST_ITEMS)
    """Groups in every training step; a step has groups_per_step × `rollout.group_size` completions."""
    sequence_len: Repack[int] = Field(2048, ge=2)
    """Tokens of a packed micro-batch, and the maximum length of a sample (prompt and completion)."""
    count_prompts: Repack[Literal["auto", "once", "per_completion"]] = "auto"
    """Count of a group's prompt in the tokens of a micro-batch. `per_completion`: once for each completion. `once`:
    once in all, as the row holds it, if the step then has fewer micro-batches. `auto`: once if `model.device` is cuda,
    else per_completion. With `once`, the copies of prompts that `model.attention` padded and flash make of a layer may
    be many times the row."""
    order: Identity[Literal["ordinal", "arrival"]] = "ordinal"
    """Order in which steps take groups. `ordinal`: as issued, so that a slow group holds up its step. `arrival`: as
    scored groups arrive, so that a slow group trains in a later step (protocol rule P16), and a slow environment leaves
    a fast one its rate (docs/reference/sampling.md)."""
    max_async_level: Free[int] = Field(1, ge=0)
    """Steps that sampling may run ahead of training (AReaL: max_head_offpolicyness). 0: sampling and training
    alternate, and every token is sampled by the weights that its step starts from."""
    strict_async_level: Free[bool] = False
    """Sampling of each step by exactly the weights `max_async_level` steps older than the weights at the step's start
    (prime-rl, Surogate): engines take no newer version before all groups of the older one are scored. False: engines
    take each new version at once, and the lag is at most the level. The first steps are sampled by version 0, and a
    group that replaces a dropped one may be newer (protocol rule P22)."""
    max_off_policy_steps: Free[int] = Field(8, ge=0)
    """Maximum lag of a group, at least `max_async_level`. The lag is the number of steps trained between the weights
    that sampled the group's oldest token and the step that trains the group. A group with a larger lag is dropped as
    `stale`, and its example is sampled again (protocol rule P17)."""
    oversampling_factor: Free[float] = Field(1.0, ge=1)
    """Factor on the groups sampled per step, with order `arrival` only: up to ceil(groups_per_step × factor) groups are
    ordered for each step. The first to arrive are trained; the surplus trains in later steps, so `max_off_policy_steps`
    also limits the surplus."""
    dynamic_sampling: Free[bool] = False
    """Dropping of groups in which all rewards are equal, as `zero_variance`. Another example is sampled in the group's
    place (DAPO; ms-swift: dynamic_sample)."""
    online_difficulty_filtering: Free[bool] = False
    """Dropping of groups with a mean reward of exactly 1 (`too_easy`) or exactly 0 (`too_hard`). Another example is
    sampled in the group's place (prime-rl)."""
    filter_zero_advantages: Identity[bool] = False
    """Exclusion of tokens with advantage 0 from the loss and its denominator, and so of whole groups with equal
    rewards. No other groups are sampled in their place (prime-rl's default)."""
    max_resample_times: Free[int] = Field(3, ge=0)
    """Maximum number of groups that `dynamic_sampling` and `online_difficulty_filtering` drop one after the other for
    the same place in a step. The next group is trained with any rewards (protocol rule P15)."""
    max_drop_fraction: Free[float] = Field(0.5, gt=0, le=1)
    """Limit of the share of groups dropped as `poison` (three failed attempts each) among the last 100. Above the limit
    the run fails, since the other groups are no fair sample of the data. 1: never."""
    memory_bytes: Free[int] = Field(4 << 30, ge=1)
    """Bytes of scored groups that the packer keeps in memory until they are trained. Further groups are in the ledger
    alone, and are read when their step is composed. A group takes about 13 bytes per token. The batches of a step come
    on top."""
    pools: Free[DifficultyPoolsConfig | None] = None
    """Difficulty pools: easy and hard examples are set aside. Empty: none."""

    @model_validator(mode="after")
    def _surplus_is_of_use(self) -> "PackerConfig":
        if self.oversampling_factor > 1 and self.order == "ordinal":
            raise ValueError(
                f"oversampling_factor: {self.oversampling_factor} with order ordinal only makes groups older, since "
                "each step waits for its own ones; set order: arrival, or 1.0"
            )
        return self
