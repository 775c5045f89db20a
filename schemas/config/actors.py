"""One section per actor."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.config.advantages import AdvantageConfig, MeanAdvantageConfig
from schemas.config.base import Section
from schemas.config.data import RewardFunctionConfig, ShapingConfig, StepRewardConfig
from schemas.config.engines import VllmEngineConfig
from schemas.config.filters import CompletionFilterConfig
from schemas.config.mismatch import MismatchConfig
from schemas.config.model import Dtype
from schemas.config.noise import NoiseConfig
from schemas.config.objective import ObjectiveConfig
from schemas.config.optimizers import AdamWConfig, OptimizerConfig
from schemas.config.pools import PoolsConfig
from schemas.config.sglang import EnginePoolConfig, SglangEngineConfig


class TemperatureScheduleConfig(Section):
    """From `rollout.temperature` to another one over the steps; each token carries the one it was sampled at."""

    type: Literal["linear", "cosine"]
    """Shape of the course (Surogate: temp_scheduler.type)."""
    end: float = Field(gt=0)
    """Temperature of the last step of the schedule and of all after it."""
    steps: int | None = Field(None, ge=1)
    """Steps of the schedule; those of the run (`trainer.max_steps`) where empty."""


class RolloutConfig(Section):
    """Sampling of groups."""

    group_size: int = Field(16, ge=1)
    """Completions per prompt (TRL: num_generations, Surogate: rollouts_per_example)."""
    max_tokens: int = Field(512, ge=1)
    """New tokens per completion at most."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of train groups; logprobs are those of the tempered distribution."""
    temperature_schedule: TemperatureScheduleConfig | None = None
    """Where the temperature goes from there; constant where empty."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the importance ratio is biased."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most probable tokens; 0: from all, which alone leaves the importance ratio unbiased."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Leave out tokens less probable than this × the most probable one; above 0 the importance ratio is biased."""
    max_concurrent_groups: int = Field(16, ge=1)
    """Groups that one rollout actor samples at once."""
    group_timeout: float = Field(300.0, gt=0)
    """Seconds until an attempt at a group fails as `timeout` (P12)."""
    completion_retries: int = Field(2, ge=0)
    """Tries again, in place, of a request that failed, before the whole attempt fails (P11)."""


class RewardConfig(Section):
    """Scoring of groups and their advantages."""

    functions: list[RewardFunctionConfig] = Field(min_length=1)
    """Summed with their weights; one that returns None for a completion is left out of its sum."""
    shaping: ShapingConfig = ShapingConfig()
    """Of the sum. `gdpo`, which looks at each function, does not see it."""
    none_as_zero: bool = False
    """A completion for which every function returned None has reward 0, as in ms-swift; else it is unscorable, with
    advantage 0 and in no mean, as in TRL."""
    steps: StepRewardConfig | None = None
    """Rewards of steps inside a completion, for the advantages `process` and `gae`."""
    advantage: AdvantageConfig = MeanAdvantageConfig()
    """How rewards become advantages."""
    filters: list[CompletionFilterConfig] = []
    """Completions to count, or to mask out of the loss."""
    mask_truncated_completions: bool = False
    """Mask completions out of the loss that ran into `rollout.max_tokens` (TRL's name; ms-swift: overlong_filter);
    their rewards stay in the baseline."""
    timeout: float = Field(300.0, gt=0)
    """Seconds for all functions of one group, and as many again for that of `steps` and that of advantage custom; those
    that are late are called again (P12)."""
    timeout_retries: int = Field(1, ge=0)
    """How often, each time for `timeout` seconds."""
    on_timeout: Literal["none", "zero", "fail"] = "none"
    """What a function that is still late then counts as, for a train group: None for each completion, or reward 0; or
    the attempt fails as `reward_timeout` and the group is sampled again, as a group of an evaluation always is."""
    max_concurrent_groups: int = Field(8, ge=1)
    """Groups that one reward actor scores at once."""

    @property
    def longest_seconds(self) -> float:
        """Until a group that a reward actor has begun with is scored or has failed."""
        rounds = 1 + (self.steps is not None) + (self.advantage.type == "custom")  # one after the other
        return rounds * self.timeout * (1 + self.timeout_retries)

    @model_validator(mode="after")
    def _steps_for_who_uses_them(self) -> "RewardConfig":
        if self.advantage.type == "process" and self.steps is None:
            raise ValueError("advantage process needs steps: {path: file.py:function}")
        if self.advantage.type not in ("process", "gae") and self.steps is not None:
            raise ValueError(f"steps are used by advantage process and gae, not by {self.advantage.type}")
        return self


