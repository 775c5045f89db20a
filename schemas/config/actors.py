"""One section per actor."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.config.advantages import AdvantageConfig, MeanAdvantageConfig
from schemas.config.base import Section
from schemas.config.data import RewardFunctionConfig
from schemas.config.objective import ObjectiveConfig


class RolloutConfig(Section):
    """Sampling of groups."""

    group_size: int = Field(16, ge=1)
    """Completions per prompt (TRL: num_generations, Surogate: rollouts_per_example)."""
    max_tokens: int = Field(512, ge=1)
    """New tokens per completion at most."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of train groups; logprobs are those of the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the importance ratio is biased."""
    max_concurrent_groups: int = Field(16, ge=1)
    """Groups that one rollout actor samples at once."""
    group_timeout: float = Field(300.0, gt=0)
    """Seconds until an attempt at a group fails as `timeout` (P12)."""
    completion_retries: int = Field(2, ge=0)
    """Tries again, in place, of a request that failed, before the whole attempt fails (P11)."""


class RewardConfig(Section):
    """Scoring of groups and their advantages."""

    functions: list[RewardFunctionConfig] = Field(min_length=1)
    """Summed with their weights."""
    advantage: AdvantageConfig = MeanAdvantageConfig()
    """How rewards of a group become advantages."""
    timeout: float = Field(300.0, gt=0)
    """Seconds for all functions of one group; past it the attempt fails as `reward_timeout` (P12)."""
    max_concurrent_groups: int = Field(8, ge=1)
    """Groups that one reward actor scores at once."""


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


class AdamWConfig(Section):
    """AdamW, decoupled weight decay."""

    type: Literal["adamw"] = "adamw"
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Of matrices; biases and norms are not decayed."""


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


class TrainerConfig(ObjectiveConfig):
    """What is minimised, and how."""

    max_steps: int = Field(ge=1)
    """Training steps of the run."""
    num_ranks: int = Field(1, ge=1, le=1024)
    """Trainer processes, one gang: data-parallel, each has the whole model. They share `output_dir`."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up; linear and cosine end at `min_lr_ratio` at max_steps."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end ÷ learning_rate."""
    optimizer: AdamWConfig = AdamWConfig()
    """The optimizer."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save."""
    gang_timeout: float = Field(20.0, gt=0)
    """Seconds in which all ranks of a gang are expected to be there, and to find each other (P19)."""


class EmbeddedEngineConfig(Section):
    """A transformers model in the inference process, behind HTTP: no server to install."""

    type: Literal["embedded"] = "embedded"
    max_sequences: int = Field(256, ge=1)
    """Completions decoded at once; more wait."""
    max_sequence_len: int = Field(2048, ge=2)
    """Tokens of prompt and completion at most."""
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


EngineConfig = Annotated[EmbeddedEngineConfig | FakeEngineConfig, Field(discriminator="type")]


class InferenceConfig(Section):
    """The engine and its HTTP address."""

    engine: EngineConfig = EmbeddedEngineConfig()
    """Which engine serves the policy."""
    host: str = "127.0.0.1"
    """Address that HTTP binds to."""
    advertise_host: str | None = None
    """Name under which others reach it; `host` where empty."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the first inference actor (the next takes the next one); 0: any free one."""
    request_timeout: float = Field(300.0, gt=0)
    """Seconds that a client waits for an answer."""


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
