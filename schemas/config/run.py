"""The whole configuration of a run."""

from pathlib import Path

from pydantic import Field, model_validator

from schemas.config.actors import InferenceConfig, PackerConfig, RewardConfig, RolloutConfig, TrainerConfig, UpConfig
from schemas.config.base import Section
from schemas.config.data import EnvironmentConfig, EvalConfig
from schemas.config.model import ModelConfig
from schemas.config.rules import problems_of
from schemas.config.services import BusConfig, LedgerConfig, TelemetryConfig, WeightsConfig


class RunConfig(Section):
    """One run, one file."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in logs and metrics."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Every random choice of the run follows from it."""
    output_dir: str = "outputs/run"
    """What the run leaves behind (relative to where the command is given)."""
    model: ModelConfig
    """Which policy is trained."""
    environments: list[EnvironmentConfig] = Field(min_length=1)
    """What is sampled from; train groups are shared out by `weight`."""
    rollout: RolloutConfig = RolloutConfig()
    """How groups are sampled."""
    reward: RewardConfig
    """How groups are scored, and what becomes of the scores."""
    packer: PackerConfig = PackerConfig()
    """How many groups make a step, in which order, and how far sampling may run ahead."""
    trainer: TrainerConfig
    """How long and how the policy is optimised, and when it is saved."""
    inference: InferenceConfig = InferenceConfig()
    """What serves the policy, and where."""
    weights: WeightsConfig = WeightsConfig()
    """How a new version of the policy reaches the engines."""
    eval: EvalConfig = EvalConfig()
    """When and how the policy is measured on held-out prompts."""
    ledger: LedgerConfig = LedgerConfig()
    """Where the record of all groups lies, and what it survives."""
    bus: BusConfig = BusConfig()
    """How the actors reach each other, and when one counts as gone."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What is logged, measured and kept of the completions."""
    up: UpConfig = UpConfig()
    """How many processes `actors up` starts on this machine."""

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        problems = problems_of(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def output(self) -> Path:
        """`output_dir` as an absolute path."""
        return Path(self.output_dir).absolute()

    @property
    def control_host(self) -> str | None:
        """The host of the packer's address; None where the bus does not leave this machine's kernel."""
        scheme, _, address = self.bus.control.partition("://")
        return address.rpartition(":")[0] if scheme == "tcp" else None

    @property
    def ledger_path(self) -> Path:
        """The ledger's file."""
        return Path(self.ledger.path).absolute() if self.ledger.path else self.output / "ledger.sqlite"
