"""The whole configuration of a run, and the rules that span sections."""

from pathlib import Path

from pydantic import Field, model_validator

from schemas.config.actors import (
    EmbeddedEngineConfig,
    InferenceConfig,
    PackerConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
    UpConfig,
)
from schemas.config.advantages import AdvantageConfig, GaeAdvantageConfig, ProcessAdvantageConfig
from schemas.config.base import Section
from schemas.config.data import ArithmeticConfig, EnvironmentConfig, EvalConfig, JsonlConfig, ReverseTextConfig
from schemas.config.engines import VllmEngineConfig
from schemas.config.model import ModelConfig
from schemas.config.services import BusConfig, LedgerConfig, TelemetryConfig, WeightsConfig, is_loopback
from schemas.config.sglang import SglangEngineConfig


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
        problems = [problem for rule in RULES for problem in rule(self)]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def output(self) -> Path:
        """`output_dir` as an absolute path."""
        return Path(self.output_dir).absolute()

    @property
    def ledger_path(self) -> Path:
        """The ledger's file."""
        return Path(self.ledger.path).absolute() if self.ledger.path else self.output / "ledger.sqlite"


def _lag_rules_agree(config: RunConfig) -> list[str]:
    level, limit = config.packer.max_async_level, config.packer.max_off_policy_steps
    if limit < level:
        return [
            f"packer.max_off_policy_steps: {limit} is below packer.max_async_level {level}; all groups would be stale"
        ]
    return []


def _samples_fit(config: RunConfig) -> list[str]:
    problems = []
    if config.rollout.max_tokens >= config.packer.sequence_len:
        problems.append(
            f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt in "
            f"packer.sequence_len {config.packer.sequence_len}"
        )
    engine = config.inference.engine
    if isinstance(engine, EmbeddedEngineConfig):
        if config.rollout.max_tokens >= engine.max_sequence_len:
            problems.append(
                f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt in "
                f"inference.engine.max_sequence_len {engine.max_sequence_len}"
            )
        if config.rollout.group_size > engine.max_sequences:
            problems.append(
                f"rollout.group_size: {config.rollout.group_size} exceeds "
                f"inference.engine.max_sequences {engine.max_sequences}"
            )
    if isinstance(engine, VllmEngineConfig) and config.rollout.max_tokens >= (engine.max_model_len or 1 << 62):
        problems.append(
            f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt in "
            f"inference.engine.max_model_len {engine.max_model_len}"
        )
    return problems


def _every_engine_has_a_server(config: RunConfig) -> list[str]:
    engine, actors = config.inference.engine, config.up.inference
    if config.inference.pool is not None or not isinstance(engine, VllmEngineConfig | SglangEngineConfig):
        return []
    attached = isinstance(engine, SglangEngineConfig) or engine.urls
    if attached and len(engine.urls) != actors:
        return [f"inference.engine.urls: {len(engine.urls)} servers for up.inference {actors}; one for each is needed"]
    return []


def _pool_is_of_servers(config: RunConfig) -> list[str]:
    engine = config.inference.engine
    if config.inference.pool is None:
        return []
    if not isinstance(engine, VllmEngineConfig | SglangEngineConfig):
        return [f"inference.pool: engine {engine.type} runs in its actor; take inference.engine.type vllm or sglang"]
    problems = []
    if engine.urls:
        problems.append("inference.engine.urls: inference.pool names the servers; set one of both")
    if config.inference.port:
        problems.append(f"inference.port: {config.inference.port} with inference.pool, whose actors take any free one")
    return problems


def _broadcasts_are_taken(config: RunConfig) -> list[str]:
    engine = config.inference.engine
    if isinstance(engine, SglangEngineConfig) and config.weights.channel == "rendezvous":
        return ["weights.channel: rendezvous; engine sglang reads files, set weights.channel to filesystem"]
    return []


def _adapters_fit(config: RunConfig) -> list[str]:
    engine, lora = config.inference.engine, config.model.lora
    if isinstance(engine, VllmEngineConfig) and lora is not None and (engine.max_lora_rank or lora.rank) < lora.rank:
        return [f"inference.engine.max_lora_rank: {engine.max_lora_rank} is below model.lora.rank {lora.rank}"]
    return []


