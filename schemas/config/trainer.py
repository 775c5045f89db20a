"""Keys of the trainer: objective, optimizer, ranks, checkpoints, teacher."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.lr_schedule import LrScheduleConfig, LrScheduler
from schemas.config.mismatch import MismatchConfig
from schemas.config.model import Dtype
from schemas.config.objective import ObjectiveConfig
from schemas.config.optimizers import AdamWConfig, OptimizerConfig
from schemas.config.resume_classes import Free, Identity, Repack
from schemas.config.server_pool import ServerUrl


class CheckpointConfig(Section):
    """Checkpoints in Hugging Face format, or in PEFT format with `model.lora`."""

    interval: Free[int] = Field(50, ge=1)
    """Steps between two checkpoints. The last step is always saved."""
    interval_share: Free[float | None] = Field(None, gt=0, le=1)
    """Steps between two checkpoints as a share of the run, rounded up, in place of `interval` (TRL: save_steps below
    1). With 1 only the last step is saved. Empty: `interval` counts."""
    interval_epochs: Free[float | None] = Field(None, gt=0)
    """Epochs between two checkpoints, in place of `interval` (TRL, with 1: save_strategy epoch). Needs
    `trainer.max_epochs`. Empty: `interval` counts."""
    keep_last: Free[int | None] = Field(3, ge=1)
    """Number of newest checkpoints kept. A run can resume from each of these. An older checkpoint is removed after a
    newer checkpoint is whole on disk and has been read back. With 1, later damage of the checkpoint ends the run.
    Empty: all checkpoints are kept, and a run can resume from the newest 3."""
    keep_interval: Free[int | None] = Field(None, ge=1)
    """Steps between two checkpoints kept for good, in addition to `keep_last`. A run can resume from the newest
    `keep_last` checkpoints only, since the ledger has no groups for older ones. Empty: none."""
    timeout: Free[float] = Field(300.0, gt=0)
    """Seconds of retries while the last checkpoint can't be written, or the checkpoint folder can't be claimed at a
    start (full disk). After that the run fails."""

    @property
    def num_resumable(self) -> int:
        """Number of newest checkpoints from which a run can resume."""
        return 3 if self.keep_last is None else self.keep_last

    @model_validator(mode="after")
    def _one_interval(self) -> "CheckpointConfig":
        if self.interval_share is not None and self.interval_epochs is not None:
            raise ValueError("interval_share and interval_epochs are two intervals; remove one of the two")
        return self


class TeacherConfig(Section):
    """Teacher: a frozen model with the policy's vocabulary, towards which a loss pulls the policy."""

    path: str = Field(min_length=1)
    """Name on the Hugging Face hub, or directory, looked up like `model.path`."""
    dtype: Dtype = "bfloat16"
    """Precision of the teacher's weights and computation."""


class TeacherServerConfig(Section):
    """Server with `trainer.teacher`, in place of a copy of the teacher in each rank of the trainer.

    The server is vLLM's, or another with OpenAI's completions API and the field `prompt_logprobs`. Rollouts must be
    sampled at temperature 1, the temperature of the server's logprobs.
    """

    url: Free[ServerUrl]
    """URL of the server (http://host:port), without /v1."""
    model: Free[str] = ""
    """Name of the model at the server. Empty: `trainer.teacher.path`."""
    api_key_env: Free[str] = ""
    """Environment variable of the trainer with the API key. Empty: no key is sent."""
    max_concurrent: Free[int] = Field(16, ge=1)
    """Largest number of requests at the same time, per rank. A request has one sample."""
    request_timeout: Free[float] = Field(120.0, gt=0)
    """Seconds for one request."""
    timeout: Free[float] = Field(600.0, gt=0)
    """Seconds of retries for the samples of a step, while the server can't be reached or is overloaded. After that the
    run fails."""


