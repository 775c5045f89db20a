"""Keys of the actors: rollout, reward, packer, trainer, inference, and the number of processes (`up`)."""

from typing import Literal

from pydantic import Field, model_validator

from schemas import limits
from schemas.config.advantages import AdvantageConfig, NormConfig, ZScoreAdvantageConfig
from schemas.config.base import Section
from schemas.config.data import RewardFunctionConfig, ShapingConfig, StepRewardConfig
from schemas.config.difficulty_pools import DifficultyPoolsConfig
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.engines import EngineConfig
from schemas.config.filters import CompletionFilterConfig
from schemas.config.mismatch import MismatchConfig
from schemas.config.model import Dtype
from schemas.config.noise import NoiseConfig
from schemas.config.objective import ObjectiveConfig
from schemas.config.optimizers import AdamWConfig, OptimizerConfig
from schemas.config.resume_classes import Free, Identity, Repack
from schemas.config.sampling import SamplingParams
from schemas.config.server_pool import ServerPoolConfig


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


class RolloutConfig(SamplingParams):
    """Sampling: group size, sampling parameters, time limits. A group is all completions sampled for one prompt."""

    group_size: Identity[int] = Field(16, ge=1, le=limits.LIST_ITEMS)
    """Completions per prompt (TRL: num_generations; Surogate: rollouts_per_example)."""
    max_tokens: Free[int] = Field(512, ge=1)
    """Maximum number of new tokens per completion; below `packer.sequence_len`, which holds the prompt too."""
    temperature: Free[float] = Field(1.0, gt=0)  # greedy groups would be all equal
    """Sampling temperature of train groups. Logprobs are of the distribution at this temperature, in engine and
    trainer. Evaluations have `eval.temperature`."""
    temperature_schedule: Free[TemperatureScheduleConfig | None] = None
    """Course of the temperature over the run. Empty: constant."""
    max_concurrent_groups: Free[int] = Field(16, ge=1)
    """Groups sampled at once by each rollout actor."""
    group_timeout: Free[float] = Field(300.0, gt=0)
    """Seconds from the acceptance of a ticket (the order to sample one group) until the group is sampled and a reward
    actor has it. After that the attempt fails as `timeout` and the group is sampled again. After three failed attempts
    the group is dropped (protocol rules P11 and P12)."""
    completion_retries: Free[int] = Field(2, ge=0)
    """Number of times that a failed request to an engine is repeated before the attempt at the whole group fails
    (protocol rule P11)."""


class RewardConfig(Section):
    """Scoring: reward functions, shaping, advantages, masks, time limits."""

    functions: Identity[list[RewardFunctionConfig]] = Field(min_length=1)
    """Reward functions. A completion's reward is their weighted sum; a function that returns None for a completion is
    left out of its sum."""
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
    def longest_seconds(self) -> float:
        """Longest time in seconds from the first call of a function on a group until the group is scored or fails."""
        rounds = 1 + (self.steps is not None) + (self.advantage.type == "custom")  # the three run one after the other
        return rounds * self.timeout * (1 + self.timeout_retries)

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

    groups_per_step: Identity[int] = Field(8, ge=1, le=limits.LIST_ITEMS)
    """Groups in every training step; a step has groups_per_step × `rollout.group_size` completions."""
    sequence_len: Repack[int] = Field(2048, ge=2)
    """Tokens of a packed micro-batch, and the maximum length of a sample (prompt and completion)."""
    order: Identity[Literal["ordinal", "arrival"]] = "ordinal"
    """Order in which steps take groups. `ordinal`: as issued, so that a slow group holds up its step. `arrival`: as
    scored groups arrive, so that a slow group trains in a later step (protocol rule P16)."""
    max_async_level: Free[int] = Field(1, ge=0)
    """Steps that sampling may run ahead of training (AReaL: max_head_offpolicyness). 0: sampling and training
    alternate, and every token is sampled by the weights that its step starts from."""
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


class CheckpointConfig(Section):
    """Checkpoints in Hugging Face format, or in PEFT format with `model.lora`."""

    interval: Free[int] = Field(50, ge=1)
    """Steps between two checkpoints. The last step is always saved."""
    keep_last: Free[int] = Field(3, ge=2)
    """Number of newest checkpoints kept. A run can resume from each of these."""
    keep_interval: Free[int | None] = Field(None, ge=1)
    """Steps between two checkpoints kept for good, in addition to `keep_last`. A run can resume from the newest
    `keep_last` checkpoints only, since the ledger has no groups for older ones. Empty: none."""
    timeout: Free[float] = Field(300.0, gt=0)
    """Seconds of retries while the last checkpoint can't be written, or the checkpoint folder can't be claimed at a
    start (full disk). After that the run fails."""


class TeacherConfig(Section):
    """Teacher: a frozen model with the policy's vocabulary, towards which a loss pulls the policy."""

    path: str = Field(min_length=1)
    """Name on the Hugging Face hub, or directory, looked up like `model.path`."""
    dtype: Dtype = "bfloat16"
    """Precision of the teacher's weights and computation."""