class PackerConfig(Section):
    """Admission, order and packing."""

    groups_per_step: int = Field(8, ge=1)
    """Groups in every training step."""
    sequence_len: int = Field(2048, ge=2)
    """Tokens of a packed micro-batch; no sample may be longer."""
    order: Literal["ordinal", "arrival"] = "ordinal"
    """`ordinal`: step k takes the next groups in the order of their issue; `arrival`: as they come (P16)."""
    max_async_level: int = Field(1, ge=0)
    """Steps that sampling may run ahead of training; 0 alternates."""
    max_off_policy_steps: int = Field(8, ge=0)
    """Groups that lag more when they are packed are dropped as `stale` (P17)."""
    oversampling_factor: float = Field(1.0, ge=1)
    """With order arrival: ceil(groups_per_step × this) groups are asked for where a step needs groups_per_step, as far
    as max_off_policy_steps lets them be trained; the first ones win, the others train later."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal as `zero_variance`, and sample another example in their place (DAPO;
    ms-swift: dynamic_sample)."""
    online_difficulty_filtering: bool = False
    """Drop groups whose mean reward is exactly 1 as `too_easy`, exactly 0 as `too_hard`, and sample others likewise."""
    max_resample_times: int = Field(3, ge=0)
    """Groups that may be dropped by these two in one place of a step; the next one is taken as it is (P15)."""
    pools: PoolsConfig | None = None
    """Set easy and hard examples aside."""

    @model_validator(mode="after")
    def _surplus_is_of_use(self) -> "PackerConfig":
        if self.oversampling_factor > 1 and self.order == "ordinal":
            raise ValueError(
                f"oversampling_factor: {self.oversampling_factor} with order ordinal only makes groups older, since "
                "each step waits for its own ones; set order: arrival, or 1.0"
            )
        return self


class CheckpointConfig(Section):
    """Periodic checkpoints in Hugging Face or PEFT format."""

    interval: int = Field(50, ge=1)
    """Save after each multiple of this many steps; the last step is always saved."""
    keep_last: int = Field(3, ge=2)
    """Newest checkpoints kept; a run can go on from any of them."""
    keep_interval: int | None = Field(None, ge=1)
    """Besides, those of each multiple of this many steps are kept for good; the ledger keeps no groups for them."""
    timeout: float = Field(300.0, gt=0)
    """Seconds for which the last one is tried again when it can't be written (a full disk), until the run fails."""


class TeacherConfig(Section):
    """A frozen model beside the policy, with the same vocabulary, which a loss pulls the policy towards."""

    path: str = Field(min_length=1)
    """A name on the hub, or a directory, looked for like `model.path`."""
    dtype: Dtype = "bfloat16"
    """Precision of its weights and computation."""


class TrainerConfig(ObjectiveConfig):
    """What is minimised, and how."""

    max_steps: int = Field(ge=1)
    """Training steps of the run."""
    num_iterations: int = Field(1, ge=1)
    """Times that a step goes over its batch (GRPO's μ, as in TRL and ms-swift)."""
    num_minibatches: int = Field(1, ge=1)
    """Parts of a step's batch, each with an optimizer update of its own; whole groups where their number can be
    divided by it, else whole completions. A step has num_iterations × num_minibatches updates, all at its rate."""
    teacher: TeacherConfig | None = None
    """For losses with a teacher (on-policy distillation)."""
    num_ranks: int = Field(1, ge=1, le=1024)
    """Trainer processes, one gang, each with its share of a step's samples. They share `output_dir`."""
    sharding: Literal["none", "fsdp"] = "none"
    """`none`: each rank has the whole model (data parallel), and a step can be replayed to the bit; `fsdp`: each has a
    part of every weight, gradient and optimizer state, and gathers a layer while it computes it (FSDP2)."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up; linear and cosine end at `min_lr_ratio` at max_steps."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end ÷ learning_rate."""
    optimizer: OptimizerConfig = AdamWConfig()
    """The optimizer."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save."""
    gang_timeout: float = Field(20.0, gt=0)
    """Seconds in which all ranks of a gang are expected to be there, and to find each other (P19)."""
    mismatch: MismatchConfig = MismatchConfig()
    """When trainer and engine differ more than the same weights can."""


