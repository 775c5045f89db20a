"""What sections must agree on: each rule returns what is wrong, in words that name the key to change."""

from typing import TYPE_CHECKING

from schemas.config.actors import EmbeddedEngineConfig
from schemas.config.engines import VllmEngineConfig
from schemas.config.services import is_loopback
from schemas.config.sglang import SglangEngineConfig

if TYPE_CHECKING:
    from schemas.config.run import RunConfig


def _lag_rules_agree(config: "RunConfig") -> list[str]:
    level, limit = config.packer.max_async_level, config.packer.max_off_policy_steps
    if limit < level:
        return [
            f"packer.max_off_policy_steps: {limit} is below packer.max_async_level {level}; all groups would be stale"
        ]
    return []


def _samples_fit(config: "RunConfig") -> list[str]:
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


def _every_engine_has_a_server(config: "RunConfig") -> list[str]:
    engine, actors = config.inference.engine, config.up.inference
    if config.inference.pool is not None or not isinstance(engine, VllmEngineConfig | SglangEngineConfig):
        return []
    attached = isinstance(engine, SglangEngineConfig) or engine.urls
    if attached and len(engine.urls) != actors:
        return [f"inference.engine.urls: {len(engine.urls)} servers for up.inference {actors}; one for each is needed"]
    return []


def _pool_is_of_servers(config: "RunConfig") -> list[str]:
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


def _broadcasts_are_taken(config: "RunConfig") -> list[str]:
    engine = config.inference.engine
    if isinstance(engine, SglangEngineConfig) and config.weights.channel == "rendezvous":
        return ["weights.channel: rendezvous; engine sglang reads files, set weights.channel to filesystem"]
    return []


def _adapters_fit(config: "RunConfig") -> list[str]:
    engine, lora = config.inference.engine, config.model.lora
    if isinstance(engine, VllmEngineConfig) and lora is not None and (engine.max_lora_rank or lora.rank) < lora.rank:
        return [f"inference.engine.max_lora_rank: {engine.max_lora_rank} is below model.lora.rank {lora.rank}"]
    return []


def _noise_where_it_is_made(config: "RunConfig") -> list[str]:
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


def _environment_names_differ(config: "RunConfig") -> list[str]:
    labels = [environment.label for environment in config.environments]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    return [f"environments: two are called {label!r}; set environments[].name" for label in twice]


def _weights_set_for_all_or_none(config: "RunConfig") -> list[str]:
    given = [environment.weight is not None for environment in config.environments]
    if any(given) and not all(given):
        return ["environments[].weight: set it for all environments or for none"]
    return []


def _plaintext_stays_on_loopback(config: "RunConfig") -> list[str]:
    bus, control_host = config.bus, config.control_host
    if control_host is None or bus.keys or bus.allow_plaintext:
        return []
    hosts = {"bus.control": control_host, "bus.host": bus.host, "bus.advertise_host": bus.advertise_host}
    return [
        f"{key}: {host!r} is reachable from other machines and the bus is not encrypted; set bus.keys (`actors keys "
        "new DIR` makes some), stay on 127.0.0.1, or set bus.allow_plaintext: true on a network that only you can reach"
        for key, host in hosts.items()
        if host and not is_loopback(host)
    ]


def _minibatches_have_completions(config: "RunConfig") -> list[str]:
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


def _teacher_for_a_loss_that_reads_it(config: "RunConfig") -> list[str]:
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


def _shards_hold_what_they_can(config: "RunConfig") -> list[str]:
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