def _noise_where_it_is_made(config: RunConfig) -> list[str]:
    engine = config.inference.engine
    if config.inference.noise is None or isinstance(engine, EmbeddedEngineConfig):
        return []
    if not isinstance(engine, VllmEngineConfig):
        return [
            f"inference.noise: engine {engine.type} has none; remove it, or take inference.engine.type embedded or vllm"
        ]
    if config.model.lora is not None and (engine.urls or config.inference.pool is not None):
        servers = "inference.engine.urls" if engine.urls else "inference.pool"
        return [f"inference.noise: with model.lora the server must be started by its actor; remove it, or {servers}"]
    if config.model.lora is not None and any(word.startswith("--worker-ext") for word in engine.extra_args):
        return ["inference.engine.extra_args: with model.lora inference.noise needs --worker-extension-cls for itself"]
    return []


def _environment_names_differ(config: RunConfig) -> list[str]:
    labels = [environment.label for environment in config.environments]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    return [f"environments: two are called {label!r}; set environments[].name" for label in twice]


def _weights_set_for_all_or_none(config: RunConfig) -> list[str]:
    given = [environment.weight is not None for environment in config.environments]
    if any(given) and not all(given):
        return ["environments[].weight: set it for all environments or for none"]
    return []


def _plaintext_stays_on_loopback(config: RunConfig) -> list[str]:
    bus, control_host = config.bus, _control_host(config)
    if control_host is None or bus.keys or bus.allow_plaintext:
        return []
    hosts = {"bus.control": control_host, "bus.host": bus.host, "bus.advertise_host": bus.advertise_host}
    return [
        f"{key}: {host!r} is reachable from other machines and the bus is not encrypted; set bus.keys (`actors keys "
        "new DIR` makes some), stay on 127.0.0.1, or set bus.allow_plaintext: true on a network that only you can reach"
        for key, host in hosts.items()
        if host and not is_loopback(host)
    ]


def _control_host(config: RunConfig) -> str | None:
    """The host of the packer's address; None where the bus does not leave this machine's kernel."""
    scheme, _, address = config.bus.control.partition("://")
    return address.rpartition(":")[0] if scheme == "tcp" else None


def _minibatches_have_completions(config: RunConfig) -> list[str]:
    parts, completions = config.trainer.num_minibatches, config.packer.groups_per_step * config.rollout.group_size
    sft = config.trainer.sft
    problems = []
    if parts > completions:
        problems.append(
            f"trainer.num_minibatches: {parts}, but a step has {completions} completions, packer.groups_per_step "
            f"{config.packer.groups_per_step} × rollout.group_size {config.rollout.group_size}"
        )
    if sft is not None and sft.batch_size < parts:
        problems.append(
            f"trainer.sft.batch_size: {sft.batch_size} examples can't be shared out to trainer.num_minibatches {parts}"
        )
    return problems


def _teacher_for_a_loss_that_reads_it(config: RunConfig) -> list[str]:
    """`custom` may read one or not."""
    loss, teacher = config.trainer.loss, config.trainer.teacher
    tau = getattr(loss, "teacher_tau", 0.0)
    reads = loss.type == "ref_kl" or tau > 0
    if reads and teacher is None:
        key = f"trainer.loss.teacher_tau: {tau:g}" if tau else f"trainer.loss: {loss.type}"
        return [f"{key} needs a teacher; set trainer.teacher.path"]
    if teacher is not None and not reads and loss.type != "custom":
        return [
            f"trainer.teacher: trainer.loss {loss.type} does not read it; set type ref_kl there, or teacher_tau > 0"
        ]
    return []


def _shards_hold_what_they_can(config: RunConfig) -> list[str]:
    trainer = config.trainer
    if trainer.sharding == "none":
        return []
    problems = []
    if trainer.optimizer.type == "adamw_8bit":
        problems.append("trainer.sharding: fsdp can't spread the blocks of trainer.optimizer adamw_8bit; use adamw")
    if config.model.quantization is not None:
        problems.append("trainer.sharding: fsdp can't spread the blocks of model.quantization; remove one of them")
    if trainer.sft is not None:
        problems.append("trainer.sharding: fsdp needs as many rows on each rank, which trainer.sft does not have")
    return problems