class TrainerConfig(ObjectiveConfig):
    """Training: objective, updates per step, ranks, learning rate, optimizer, checkpoints."""

    max_steps: Free[int] = Field(0, ge=1, validate_default=False)
    """Number of training steps of the run. Required, unless `max_epochs` is set."""
    max_epochs: Free[float | None] = Field(None, gt=0)
    """Number of passes over the examples, in place of `max_steps`. An epoch has as many steps as its examples fill, the
    examples of all environments divided by `packer.groups_per_step` and rounded down; the run has max_epochs times as
    many, rounded up. All environments need a known number of examples. Empty: `max_steps` counts."""
    num_iterations: Identity[int] = Field(1, ge=1)
    """Number of passes over the batch of a step (GRPO's μ, as in TRL and ms-swift)."""
    num_minibatches: Identity[int] = Field(1, ge=1)
    """Parts of a step's batch, each with an optimizer update of its own. Parts are whole groups if num_minibatches
    divides `packer.groups_per_step`, else whole completions. A step has num_iterations × num_minibatches updates, all
    at the step's learning rate, or each at its own (`lr_schedule.unit`)."""
    teacher: Identity[TeacherConfig | None] = None
    """Teacher model, for loss `ref_kl`, `teacher_tau`, `distillation` and `environments[].ref_kl_weight`. Empty:
    none."""
    teacher_server: Free[TeacherServerConfig | None] = None
    """Server that computes the teacher's logprobs. Empty: each rank loads the teacher."""
    num_ranks: Repack[int] = Field(1, ge=1, le=1024)
    """Number of trainer processes (ranks). Each trains its share of a step's samples; all need the same
    `output_dir`."""
    context_parallel: Repack[int] = Field(1, ge=1, le=1024)
    """Ranks that compute each row of tokens together (Ulysses), a divisor of `num_ranks`. Each has a part of the
    row's tokens in the layers and a part of the heads in attention, so a row of `packer.sequence_len` tokens takes less
    memory on each. Samples are dealt to num_ranks / context_parallel groups of ranks. The model's attention heads must
    divide. Not with vision-language models, rotary embeddings that depend on the longest position (`dynamic`,
    `longrope`), or `teacher_server`."""
    tensor_parallel: Repack[int] = Field(1, ge=1, le=1024)
    """Ranks that compute each row together, each with a part of the weights of attention and MLP (Megatron), a divisor
    of `num_ranks`. In place of `context_parallel`, where layers are too large to be gathered. Needs `sharding: fsdp`, a
    plan in transformers for the architecture, and key heads that it divides. Not with dropout, DoRA or
    `model.compile`."""
    expert_parallel: Free[int] = Field(1, ge=1, le=1024)
    """Ranks that divide the experts of each layer among them, a divisor of `num_ranks` and of the number of experts.
    Tokens travel to the ranks of their experts, and experts are not gathered. Needs `sharding: fsdp`, a plan in
    transformers for the architecture, and transformers 5.19. Not with `model.compile`."""
    sharding: Free[Literal["none", "fsdp"]] = "none"
    """Distribution of the model over ranks. `none`: each rank has the whole model (data parallel), and a replayed step
    has the same bits, with `context_parallel` 1. `fsdp`: each rank has a part of every weight, gradient and optimizer
    state, and gathers a layer for its computation (FSDP2); not with `model.quantization` or `sft`."""
    router_replay: Repack[bool] = False
    """Whether the trainer's routers take the experts that the engine's routers chose for each token (R3). For models
    with experts, with engine vllm on a GPU, with `enable_prefix_caching`, or embedded. On the bus a token takes two
    bytes more for each expert in each layer, one byte with up to 128 experts. Not with `model.compile`. A reference or
    teacher with weights of its own chooses itself."""
    deterministic: Free[bool] = False
    """Steps on a GPU with the same bits each time, so that `actors replay` compares weights: slower, and an operation
    that torch can't compute so is an error. On a CPU steps have the same bits in either case."""
    learning_rate: Free[float] = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler: Free[LrScheduler] = "constant"
    """Learning rate schedule after the warm-up, with the names of transformers. `linear`, `cosine` and `polynomial`
    fall to learning_rate × min_lr_ratio at max_steps, `cosine_with_restarts` falls several times,
    `warmup_stable_decay` falls at the end of the run alone, and `inverse_sqrt` falls without end.
    `constant_with_warmup` is `constant`."""
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    """Counting of the schedule, in steps or in updates, and its shape."""
    warmup_steps: Free[int] = Field(0, ge=0)
    """Steps of the linear rise of the learning rate from 0 to `learning_rate`."""
    warmup_ratio: Free[float | None] = Field(None, ge=0, le=1)
    """Steps of this rise as a share of the run, rounded up, in place of `warmup_steps`. Empty: `warmup_steps`
    counts."""
    min_lr_ratio: Free[float] = Field(0.0, ge=0, le=1)
    """Final learning rate relative to `learning_rate`, for schedules that fall to an end. The warm-up of
    `warmup_stable_decay` starts from there too, as in transformers."""
    optimizer: OptimizerConfig = AdamWConfig()
    """Optimizer and its parameters. A map without `type` is AdamW."""
    max_grad_norm: Free[float | None] = Field(1.0, gt=0)
    """Maximum global norm of the gradients over all ranks; larger gradients are scaled down. Empty: no maximum; the
    norm is measured all the same."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Interval and number of checkpoints."""
    gang_timeout: Free[float] = Field(20.0, gt=0)
    """Seconds for all ranks to find each other at a start. After that all ranks start over (protocol rule P19)."""
    mismatch: MismatchConfig = MismatchConfig()
    """Limits of the difference between the logprobs of trainer and engine."""

    @property
    def row_groups(self) -> int:
        """Number of groups of ranks: those of a group compute the same rows together."""
        return self.num_ranks // self.ranks_per_row

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that compute a row together."""
        return self.context_parallel * self.tensor_parallel

    def row_group_of(self, rank: int) -> int:
        """Return the number of a rank's group. Neighbouring ranks, which may share a machine, are in one group."""
        return rank // self.ranks_per_row

    @property
    def rates_per_step(self) -> int:
        """Number of learning rates in a step: one, or one for each update (`lr_schedule.unit`)."""
        return self.num_iterations * self.num_minibatches if self.lr_schedule.unit == "update" else 1

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> "TrainerConfig":
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError("warmup_steps and warmup_ratio are two lengths of one warm-up; remove one of the two")
        is_given = (self.lr_schedule.decay_steps, self.lr_schedule.decay_ratio) != (None, None)
        if self.lr_scheduler == "warmup_stable_decay" and not is_given:
            raise ValueError(
                "lr_scheduler warmup_stable_decay needs the length of its decay; set lr_schedule.decay_steps or "
                "lr_schedule.decay_ratio"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _steps_not_counted_yet(cls, given: Any) -> Any:
        # 0 in a configuration that was written out before its epochs were counted
        if isinstance(given, dict) and given.get("max_epochs") is not None and given.get("max_steps") == 0:
            return {key: value for key, value in given.items() if key != "max_steps"}
        return given