class TrainerConfig(ObjectiveConfig):
    """Training: objective, updates per step, ranks, learning rate, optimizer, checkpoints."""

    max_steps: Free[int] = Field(ge=1)
    """Number of training steps of the run."""
    num_iterations: Identity[int] = Field(1, ge=1)
    """Number of passes over the batch of a step (GRPO's μ, as in TRL and ms-swift)."""
    num_minibatches: Identity[int] = Field(1, ge=1)
    """Parts of a step's batch, each with an optimizer update of its own. Parts are whole groups if num_minibatches
    divides `packer.groups_per_step`, else whole completions. A step has num_iterations × num_minibatches updates, all
    at the step's learning rate."""
    teacher: Identity[TeacherConfig | None] = None
    """Teacher model, for loss `ref_kl`, `teacher_tau`, `distillation` and `environments[].ref_kl_weight`. Empty:
    none."""
    num_ranks: Repack[int] = Field(1, ge=1, le=1024)
    """Number of trainer processes (ranks). Each trains its share of a step's samples; all need the same
    `output_dir`."""
    sharding: Free[Literal["none", "fsdp"]] = "none"
    """Distribution of the model over ranks. `none`: each rank has the whole model (data parallel), and a replayed step
    has the same bits. `fsdp`: each rank has a part of every weight, gradient and optimizer state, and gathers a layer
    for its computation (FSDP2); not with optimizer adamw_8bit, `model.quantization` or `sft`."""
    learning_rate: Free[float] = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler: Free[Literal["constant", "linear", "cosine"]] = "constant"
    """Learning rate schedule after the warm-up. `linear` and `cosine` fall to learning_rate × min_lr_ratio at
    max_steps."""
    warmup_steps: Free[int] = Field(0, ge=0)
    """Steps of the linear rise of the learning rate from 0 to `learning_rate`."""
    min_lr_ratio: Free[float] = Field(0.0, ge=0, le=1)
    """Final learning rate relative to `learning_rate`, for schedules `linear` and `cosine`."""
    optimizer: OptimizerConfig = AdamWConfig()
    """Optimizer and its parameters. A map without `type` is AdamW."""
    max_grad_norm: Free[float] = Field(1.0, gt=0)
    """Maximum global norm of the gradients over all ranks; larger gradients are scaled down."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Interval and number of checkpoints."""
    gang_timeout: Free[float] = Field(20.0, gt=0)
    """Seconds for all ranks to find each other at a start. After that all ranks start over (protocol rule P19)."""
    mismatch: MismatchConfig = MismatchConfig()
    """Limits of the difference between the logprobs of trainer and engine."""


class InferenceConfig(Section):
    """Inference: the engine and its HTTP address."""

    engine: EngineConfig = EmbeddedEngineConfig()
    """Engine that serves the policy."""
    pool: Free[ServerPoolConfig | None] = None
    """Pool of vLLM or SGLang servers that join and leave during the run, with an inference actor for each. Empty:
    none."""
    noise: Free[NoiseConfig | None] = None
    """Noise on the norms of the served policy (QeRL), with engines `embedded` and `vllm`. Empty: none."""
    host: Free[str] = "127.0.0.1"
    """Address that the HTTP server of an inference actor binds to. Beyond loopback, also set `api_key_env`."""
    advertise_host: Free[str | None] = None
    """Name or address under which other machines reach the HTTP server. Empty: `host`."""
    port: Free[int] = Field(0, ge=0, le=65535)
    """Port of inference-0; inference-1 takes the next port, and so on. 0: any free port; required with `pool`."""
    request_timeout: Free[float] = Field(300.0, gt=0)
    """Seconds until a request to an engine must be answered, all its completions included."""
    api_key_env: Free[str] = ""
    """Name of the environment variable with the API key of requests. Empty: requests need no key."""
    tls_cert: Free[str] = ""
    """File of the TLS certificate (PEM) of the HTTP server; clients trust this certificate. Empty: plain HTTP."""
    tls_key: Free[str] = ""
    """File of the private key of `tls_cert`, read by inference actors only. Set both or none."""

    @property
    def attached(self) -> bool:
        """True if engines use existing servers; False if each actor starts what its engine needs."""
        return self.pool is not None or self.engine.attached

    @model_validator(mode="after")
    def _tls_whole(self) -> "InferenceConfig":
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key: set both or none")
        return self


class UpConfig(Section):
    """Processes that `actors up` starts on this machine, and its limit of restarts."""

    rollout: Free[int] = Field(1, ge=1)
    """Number of rollout actors."""
    reward: Free[int] = Field(1, ge=1)
    """Number of reward actors."""
    inference: Free[int] = Field(1, ge=1)
    """Number of inference actors, one engine each."""
    torch_threads: Free[dict[Literal["trainer", "inference"], int]] = {}
    """CPU threads of each trainer and inference process. Default: all cores, divided evenly among these processes."""
    max_restarts: Free[int] = Field(5, ge=0)
    """Restarts of one actor in a row before the run fails. A life of more than 60 s resets the count."""

    @model_validator(mode="after")
    def _threads_positive(self) -> "UpConfig":
        if any(threads < 1 for threads in self.torch_threads.values()):
            raise ValueError("torch_threads: at least 1 thread per process")
        return self
