"""Configuration of a run: all sections together."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationInfo, model_validator

from schemas.config.actors import PackerConfig, RewardConfig, RolloutConfig
from schemas.config.base import Section
from schemas.config.callbacks import CallbackConfig
from schemas.config.data import EvalConfig
from schemas.config.environments import EnvironmentConfig
from schemas.config.inference import InferenceConfig
from schemas.config.launch import LaunchConfig
from schemas.config.model import ModelConfig
from schemas.config.push_to_hub import PushToHubConfig
from schemas.config.resume_classes import Free, Identity
from schemas.config.rules import problems_of
from schemas.config.scale import ScaleConfig, ScaledRole
from schemas.config.services import BusConfig, LedgerConfig, TelemetryConfig, WeightsConfig
from schemas.config.trainer import TrainerConfig
from schemas.config.up import UpConfig

RESOLVED_CONTEXT = "resolved"
"""Key of pydantic's validation context: True for a configuration that a run has written."""


@dataclass(frozen=True)
class Evaluation:
    """Environment to evaluate, and how."""

    environment: EnvironmentConfig
    keys: EvalConfig
    """Keys of `eval`, with those of the source in their places."""


class RunConfig(Section):
    """Configuration of one run, in one YAML file."""

    name: Free[str] = Field("run", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the run in logs and metrics: letters, digits, `_`, `.` and `-`."""
    seed: Identity[int] = Field(0, ge=0, lt=2**31)
    """Seed of every random choice of the run."""
    output_dir: Free[str] = "outputs/run"
    """Directory of everything that the run writes, relative to the current directory. If an earlier run is there, that
    run is resumed. Other files in the directory are left alone; a file that is in the way and was not written by a run
    is an error."""
    model: ModelConfig
    """Policy model: path, precision, adapters."""
    environments: Identity[list[EnvironmentConfig]] = Field(min_length=1)
    """Sources of examples. Each training example is drawn from one of them, in proportion to its `weight`."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling: group size, lengths, temperature."""
    reward: RewardConfig = RewardConfig()
    """Scoring: reward functions and advantages. Only environments of several turns have rewards of their own."""
    packer: PackerConfig = PackerConfig()
    """Batches: groups per training step, their order, and how far sampling may run ahead of training."""
    trainer: TrainerConfig
    """Training: steps, loss, optimizer, checkpoints."""
    inference: InferenceConfig = InferenceConfig()
    """Inference: the engine that serves the policy, and its address."""
    weights: WeightsConfig = WeightsConfig()
    """Weight transfer: channel, directory, and treatment of running completions at an update."""
    eval: EvalConfig = EvalConfig()
    """Evaluation of the policy on held-out prompts."""
    ledger: LedgerConfig = LedgerConfig()
    """Ledger, the packer's record of all groups: path and durability."""
    bus: BusConfig = BusConfig()
    """Network between the processes: addresses, timeouts, encryption."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Logs, metrics and samples of completions."""
    callbacks: Free[list[CallbackConfig]] = []
    """Objects of the user that are told the events of the run."""
    push_to_hub: Free[PushToHubConfig | None] = None
    """Uploads of checkpoints to the Hugging Face hub. Empty: none."""
    up: UpConfig = UpConfig()
    """Processes that `actors up` starts on this machine: numbers, GPUs, restarts."""
    scale: ScaleConfig = ScaleConfig()
    """Roles whose number of processes follows what limits the run, between a minimum and a maximum. Empty: none."""
    launch: LaunchConfig = LaunchConfig()
    """Nodes of a cluster: the request for them, and the processes that each of them runs."""

    @model_validator(mode="after")
    def _sections_agree(self, info: ValidationInfo) -> "RunConfig":
        # all problems at once: one per line, so that a user corrects the file in one go
        problems = problems_of(self)
        # a file that a run has written has the steps that follow from the epochs too
        if not (info.context or {}).get(RESOLVED_CONTEXT) and self.trainer.max_epochs and self.trainer.max_steps:
            problems.append(
                "trainer.max_epochs: trainer.max_steps is set too; remove one of the two (as an override: "
                "trainer.max_epochs=null)"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def with_steps(self, max_steps: int) -> "RunConfig":
        """Return a copy with the number of steps counted for `trainer.max_epochs`."""
        return self.model_copy(update={"trainer": self.trainer.model_copy(update={"max_steps": max_steps})})

    @property
    def processes(self) -> dict[ScaledRole, int]:
        """Processes at the start of a run, by role: `up`, within the limits of `scale`."""
        found: dict[ScaledRole, int] = {
            "inference": self.up.inference,
            "reward": self.up.reward,
            "rollout": self.up.rollout,
        }
        roles = self.scale.roles
        return {
            role: min(max(number, roles[role].min), roles[role].most) if role in roles else number
            for role, number in found.items()
        }

    @property
    def trained(self) -> list[EnvironmentConfig]:
        """Environments that are trained on."""
        return [one for one in self.environments if one.train]

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """Evaluations with at least a prompt, by the name of their results."""
        environments = {one.label: one for one in self.environments}
        found = {label: Evaluation(one, self.eval) for label, one in environments.items()}
        for source in self.eval.sources:
            found[source.name or source.environment] = Evaluation(
                environments[source.environment], self.eval.of_source(source)
            )
        return {label: one for label, one in found.items() if one.keys.num_prompts}

    @property
    def environments_by_label(self) -> dict[str, EnvironmentConfig]:
        """Environments by label, and by the names of evaluations."""
        found = {one.label: one for one in self.environments}
        return found | {label: one.environment for label, one in self.evaluations.items()}

    @property
    def output(self) -> Path:
        """`output_dir` as an absolute path."""
        return Path(self.output_dir).absolute()

    @property
    def control_host(self) -> str | None:
        """Host of the packer's control address; None if the bus is not on tcp and so never leaves this machine."""
        scheme, _, address = self.bus.control.partition("://")
        return address.rpartition(":")[0] if scheme == "tcp" else None

    @property
    def ledger_path(self) -> Path:
        """Absolute path of the ledger's file."""
        return Path(self.ledger.path).absolute() if self.ledger.path else self.output / "ledger.sqlite"