RULES = (
    _shards_hold_what_they_can,
    _lag_rules_agree,
    _samples_fit,
    _every_engine_has_a_server,
    _pool_is_of_servers,
    _broadcasts_are_taken,
    _adapters_fit,
    _noise_where_it_is_made,
    _environment_names_differ,
    _weights_set_for_all_or_none,
    _plaintext_stays_on_loopback,
    _minibatches_have_completions,
    _teacher_for_a_loss_that_reads_it,
)


def warnings(config: RunConfig) -> list[str]:
    """What is allowed and probably not meant, in the form of an error."""
    found = []
    if config.packer.order == "arrival" and config.packer.max_off_policy_steps < 8:
        found.append(
            f"packer.max_off_policy_steps: {config.packer.max_off_policy_steps} with packer.order arrival drops "
            "groups that were long in the making; 8 or more is usual"
        )
    endless = all(isinstance(environment, ReverseTextConfig | ArithmeticConfig) for environment in config.environments)
    if config.packer.pools is not None and endless:
        found.append("packer.pools: examples of these environments are generated and never end, so none is set aside")
    if config.rollout.group_size == 1 and _compares_completions(config.reward.advantage):
        found.append(
            f"rollout.group_size: with 1 completion per group every advantage of reward.advantage "
            f"{config.reward.advantage.type} is 0; use 2 or more"
        )
    found += [
        f"rollout.{key}: {getattr(config.rollout, key)} cuts the distribution that logprobs are taken of, so the "
        f"importance ratio of trainer.loss is biased; {exact} is exact"
        for key, exact in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
        if getattr(config.rollout, key) != exact
    ]
    trainer = config.trainer
    if trainer.sharding == "fsdp" and trainer.num_ranks == 1:
        found.append("trainer.sharding: fsdp with trainer.num_ranks 1 has nothing to share out")
    found += [
        f"trainer.{key}: does nothing with trainer.loss {trainer.loss.type}"
        for key in sorted(trainer.loss.ignores)
        if getattr(trainer, key) is not None
    ]
    engine = config.inference.engine
    if config.model.quantization is not None and isinstance(engine, VllmEngineConfig) and engine.quantization is None:
        found.append(
            f"inference.engine.quantization: vLLM serves the base model as it is, and adapters are trained on it as "
            f"model.quantization {config.model.quantization.type} has it; set bitsandbytes, or the two differ"
        )
    if config.model.lora is not None and config.model.lora.dropout > 0:
        found.append("model.lora.dropout: above 0 the trainer's logprobs differ from the engine's")
    needs_file = [e for e in config.environments if isinstance(e, JsonlConfig) and e.eval_path is None]
    if config.eval.num_prompts and needs_file:
        found.append(
            f"environments[].eval_path: not set for {needs_file[0].label}, so nothing of it is held out for eval"
        )
    if not (is_loopback(config.inference.host) or config.inference.api_key_env):
        found.append(
            f"inference.host: {config.inference.host!r} is reachable from other machines, and whoever reaches it can "
            "sample; set inference.api_key_env, and inference.tls_cert where others could listen"
        )
    return found + _reached_by_nobody(config)


def _compares_completions(advantage: AdvantageConfig) -> bool:
    """Process supervision compares steps, and the discounted reward nothing unless it is told to."""
    discounted = isinstance(advantage, GaeAdvantageConfig) and advantage.reward_norm == "none"
    return not (discounted or isinstance(advantage, ProcessAdvantageConfig))


def _reached_by_nobody(config: RunConfig) -> list[str]:
    """Addresses on loopback in a run that has been opened to other machines."""
    control_host = _control_host(config)
    if control_host is None or is_loopback(control_host):
        return []
    return [
        f"{key}.host: {section.host!r} can't be reached from other machines, which bus.control {config.bus.control} is "
        f"for; set it to an address of each machine's network, or 0.0.0.0 and {key}.advertise_host"
        for key, section in (("bus", config.bus), ("inference", config.inference))
        if is_loopback(section.host) and section.advertise_host is None
    ]