class EmbeddedEngineConfig(Section):
    """A transformers model in the inference process, behind HTTP: no server to install."""

    type: Literal["embedded"] = "embedded"
    max_sequences: int = Field(256, ge=1)
    """Completions decoded at once; more wait."""
    max_sequence_len: int = Field(2048, ge=2)
    """Tokens of prompt and completion at most."""
    max_prefill_tokens: int = Field(16384, ge=1)
    """Prompt tokens computed between two tokens of the running completions at most (one prompt may be longer). More
    admit waiting requests sooner; fewer keep the running ones going, and need less memory."""
    deterministic: bool = False
    """Bitwise the same tokens and logprobs for a request in any company and after a restart, given the same weights,
    number of threads and kind of machine. Costs all that requests gain from being decoded together: they run one at a
    time (`max_sequences` bounds the completions of each), and weights switch between two, as in update mode drain."""


class FakeEngineConfig(Section):
    """A deterministic engine for tests and dry runs: tokens are a hash of seed, position and policy; loads no model."""

    type: Literal["fake"] = "fake"
    vocab_size: int = Field(64, ge=4)
    """Token ids are drawn below this."""
    token_seconds: float = Field(0.0, ge=0)
    """Pause per decoded token."""


EngineConfig = Annotated[
    EmbeddedEngineConfig | VllmEngineConfig | SglangEngineConfig | FakeEngineConfig, Field(discriminator="type")
]


class InferenceConfig(Section):
    """The engine and its HTTP address."""

    engine: EngineConfig = EmbeddedEngineConfig()
    """Which engine serves the policy."""
    pool: EnginePoolConfig | None = None
    """Servers that come and go while the run goes on, an inference actor for each; none where empty."""
    noise: NoiseConfig | None = None
    """Noise on the norms of the policy that is served (QeRL), by engines `embedded` and `vllm`; none where empty."""
    host: str = "127.0.0.1"
    """Address that HTTP binds to."""
    advertise_host: str | None = None
    """Name under which others reach it; `host` where empty."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the first inference actor (the next takes the next one); 0: any free one."""
    request_timeout: float = Field(300.0, gt=0)
    """Seconds that a client waits for an answer."""
    api_key_env: str = ""
    """Environment variable with the key that requests must carry; empty: none is asked for."""
    tls_cert: str = ""
    """File of the certificate (PEM) with which HTTP is encrypted, and which clients trust; empty: plain HTTP."""
    tls_key: str = ""
    """File of its key; only inference actors read it."""

    @model_validator(mode="after")
    def _tls_whole(self) -> "InferenceConfig":
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key: set both or none")
        return self


class UpConfig(Section):
    """How many processes `actors up` starts on this machine, and when it gives up."""

    rollout: int = Field(1, ge=1)
    """Rollout actors."""
    reward: int = Field(1, ge=1)
    """Reward actors."""
    inference: int = Field(1, ge=1)
    """Inference actors."""
    torch_threads: dict[Literal["trainer", "inference"], int] = {}
    """Threads per process; by default the cores are shared out evenly."""
    max_restarts: int = Field(5, ge=0)
    """Restarts of one actor without 60 s of life between them before the run fails."""

    @model_validator(mode="after")
    def _threads_positive(self) -> "UpConfig":
        if any(threads < 1 for threads in self.torch_threads.values()):
            raise ValueError("torch_threads: at least 1 thread per process")
        return self
